"""report.md and the figure of a benchmark, drawn from its rows alone. All kinds look alike; `Shown` is what differs."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from fusedgpt.attention.table import EXPANDED
from fusedgpt.bench import figures, rows
from fusedgpt.bench.rows import Result, panels
from fusedgpt.errors import UserError
from fusedgpt.machine.files import atomic
from fusedgpt.machine.turns import Ratio

GIB = 2**30
HOW = (
    "Contenders take turns in a new random order each lap. A ratio is the median over laps of the ratio within a lap;"
    " in brackets its 95 % interval, by order statistics."
)
FEW = "Too few laps for an interval."


@dataclasses.dataclass
class Settings:
    format: Literal["svg", "pdf"] = "svg"  # format of the figures beside PNG
    title: str = ""  # title of the figures; empty: each one's own


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a kind of benchmark shows beside times and ratios."""

    unit: str  # of a time, such as "ms per training step"
    headline: Callable[[Result], list[str]]  # the contenders in the title; empty: the fastest
    notes: Callable[[list[Result]], list[str]]
    subject: Callable[[dict], str]  # the header's settings -> what was measured
    # (result, contender) -> more columns of its line
    columns: Callable[[Result, str], dict[str, str]] = lambda result, name: {}
    axis: str = ""  # a field of `of` whose values make the x-axis of the figure, such as T
    axis_label: str = ""
    extra: Callable[[list[Result], dict], Iterator[tuple]] = lambda results, s: iter(())  # its own figures


def write(folder: pathlib.Path, shown: Shown, form: str = "svg", title: str = "") -> list[pathlib.Path]:
    """Write report.md and the figures from the rows in `folder`; returns the paths written.

    form: svg or pdf, beside the PNG that report.md shows. title: what stands above each figure in place of its own
    title. Raises UserError if there are no rows.
    """
    header, lines = rows.read(folder / "rows.jsonl")
    results = rows.results(lines)
    timed = [result for result in results if result.laps]
    findings = findings_of(timed, shown)

    def drawn():
        """(name, title, what was measured, figure) of each figure, one at a time, as figures.save asks for them."""
        if shown.axis and timed:
            figure = figures.lines(panels(timed, shown.axis), shown.axis, shown.axis_label)
            yield header["benchmark"], title or findings[0], _subject(results, shown, header), figure
        for result, own in zip(timed, findings if not shown.axis else ()):
            name = header["benchmark"] + "".join(f"-{value}" for value in result.of.values()) * (len(timed) > 1)
            yield name, title or own, _subject([result], shown, header), figures.bars(result)
        for name, own, *rest in shown.extra(results, header["settings"]):
            findings.append(own)
            yield name, title or own, *rest

    try:
        paths = figures.save(drawn(), folder, machine(header, results), form)
        text = [*_heading(header, results), *(f"- **{each}.**" for each in findings), ""]
        text += [*tables(results, shown), "", *figures.lines_of(paths)]
        notes = ([HOW if any(result.known for result in timed) else FEW] if timed else []) + shown.notes(results)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"no report can be drawn from {folder / 'rows.jsonl'}, which is damaged or of another version:"
            f" {type(error).__name__}: {error}. Take a whole copy, or measure again"
        ) from error
    text += [f"- {note}" for note in [*notes, *_not_measured(results)]]
    with atomic(folder / "report.md", "w") as file:
        file.write("\n".join(text).rstrip() + "\n")
    return [folder / "report.md", *paths]


def _subject(results, shown, header):
    how = HOW.partition(". ")[0].lower() if any(result.known for result in results) else FEW.lower().rstrip(".")
    text = f"{shown.subject(header['settings'])}; {shown.unit}, {how}."
    return " ".join([text, *_not_measured(results, short=True)])


def machine(header: dict, results: Iterable[Result]) -> str:
    """A line with the machine, the versions, the commits and the days of rows."""
    found = header["environment"]
    lines = [line for result in results for line in result.contenders.values()]
    commits, days = (", ".join(dict.fromkeys(str(line.get(name)) for line in lines)) for name in ("commit", "date"))
    text = f"{found['device']}, PyTorch {found['torch']}"
    if "cuda" in found:
        text += f", CUDA {found['cuda']}"
    else:
        text += f", {found['threads']} thread{'s' * (found['threads'] > 1)}"
    return f"{text}; commit {commits}, {days}"


