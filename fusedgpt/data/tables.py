"""The rows of tables, and the text in a row: CSV and TSV by Python's `csv`, JSON by `json`, Parquet by pyarrow."""

import collections
import csv
import io
import itertools
import json
import shlex
from collections.abc import Iterator
from typing import Any, BinaryIO

from fusedgpt.data.decoding import CHUNK
from fusedgpt.data.inputs import SHOWN
from fusedgpt.errors import first_line, shown

LONGEST_ROW = 2**25  # most characters of a line of a table, and of a cell of a CSV
LONGEST_JSON = 2**29  # most characters of an array, which is read whole


class Unreadable(ValueError):
    """What is wrong with a row."""


def rows(content: BinaryIO, kind: str, encoding: str, column: str) -> Iterator[Any]:
    """The rows of a table of a kind in inputs.TABLES: what they are, or an Unreadable."""
    if kind == ".parquet":
        yield from _parquet(content, column)
        return
    # csv finds line ends itself, because a cell may hold some
    with io.TextIOWrapper(content, encoding, newline="" if kind == ".csv" else None) as text:
        if kind == ".json":
            yield from _json(text.read(LONGEST_JSON))
        elif kind == ".jsonl":
            yield from (_value(line) for line in _lines(text) if line.strip())
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
    for row in csv.DictReader(itertools.chain([first], lines), **how):
        yield Unreadable("has more cells than the first line") if None in row else row


def _value(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"is no JSON ({first_line(error)})")


def _json(text):
    """The rows of a JSON array, of JSON lines, or one value."""
    if len(text) == LONGEST_JSON:
        raise ValueError(f"it has over {LONGEST_JSON:,} characters, and is read whole: write its rows to a .jsonl")
    value = _value(text)
    if isinstance(value, Unreadable) and "Extra data" in str(value):
        value = [_value(line) for line in text.splitlines() if line.strip()]
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

    Raises Unreadable if there is none.
    """
    if isinstance(row, Unreadable):
        raise row
    try:
        return _at(row, column)
    except KeyError as error:
        raise Unreadable(_missing(row, column)) from error


def _at(value, path):
    """The text at a path. Texts of a list are joined by line ends. Raises KeyError if there is no such path."""
    if isinstance(value, list):
        return "\n".join(_at(each, path) for each in value)
    if path and isinstance(value, dict):
        if path in value:  # a name may have a dot in it
            return _at(value[path], "")
        name, _, rest = path.partition(".")
        return _at(value[name], rest)
    if path and value is not None:
        raise KeyError(path)
    if value is not None and not isinstance(value, str):
        raise Unreadable(f"has {shown(value)} where its text should be")
    return value or ""


def _missing(row, column):
    """What a row has in place of `column`, and the path of its longest text."""
    if not (texts := _paths(row)):
        return f"has no {column!r}, and no text elsewhere: {shown(row)}"
    longest = max(texts, key=texts.get)
    there = ", ".join(itertools.islice(texts, SHOWN))
    return f"has no {column!r}, but {there}: name one, as in --text_column={shlex.quote(longest)}"


def _paths(value, path=""):
    """{path: characters} of all texts in a row."""
    if isinstance(value, str):
        return {path: len(value)}
    inside = collections.Counter()
    if isinstance(value, dict):
        for name, each in value.items():
            inside.update(_paths(each, f"{path}.{name}".lstrip(".")))
    elif isinstance(value, list):
        for each in value[:SHOWN]:
            inside.update(_paths(each, path))
    return inside
