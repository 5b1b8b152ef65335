"""The rows of tables: CSV, JSON and Parquet, one at a time, in bounded memory."""

import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

KINDS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
# Most characters of a JSON value, so that a broken one does not pull the whole file into memory, where a character
# takes up to 4 bytes, and {} takes 72.
LONGEST_VALUE = 2**26
LONGEST_ROW = 2**24  # most characters of a CSV row: csv takes 4 bytes for each, and some 50 for a short cell
MOST_CELLS = 2**20
ROWS = 8  # of Parquet to read at once. A file may store a text once for thousands, but in memory each row has a copy
BUFFER = 2**20  # bytes of Parquet to read at a time
SEPARATORS = re.compile(r"[\s,\[\]]*")  # between the objects of a JSON array, or of JSON lines


def parquet_rows(file: BinaryIO, column: str) -> Iterator[dict]:
    """The rows of a Parquet file: of `column` alone if there is one, otherwise of all."""
    import pyarrow.parquet

    # do not read ahead: a row group can be the whole file
    parquet = pyarrow.parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
    _require_once(column, parquet.schema_arrow.names)
    columns = [column] if column in parquet.schema_arrow.names else None
    for batch in parquet.iter_batches(batch_size=ROWS, columns=columns):
        yield from batch.to_pylist()


def _require_once(column, names):
    if names.count(column) > 1:  # a dict would keep the last one
        raise ValueError(f"{names.count(column)} columns are called {column!r}")


def csv_rows(blocks: Iterable[str], delimiter: str = ",", column: str = "text") -> Iterator[dict]:
    """The rows of a CSV file, by the columns of its first line. Missing cells are None, further ones are under None.

    Raises ValueError if several columns are called `column`, and csv.Error if the file is damaged.

    Semicolons or tabs separate cells if the first line has some and no `delimiter`: so Excel writes a .csv in much of
    Europe, and its "Unicode text".
    """
    every_line = _lines(blocks)
    first = next(every_line, "")
    if delimiter not in first:
        delimiter = max(delimiter, ";", "\t", key=first.count)
    characters = cells = 0

    def lines():
        nonlocal characters, cells
        for line in itertools.chain([first], every_line):
            characters, cells = characters + len(line), cells + line.count(delimiter)
            if characters > LONGEST_ROW:  # a row may have several lines, in quotes
                raise csv.Error(f"a row is longer than {LONGEST_ROW:,} characters")
            if cells > MOST_CELLS:
                raise csv.Error(f"a row has more than {MOST_CELLS:,} times {delimiter!r}")
            yield line

    csv.field_size_limit(LONGEST_ROW)
    header = None
    for row in csv.reader(lines(), delimiter=delimiter, strict=True):
        characters = cells = 0
        if header is None:
            header = row or None
            _require_once(column, row)
        elif row:
            beyond = {None: row[len(header) :]} if len(row) > len(header) else {}
            yield dict.fromkeys(header) | dict(zip(header, row)) | beyond


def _lines(blocks):
    """Lines with their line ends. A line longer than LONGEST_ROW comes in parts."""
    parts, size = [], 0  # of a line that goes on in the next block
    for block in blocks:
        first, *more = block.split("\n")
        parts.append(first)
        size += len(first)
        if more:
            yield "".join(parts) + "\n"
            yield from (line + "\n" for line in more[:-1])
            parts, size = [more[-1]], len(more[-1])
        elif size > LONGEST_ROW:
            yield "".join(parts)
            parts, size = [], 0
    if size:
        yield "".join(parts)


def json_values(blocks: Iterable[str]) -> Iterator[Any]:
    """The values of a JSON array, or of JSON lines."""
    decode, parts, size, wanted, arrays = json.JSONDecoder().raw_decode, [], 0, 0, 0
    for block in itertools.chain(blocks, [None]):
        parts.append(block or "")
        size += len(parts[-1])
        if size < wanted and block is not None:
            continue
        text, at, parts = "".join(parts), 0, []
        while True:
            gap = SEPARATORS.match(text, at)
            at, arrays = gap.end(), arrays + gap.group().count("[") - gap.group().count("]")
            if at == len(text):
                break
            try:
                value, at = decode(text, at)
            except json.JSONDecodeError:
                if block is None or len(text) - at > LONGEST_VALUE:
                    raise
                # the value may go on in the next block; wait until the text is twice as long, to save attempts
                wanted = min(2 * (len(text) - at), LONGEST_VALUE + 1)
                break
            wanted = 0
            yield value
        parts, size = [text[at:]], len(text) - at
    if arrays:
        raise EOFError("the file ends within an array")