def _heading(header, results):
    settings = ", ".join(f"{name} {header['settings'][name]}" for name in header.get("set", ()))
    environment = {name: value for name, value in header["environment"].items() if name != "memory"}
    said = [("machine", machine(header, results)), *environment.items(), ("settings other than the defaults", settings)]
    title = header["benchmark"].replace("_", " ")
    lines = [line for result in results for line in result.contenders.values()]
    commands = dict.fromkeys([header["command"], *(line["command"] for line in lines if "command" in line)])
    return [f"# {title}", "", "\n\n".join(f"`{each}`" for each in commands), "", *markdown(["", ""], said), ""]


def markdown(names: list[str], cells: Iterable[Iterable]) -> list[str]:
    """The lines of a Markdown table with columns `names`."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in [names, *cells]]
    return [lines[0], "|" + "---|" * len(names), *lines[1:]]


def tables(results: list[Result], shown: Shown) -> Iterator[str]:
    """A table for each comparison; if the kind has an axis, for all comparisons that differ in nothing else."""
    if not shown.axis:
        for result in results:
            yield from [f"## {result.name()}", ""] if result.of else []
            yield from [*_table(result, shown), ""]
        return
    for panel, group in panels(results, shown.axis).items():
        names = list(dict.fromkeys(name for result in group for name in result.measured))
        cells = [
            [result.of[shown.axis], *(_cell(result, name) for name in names)]
            for result in sorted(group, key=lambda result: result.of[shown.axis])
        ]
        base = group[0].baseline
        text = f"{shown.unit}, times as fast as {base}"
        yield from [*([f"## {panel}", ""] if panel else []), text, "", *markdown([shown.axis_label, *names], cells), ""]


def _cell(result, name):
    ms = result.ms(name)
    if not ms:
        line = result.contenders.get(name)
        return "" if line is None or line["status"] == "measured" else line["status"]
    ratio = result.ratio(name)
    return figures.milliseconds(ms["median_ms"]) + (f"; {in_figures(ratio)}" if ratio else "")


def _table(result, shown):
    more = {name: shown.columns(result, name) for name in result.measured}
    columns = list(dict.fromkeys(column for each in more.values() for column in each))
    timed = bool(result.laps)
    names = ["", f"{shown.unit}, median (p10 to p90)", f"times as fast as {result.baseline}"] if timed else [""]
    cells = []
    for name, line in result.contenders.items():
        if name not in more:
            cells.append([name, f"{line['status']}: {line['reason']}", *[""] * (len(names) + len(columns) - 2)])
            continue
        ms, ratio = result.ms(name), result.ratio(name)
        found = [figures.milliseconds(ms[each]) for each in ("median_ms", "p10_ms", "p90_ms")] if ms else []
        times = [f"{found[0]} ({found[1]} to {found[2]})" if ms else "no lap"]
        times += [in_figures(ratio) if ratio else ""]
        cells.append([name, *(times if timed else []), *(more[name].get(column, "") for column in columns)])
    return markdown([*names, *columns], cells)


def in_figures(ratio: Ratio) -> str:
    """'1.414 (1.402 to 1.425)'; without an interval, how many laps there were."""
    if not ratio.known:
        return f"{ratio.times:.4g} ({_few(ratio)})"
    return f"{ratio.times:.4g} ({ratio.low:.4g} to {ratio.high:.4g})"


def in_words(ratio: Ratio) -> str:
    """'1.41 times as fast (1.40 to 1.43)', '1.27 times as long (…)', or 'no faster or slower (…)'."""
    known = ratio.told or not ratio.known
    times, low, high, word = ratio.times, ratio.low, ratio.high, "fast"
    around = f"{low:.3g} to {high:.3g}"
    if times < 1 and known:
        times, word = 1 / times, "long"
        around = f"{1 / high:.3g} to {1 / low:.3g}" if low else ""
    around = _few(ratio) if not ratio.known else around
    return f"{times:.3g} times as {word} ({around})" if known else f"no faster or slower ({around})"


def _few(ratio):
    """How many laps there were, if they are too few for an interval."""
    return f"in {ratio.laps} lap{'s' * (ratio.laps > 1)} alone"


def findings_of(results: list[Result], shown: Shown) -> list[str]:
    """What titles say: the ratios of the headline, for each result; if there is an axis, at the longest length."""
    if shown.axis:
        return [_finding_at_the_end(results, shown)] if results else []
    said = []
    for result in results:
        ratios = {name: result.ratio(name) for name in shown.headline(result) or _fastest(result)}
        parts = [f"{name} {_verb(ratio)} {in_words(ratio)}" for name, ratio in ratios.items() if ratio]
        start = f"{result.name().capitalize()}: " if len(results) > 1 and result.of else ""
        said.append(f"{start}{_as(parts, result.baseline) if parts else 'no ratio was measured'}")
    return said


def _as(parts, base):
    """Join parts such as 'flash is 1.4 times as fast (1.3 to 1.5)', the first with what it is compared with."""
    first = parts[0].replace(" (", f" as {base} (", 1) if "times as" in parts[0] else f"{parts[0]} than {base}"
    return "; ".join([first, *parts[1:]])


def _verb(ratio):
    return "takes" if (ratio.told or not ratio.known) and ratio.times < 1 else "is"


def _fastest(result):
    ratios = {name: result.ratio(name) for name in result.measured}
    ratios = {name: ratio for name, ratio in ratios.items() if ratio}
    return [max(ratios, key=lambda name: ratios[name].times)] if ratios else []


def _finding_at_the_end(results, shown):
    """How the headline's contenders stand beside the baseline at the longest length, over all panels."""
    ends = [result.of[shown.axis] for result in results if any(map(result.ratio, result.measured))]
    if not ends:
        return "No ratio was measured"
    last = max(ends)
    at_last = [result for result in results if result.of[shown.axis] == last]
    names = dict.fromkeys(name for result in at_last for name in shown.headline(result) or _fastest(result))
    found = {name: [ratio for result in at_last if (ratio := result.ratio(name))] for name in names}
    base, said = results[0].baseline, []
    for name, ratios in found.items():
        known = [ratio for ratio in ratios if ratio.known]
        ratios = known or ratios  # a ratio of few laps says nothing beside others
        if len(ratios) == 1:
            said.append(_as([f"{name} {_verb(ratios[0])} {in_words(ratios[0])}"], base))
        else:
            low, high = min(ratio.times for ratio in ratios), max(ratio.times for ratio in ratios)
            around = (
                f" (intervals from {min(r.low for r in known):.3g} to {max(r.high for r in known):.3g})"
                if known
                else ""
            )
            said.append(f"{name} is {low:.3g} to {high:.3g} times as fast as {base}{around}")
    return f"At {last} {shown.axis_label}: {'; '.join(said)}"


