"""The rows of CSV and JSON, in time and memory that grow with the text alone."""

import csv
import io
import json
import re
import time
import tracemalloc

import pytest
from hypothesis import given, settings, strategies

from fusedgpt.data import tables


def blocks(text, size):
    return (text[at : at + size] for at in range(0, len(text), size))


CELLS = strategies.lists(strategies.text(alphabet='a,;"\n é', max_size=5), min_size=2, max_size=3)


@given(strategies.lists(CELLS, min_size=1, max_size=6), strategies.integers(1, 20))
@settings(max_examples=200, deadline=None, database=None)
def test_rows_are_those_of_pythons_reader(rows, size):
    file = io.StringIO()
    csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows])
    want = [row | {} for row in csv.DictReader(io.StringIO(file.getvalue(), newline=""))]
    assert list(tables.csv_rows(blocks(file.getvalue(), size))) == want


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("a;b\n1;2,5\n", ","),
        ("a\tb\n1\t2,5\n", "\t"),
        ("a\tb\n1\t2,5\n", ","),
        ('a,b\n1,"2,5"\n', ","),
        ("a;b,b\n1;2,5\n", ","),
    ],
)
def test_cells_are_cut_where_the_first_line_is(text, delimiter):
    # Excel writes semicolons where the comma is in numbers; all of a row was one cell
    (row,) = tables.csv_rows([text], delimiter)
    assert row == ({"a;b": "1;2", "b": "5"} if text.startswith("a;b,b") else {"a": "1", "b": "2,5"})


def test_blank_lines_are_no_rows_however_many(monkeypatch):
    # they counted as a row that is too long
    monkeypatch.setattr(tables, "LONGEST_ROW", 100)
    assert list(tables.csv_rows(["\n\n", "a\n" + "\n" * 500, "1\n" + "\n" * 500 + "2"])) == [{"a": "1"}, {"a": "2"}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a" * 101, "longer than 100 characters"),
        ('a\n"' + "b\n" * 60, "longer than 100"),
        ("," * 21, "more than 20 times ','"),
    ],
)
@pytest.mark.parametrize("size", [7, 10**6])
def test_a_row_that_does_not_end_is_refused(monkeypatch, text, reason, size):
    # a file of 64 MB in one line took 1.1 GB, and one of 60 MB in 20 million cells 1.8 GB
    monkeypatch.setattr(tables, "LONGEST_ROW", 100)
    monkeypatch.setattr(tables, "MOST_CELLS", 20)
    with pytest.raises(csv.Error, match=re.escape(reason)):
        list(tables.csv_rows(blocks(text, size)))


LONG = {
    "one line of CSV": lambda n: (tables.csv_rows, "text\n" + "a" * n),
    "one cell of CSV": lambda n: (tables.csv_rows, 'text\n"' + "a" * n + '"'),
    "one value of JSON": lambda n: (tables.json_values, json.dumps({"text": "a" * n})),
    "blanks in JSON": lambda n: (tables.json_values, '{"text":' + " " * n + '"a"}'),
    "blanks between JSON": lambda n: (tables.json_values, "[" + " " * n + "]"),
    "line ends": lambda n: (tables.csv_rows, "\n" * n),
}


@pytest.mark.parametrize("name", LONG)
def test_time_grows_with_the_length(name):
    # a line was copied with each block that went on with it
    def seconds(n):
        read, text = LONG[name](n)
        began = time.process_time()
        for _ in read(blocks(text, 1)):
            pass
        return time.process_time() - began

    short, long = min(seconds(25_000) for _ in range(3)), seconds(200_000)
    assert long < 20 * short + 0.1  # 8 times the length; copies of all before would take 64 times as long


@pytest.mark.parametrize("name", LONG)
def test_memory_is_a_few_times_the_longest_row(name):
    read, text = LONG[name](2**21)
    tracemalloc.start()
    try:
        for _ in read(blocks(text, 2**16)):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * 2**21  # csv has 4 bytes for each character, twice while its buffer grows
