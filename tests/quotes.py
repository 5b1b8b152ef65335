"""Check the measured numbers of the pages: an HTML comment behind each ties it to the row that it comes from.

    python tests/quotes.py              # lists numbers that differ from their rows, and numbers without a row
    python tests/quotes.py --write      # the same, after it has corrected numbers that differ from their rows

A comment names a file under results/ and what to take from it. It stands directly behind the number and its unit:

    1592 ms<!-- cpu_avx2/ladder name=manual median_ms -->
    +19 %<!-- cpu_avx2/ladder name=math faster -->
    1.6 to 3.0 times<!-- cpu_avx2/prefill T=1024 name=flash times -->
    1.261<!-- cpu_amx/quickstart/evaluations.jsonl val_loss -->

- The file is the folder of a benchmark, a `.jsonl`, a `.json` or a `.csv`. `key=value` and `key>=value` choose rows;
  put a value with blanks in double quotes. Without conditions, a field is that of the header, or of the last line of a
  .jsonl.
- A field may be nested: `errors.y`, `environment.device`. A text stands in backticks on the page.
- The folder of a benchmark has a row for each contender: `name`, the fields of its comparison, what was found out
  about it, its `median_ms`, and beside its baseline `times` (as fast), `faster` (per cent) and `longer` (times).
- A single number needs a single row. `X to Y` is the smallest and the largest of several rows, or the interval of one.
- The value is converted to the unit that is written behind the number, and rounded to the digits that are written.

A number that is no measurement of ours has a comment that says so:

    <!-- source: WHERE -->      others measured or state it
    <!-- computed: HOW -->      it follows from a formula or a test
    <!-- setting -->            a default, a limit, a size by definition

Such a comment covers the numbers before it in its sentence or cell. In the head of a table it covers the column. Alone
on a line it covers the block below, up to an empty line, or if a heading follows, the section of that heading.
"""

import csv
import itertools
import json
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fusedgpt.bench import rows as bench_rows
from fusedgpt.errors import UserError
from fusedgpt.machine.files import read_jsonl

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md")]
PAGES += [ROOT / "results" / "study_calibration" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))

UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "seconds": 1, "min": 60, "minutes": 60, "h": 3600, "hours": 3600}
UNITS |= {"%": 0.01, "times": 1, "tokens/s": 1}
UNITS |= {f"{letter}B": 1000**n for n, letter in enumerate("kMGT", 1)}
UNITS |= {f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)}
UNITS |= {"GB/s": 1e9, "TB/s": 1e12, "GFLOP/s": 1e9, "TFLOP/s": 1e12}
IN_UNITS = {"_ms": 1e-3, "_mb": 1e6, "tflops": 1e12}  # units of fields with these endings; others: s, bytes, shares

NUMBER = r"(?<![\w.,:/-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = f"(?:{'|'.join(sorted(map(re.escape, UNITS), key=len, reverse=True))})"
BARE = re.compile(rf"{NUMBER}(?!\.?\w)")
RANGE = rf"(?P<low>{NUMBER})(?P<between>(?:\s?{UNIT})?\s+to\s+)"
QUOTED = re.compile(rf"(?:{RANGE})?(?P<high>{NUMBER})(?P<unit>\s?{UNIT})?$")
TEXT = re.compile(r"`[^`]+`$")
COMMENT = re.compile(r"<!--\s+(.+?)\s+-->", re.S)
NOTE = re.compile(r"(source|computed): \S|setting$")

CODE = re.compile(r"(?ms:^```.*?^```)|(?<=\n\n)(?: {4}.*\n(?:\n(?= {4}))?)+")
HIDDEN = re.compile(r"(`+)(?:(?!\n\n|`)[\s\S])+\1|\]\([^)]*\)")
MEASURED = re.compile(rf"(?<!every )(?:{NUMBER}(?:\s?{UNIT})?\s+to\s+)?{NUMBER}\s?{UNIT}(?![\w/])")
LOSS = re.compile(r"(?<![\w.,:/+-])\d{1,2}\.\d{3,}(?![.\d]*\w)")
SHORT_LOSS = re.compile(r"(?<!Python )(?<!torch )(?<!PyTorch )(?<![\w.,:/+-])\d{1,2}\.\d\d(?![.\d]*\w)")
COUNTS = "two|three|four|five|six|seven|eight|nine|ten|twenty|hundred|thousand"
WORDS = re.compile(rf"\b(?:{COUNTS})\s+times\s+(?:as|more|less|faster)\b")
HEAD = re.compile(r"%|\b(?:ms|s|seconds|MiB|GiB|MB|GB|tokens/s|times|loss|bits per byte|faster)\b")


class Unfit(Exception):
    """A comment that names nothing, or something that may not be quoted."""


