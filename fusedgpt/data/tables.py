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
from fusedgpt.errors import shown

LONGEST_ROW = 2**25  # most characters of a line of a table, and of a cell of a CSV


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
            yield from filter(str.strip, _lines(text))
        else:
            yield from _csv(text, tabs=kind == ".tsv")


def _lines(text):
    for line in iter(lambda: text.readline(LONGEST_ROW), ""):
        if len(line) == LONGEST_ROW:
            raise ValueError(f"a line has over {LONGEST_ROW:,} characters")
        yield line


def _csv(text, tabs):
    """The rows of a CSV by the names of its first line. Semicolons or tabs may separate cells, as Excel writes them.

    A tab-separated table has no quotation marks (IANA, text/tab-separated-values).
    """
    csv.field_size_limit(LONGEST_ROW)
    lines = _lines(text)
    first = next(lines, "")
    how = {"delimiter": max(",;\t", key=first.count), "strict": True}
    if tabs:
        how = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    yield from csv.DictReader(itertools.chain([first], lines), **how)


def _json(text):
    """The rows of a JSON array, of JSON lines, or one value."""
    if "}\n{" in text:
        return filter(str.strip, text.split("\n"))
    value = json.loads(text)
    return value if isinstance(value, list) else [value]


def _parquet(file, column):
    import pyarrow.parquet

    # do not read ahead: a row group can be the whole file
    table = pyarrow.parquet.ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)
    there = {column, column.partition(".")[0]}.intersection(table.schema_arrow.names)
    for batch in table.iter_batches(batch_size=64, columns=sorted(there) or None):
        yield from batch.to_pylist()


def text_of(row: Any, column: str) -> str:
    """The text at the path `column` of a row, such as messages.content; "" for a null.

    Texts of a list are joined by line ends. Raises ValueError if there is none.
    """
    if isinstance(row, str):
        row = json.loads(row)
    if isinstance(row, dict) and None in row:
        raise ValueError("it has more cells than the first line")
    return _at(row, column, row, column)


def _at(value, path, row, column):  # no closure: that would keep the row until garbage is collected
    if isinstance(value, list):
        return "\n".join(_at(each, path, row, column) for each in value)
    if path and isinstance(value, dict):
        name = path if path in value else path.partition(".")[0]  # a name may have a dot in it
        if name in value:
            return _at(value[name], path[len(name) + 1 :], row, column)
    if value is None or (isinstance(value, str) and not path):
        return value or ""
    if path:
        raise ValueError(f"it has no {column!r}{_another(row)}")
    raise ValueError(f"it has {shown(value)} where its text should be")


def _another(row):
    """Which column to name: that with most text."""
    lengths = collections.Counter()

    def add(value, path):
        if isinstance(value, str):
            lengths[path] += len(value)
        elif isinstance(value, dict):
            for name, each in value.items():
                add(each, f"{path}.{name}".lstrip("."))
        elif isinstance(value, list):
            for each in value:
                add(each, path)

    add(row, "")
    if not lengths:
        return f", and no text elsewhere: {shown(row)}"
    return f": name another column, as in --text_column={shlex.quote(max(lengths, key=lengths.get))}"