def _not_measured(results, short=False):
    """A sentence for each status: which contenders were not measured, and why."""
    found = {}
    for result in results:
        for name, line in result.contenders.items():
            if line["status"] != "measured":
                found.setdefault((line["status"], line["reason"]), {})[name] = None
    if short:
        measured = {name for result in results for name in result.measured}
        names = dict.fromkeys(name for each in found.values() for name in each if name not in measured)
        few = ", ".join(names) if len(names) < 4 else f"{len(names)} others, which the report names"
        return [f"Not measured: {few}."] if names else []
    return [f"{status}: {', '.join(names)}: {reason}" for (status, reason), names in found.items()]


# columns that several kinds have


def gib(size: float) -> str:
    """Bytes as '2.13 GiB'."""
    return f"{size / GIB:.2f} GiB"


def shares(result: Result, name: str) -> dict[str, str]:
    """Tokens/s and MFU of a contender that trains.

    The peak is the highest that any contender measured in that precision, because a busy machine reaches less.
    """
    line = result.measured[name]
    ms = result.ms(name) or line
    if "median_ms" not in ms:
        return {}
    rate = 1e3 * line["tokens"] / ms["median_ms"]
    peak = max(other["peak_flops"] for other in result.measured.values() if precision(other) == precision(line))
    return {"tokens/s": f"{rate:,.0f}", "MFU": f"{100 * rate * line['flops_per_token'] / peak:.1f} %"}


def precision(line: dict) -> str:
    """The dtype in which a run multiplied, or TF32 if it rounded float32 to that."""
    ran = line["ran"]
    return "TF32" if ran.get("tf32") and ran["dtype"] == "float32" else ran["dtype"]


def kernel(line: dict, backward: bool = True) -> str:
    """The kernels that the profiler saw: 'flash / flash', forward and backward."""
    directions = ["forward", "backward"] if backward else ["forward"]
    seen = " / ".join("+".join(line["kernel"][direction]) for direction in directions)
    return f"{seen}, {EXPANDED}" if line["kernel"].get("expanded") else seen


def how_it_ran(line: dict) -> str:
    """The kernels that the profiler saw, and with what the contender ran."""
    ran = line["ran"]
    ids = ran.get("padded_vocab_size", ran.get("ids"))
    more = {n for matrix in line["kernel"].get("logits", []) for n in matrix if n > ids}
    padded = f", padded by the compiler to {' and '.join(map(str, sorted(more)))}" if more else ""
    compiled = "compiled" if ran["compile"] else "eager"
    return f"{kernel(line)} ({ran['attention']}, {precision(line)}, {compiled}, {ids} ids{padded})"