def rows_of(path: pathlib.Path, chosen: bool) -> list[dict]:
    """What can be quoted from a file under results/: its rows if rows are `chosen`, else its header or last line."""
    if not path.exists():
        raise Unfit(f"results/ has no {path.name}")
    if path.suffix == ".json":
        return [json.loads(path.read_text())]
    if path.suffix == ".csv":  # the table of a study
        with open(path, encoding="utf-8") as file:
            return [{key: _cell(text) for key, text in row.items()} for row in csv.DictReader(file)]
    if path.suffix == ".jsonl":
        lines = read_jsonl(path)
        return lines if chosen else lines[-1:]
    try:
        header, lines = bench_rows.read(path / "rows.jsonl")
    except UserError as error:
        raise Unfit(str(error)) from None
    return (
        [_row(result, name) for result in bench_rows.results(lines) for name in result.measured] if chosen else [header]
    )


def _row(result, name):
    """What can be quoted of a contender."""
    row = result.of | result.measured[name] | (result.ms(name) or {})
    if ratio := result.ratio(name):
        times = [ratio.times, ratio.low, ratio.high]
        longer = [1 / each if each else float("inf") for each in times]
        row |= {"times": times, "faster": [each - 1 for each in times], "longer": longer}
    return row


def _cell(text):
    """A cell of a table as JSON would have it."""
    try:
        return float(text)
    except ValueError:
        return text or None


def field(row: dict, name: str):
    """The value of a field, or None. A dotted name leads through nested dictionaries."""
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def conditions(words: list[str]) -> list[tuple[str, str, str]]:
    """`key=value` and `key>=value` as (key, sign, value). Raises Unfit for anything else."""
    found = [re.match(r"([\w.]+)(>?=)(.*)", word) for word in words]
    if None in found:
        raise Unfit(f"{words[found.index(None)]!r} is no condition: write key=value")
    return [match.groups() for match in found]


def meets(row: dict, wanted: list[tuple[str, str, str]]) -> bool:
    """Whether a row meets all conditions."""
    return all(
        (field(row, key) or 0) >= float(value) if sign == ">=" else str(field(row, key)) == value
        for key, sign, value in wanted
    )


def value_of(row: dict, name: str) -> tuple:
    """(value of a field, [the ends of its interval, if it has one])."""
    value = field(row, name)
    if value is None:
        raise Unfit(f"the row has no {name}")
    return (value[0], sorted(value[1:])) if name in ("times", "faster", "longer") else (value, [value])


def values(text: str, results: pathlib.Path) -> tuple[str, list[tuple]]:
    """What a comment quotes: the name of a field; and for each row (value, [the ends of its interval])."""
    try:
        file, *words = shlex.split(text)
    except ValueError as error:
        raise Unfit(str(error)) from None
    if not words:
        raise Unfit("it names no field, and is no note (source: …, computed: …, setting)")
    *words, what = words
    wanted = conditions(words)
    found = [value_of(row, what) for row in rows_of(results / file, bool(words)) if meets(row, wanted)]
    if not found:
        raise Unfit("no row is like that")
    return what, found


def written(value: float, what: str, like: str, unit: str | None) -> str:
    """A value as a page has it: in `unit`, with the digits, the sign and the commas of `like`."""
    if unit := (unit or "").strip():
        value *= next((factor for end, factor in IN_UNITS.items() if what.endswith(end)), 1) / UNITS[unit]
    digits = len(like.partition(".")[2])
    sign, comma = "+" if like[0] in "+-" else "", "," if "," in like or abs(value) >= 10_000 else ""
    return f"{value:{sign}{comma}.{digits}f}"


def as_it_should_be(before: str, text: str, results: pathlib.Path) -> tuple[int, str]:
    """(where the quotation begins in `before`, the text up to a comment; how it should read by the rows)."""
    what, found = values(text, results)
    if is_text := TEXT.search(before):
        if len(found) > 1:
            raise Unfit(f"{len(found)} rows are like that: name one")
        return is_text.start(), f"`{found[0][0]}`"
    match = QUOTED.search(before)
    if not match:
        raise Unfit("there is no number before it")
    if isinstance(found[0][0], str):
        raise Unfit(f"the row says {found[0][0]!r}, a text: write it in backticks")
    low, between, high, unit = match["low"], match["between"], match["high"], match["unit"] or ""
    if low is None:
        if len(found) > 1:
            raise Unfit(f"{len(found)} rows are like that: name one, or write the smallest and the largest")
        return match.start(), written(found[0][0], what, high, unit) + unit
    each = [middle for middle, _ in found] if len(found) > 1 else found[0][1]
    if len(each) < 2:
        raise Unfit("only one row is like that: write one number")
    return match.start(), written(min(each), what, low, unit) + between + written(max(each), what, high, unit) + unit


