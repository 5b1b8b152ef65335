"""The rows of tables, and the text in a row: CSV and TSV by Python's `csv`, JSON by `json`, Parquet by pyarrow."""

import collections
import csv
import io
import itertools
import json
import shlex
from collections.abc import Iterator
from typing import Any, BinaryIO

from fusedgpt.data.documents import CHUNK

LONGEST_CELL = 2**25  # most characters of a cell of a CSV; without this, `csv` takes 131,072


def rows(content: BinaryIO, kind: str, encoding: str, column: str) -> Iterator[Any]:
    """The rows of a table of a kind in texts.TABLES. Lines of JSON are not parsed: `text_of` does that."""
    if kind == ".parquet":
        yield from _parquet(content, column)
        return
    # csv finds line ends itself, because a cell may hold some
    with io.TextIOWrapper(content, encoding, newline="" if kind == ".csv" else None) as text:
        if kind == ".json":
            yield from _json(text.read())
        elif kind == ".jsonl":
            yield from filter(str.strip, text)
        else:
            yield from _csv(text, tabs=kind == ".tsv")


def _csv(text, tabs):
    """The rows of a CSV by the names of its first line. Semicolons or tabs may separate cells, as Excel writes them."""
    csv.field_size_limit(LONGEST_CELL)
    if tabs:  # such a table has no quotation marks (IANA, text/tab-separated-values)
        return csv.DictReader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
    first = text.readline()
    return csv.DictReader(itertools.chain([first], text), delimiter=max(",;\t", key=first.count), strict=True)


def _json(text):
    """The rows of a JSON array, of JSON lines, or one value, as lines."""
    if "}\n{" in text:
        return filter(str.strip, text.split("\n"))
    value = json.loads(text)
    return map(json.dumps, value if isinstance(value, list) else [value])


def _parquet(file, column):
    import pyarrow.parquet

    # do not read ahead: a row group can be the whole file
    table = pyarrow.parquet.ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)
    there = {column, column.partition(".")[0]}.intersection(table.schema_arrow.names)
    for batch in table.iter_batches(batch_size=64, columns=sorted(there) or None):
        yield from batch.to_pylist()


def text_of(row: Any, column: str) -> str:
    """The text at the path `column` (messages.content) of a row, "" for a null. Raises ValueError if there is none."""
    if isinstance(row, str) and isinstance(row := json.loads(row), str):
        return row  # a text alone has no columns
    if isinstance(row, dict) and None in row:
        raise ValueError("it has more cells than the first line")
    if isinstance(row, dict) and isinstance(row.get(column), str):
        return row[column]  # whatever is beside it, as in a column text.lang
    values = [*_values(row)]
    below = any(isinstance(value, str) and path.startswith(f"{column}.") for path, value in values)
    found = [value for path, value in values if path == column or (value is None and column.startswith(f"{path}."))]
    if found and not below and all(isinstance(value, str | None) for value in found):
        return "\n".join(value or "" for value in found)
    what, lengths = f"it has no text at {column!r}" + " alone, but below it too" * below, collections.Counter()
    for path, value in values:
        if isinstance(value, str) and path != column:
            lengths[path] += len(value)
    if lengths:
        what += f": name another column, as in --text_column={shlex.quote(max(lengths, key=lengths.get))}"
    raise ValueError(what)


def _values(value, path=""):
    """The path and value of each text, number or null in a row."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _values(each, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for each in value or [None]:
            yield from _values(each, path)
    else:
        yield path, value