def line_of(page: str, at: int) -> int:
    """The line number of a place."""
    return page.count("\n", 0, at) + 1


def without(pattern: re.Pattern, page: str, filler: str = " ") -> str:
    """`page` with `filler` in place of what the pattern finds, so that all else keeps its place."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", filler, match[0]), page)


def cells_of(line: str, at: int) -> list[tuple[int, int]]:
    """The cells of a line of a table that begins at `at`, as spans."""
    bars = [at + n for n, letter in enumerate(line) if letter == "|"]
    return [(start + 1, end) for start, end in itertools.pairwise(bars)]


def tables(page: str) -> Iterator[list[list[tuple[int, int]]]]:
    """The tables of a page: for each line the spans of its cells, the head first."""
    for table in re.finditer(r"(?:^\|.*\n?)+", page, re.M):
        lines, at = [], table.start()
        for line in table[0].splitlines(keepends=True):
            lines.append(cells_of(line, at))
            at += len(line)
        yield lines[:1] + lines[2:]


def covered_by(note: re.Match, page: str, visible: str) -> list[tuple[int, int]]:
    """The spans of a page that a note covers."""
    start = page.rfind("\n", 0, note.start()) + 1
    end = page.find("\n", note.end()) if "\n" in page[note.end() :] else len(page)
    if page[start:end].strip() == note[0]:
        heading = re.match(r"\n(#+) ", page[end:])
        below = re.compile(rf"\n#{{1,{len(heading[1])}}} " if heading else r"\n\n").search(page, end + 1)
        return [(end, below.start() if below else len(page))]
    for head, *lines in tables(visible):
        for n, (first, last) in enumerate(head):
            if first <= note.start() < last:
                return [cells[n] for cells in [head, *lines] if n < len(cells)]
    before = visible[: note.start()]
    ends = [match.end() for match in re.finditer(r"[.!?:]\s+(?=[A-Z`*\[(])|\n\s*\n|\n\s*[-*] |\|", before)]
    return [(ends[-1] if ends else 0, note.start())]


def without_a_row(page: str, covered: list[tuple[int, int]], visible: str) -> Iterator[tuple[int, str]]:
    """(place, text) of each measured number that nothing covers: in prose, and in columns whose heads have a unit."""
    found = [*MEASURED.finditer(visible), *LOSS.finditer(visible), *WORDS.finditer(visible)]
    for block in re.finditer(r"(?:.*\S.*\n?)+", visible):
        if re.search(r"\bloss(es)?\b|bits per\s+byte", block[0]):
            found += SHORT_LOSS.finditer(visible, block.start(), block.end())
    for head, *lines in tables(visible):
        for n in (n for n, (start, end) in enumerate(head) if HEAD.search(visible[start:end])):
            for cells in (cells for cells in lines if n < len(cells)):
                found += BARE.finditer(visible, *cells[n])
    for start, end in sorted({match.span() for match in found}):
        if not any(first <= start and end <= last for first, last in covered):
            yield start, page[start:end]


def check(page: str, name: str, results: pathlib.Path = ROOT / "results") -> tuple[str, list[str]]:
    """A page with the numbers of its rows, and what was wrong with it: `page:line says X, the row says Y`."""
    prose = without(CODE, page)
    visible = without(HIDDEN, without(COMMENT, prose, "\0"))  # no number continues behind a comment
    wrong, covered, right, done = [], [], [], 0
    for comment in COMMENT.finditer(without(HIDDEN, prose)):  # comments in backticks do not count
        where, text = f"{name}:{line_of(page, comment.start())}", " ".join(comment[1].split())
        if NOTE.match(text):
            covered += covered_by(comment, page, visible)
            continue
        before = page[done : comment.start()].rstrip("*")  # bold print
        try:
            start, should = as_it_should_be(before, text, results)
        except Unfit as error:
            wrong.append(f"{where}: <!-- {text} --> cannot be quoted: {error}")
            continue
        covered.append((done + start, comment.start()))
        right += [before[:start], should, page[done + len(before) : comment.end()]]
        done = comment.end()
        if before[start:] != should:
            wrong.append(f"{where} says {before[start:]}, the row says {should} ({text})")
    for at, number in without_a_row(page, covered, visible):
        number = " ".join(number.split())
        wrong.append(f"{name}:{line_of(page, at)}: {number} has no row: tie it, or say what it is (tests/quotes.py)")
    return "".join(right) + page[done:], wrong


def main() -> None:
    """Print what is wrong with the pages; with --write, first correct what the rows can."""
    wrong = []
    for path in PAGES:
        page, name = path.read_text(), str(path.relative_to(ROOT))
        right, found = check(page, name)
        if "--write" in sys.argv[1:] and right != page:
            path.write_text(right)
            found = check(right, name)[1]
        wrong += found
    print("\n".join(wrong) or "every measured number says what its row says")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
