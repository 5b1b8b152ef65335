"""report.md and the figures of a benchmark, drawn from its rows alone. Kinds differ in what `Shown` says of them."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator

from fusedgpt.attention import parity
from fusedgpt.bench import figures, rows
from fusedgpt.bench.rows import Result, family
from fusedgpt.errors import UserError
from fusedgpt.machine.files import atomic
from fusedgpt.machine.turns import Ratio

MARGIN = 0.01  # of bench.py check: a share of the ratio, by which its interval is widened
HOW = "A ratio is the median over laps of the ratio within a lap; in brackets its 95 % interval, by order statistics."
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "batch_size")  # settings that stand on a figure


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a kind of benchmark shows beside times and ratios.

    headline: kernels or projects in the title, each by its fastest contender; if none was measured, the fastest of all.
    columns: (result, contender) -> more columns of its line.
    own: {value in `workload`: what was measured, if it did not have the sizes of the settings}
    """

    what: str
    unit: str = ""
    headline: tuple[str, ...] = ()
    columns: Callable[[Result, str], dict[str, str]] = lambda result, name: {}
    notes: Callable[[list[Result]], list[str]] = lambda results: []
    own: dict[str, str] = dataclasses.field(default_factory=dict)


def write(folder: pathlib.Path, shown: Shown) -> list[pathlib.Path]:
    """Write report.md and the figures from the rows in `folder`; returns the paths. Raises UserError without rows."""
    header, lines = rows.read(folder / "rows.jsonl")
    results = rows.results(lines)
    drawn = _ratios(header["benchmark"], results, shown)
    paths = figures.save(drawn, folder, lambda those: [_subject(header, shown, those), machine(header, those)])
    text = [*_heading(header, results), *(f"- **{each.finding}.**" for each in drawn), ""]
    text += [*tables(results, shown), *(f"![{each.name}]({each.name}.png)\n" for each in drawn)]
    how = [HOW] if any(result.laps for result in results) else []
    text += [f"- {note}" for note in [*how, *shown.notes(results), *_of_contenders(results)]]
    with atomic(folder / "report.md", "w") as file:
        file.write("\n".join(text).rstrip() + "\n")
    return [folder / "report.md", *paths]


def _ratios(name: str, results: list[Result], shown: Shown) -> list[figures.Drawn]:
    """The figures of ratios: one over all lengths, or else one for each comparison."""
    timed = [result for result in results if result.laps]
    if timed and "T" in timed[0].workload:
        return [figures.Drawn(name, finding_over_lengths(timed, shown), results, lambda: figures.lines(timed))]
    names = ["-".join([name, *map(str, result.workload.values())]) for result in timed]
    return [
        figures.Drawn(each, finding(result, shown), [result], lambda result=result: figures.bars(result))
        for each, result in zip(names, timed)
    ]


def _subject(header: dict, shown: Shown, results: list[Result]) -> str:
    """What was measured, with its sizes and the settings that are not the defaults; whose results were wrong."""
    settings, own = header["settings"], [shown.own[each] for each in results[0].workload.values() if each in shown.own]
    named = dict.fromkeys([*(name for name in SIZES if name in settings and not own), *header.get("set", ())])
    said = ", ".join([*(own or [shown.what]), *(f"{name} {settings[name]}" for name in named)])
    lines = [item for result in results for item in result.contenders.items()]
    wrong = dict.fromkeys(name for name, line in lines if line["status"] == "parity failed")
    return f"{said}; parity failed: {', '.join(wrong)}" if wrong else said


def machine(header: dict, results: Iterable[Result]) -> str:
    """A line with the machine, the versions, the commits and the days of rows."""
    found = header["environment"]
    lines = [line for result in results for line in result.contenders.values()]
    commits, days = (", ".join(dict.fromkeys(str(line.get(name)) for line in lines)) for name in ("commit", "date"))
    where = f"CUDA {found['cuda']}".replace("CUDA ROCm", "ROCm") if "cuda" in found else f"threads: {found['threads']}"
    return f"{found['device']}, PyTorch {found['torch']}, {where}; commit {commits}, {days}"


def _heading(header, results):
    lines = [line for result in results for line in result.contenders.values()]
    commands = dict.fromkeys([header["command"], *(line["command"] for line in lines if "command" in line)])
    said = {"machine": machine(header, results)} | header["environment"]
    changed = [f"{name} {header['settings'][name]}" for name in header.get("set", ())]
    said["settings other than the defaults"] = ", ".join(changed) or "none"
    facts = [f"- {name}: {value}" for name, value in said.items() if name != "memory"]
    return [f"# {header['benchmark']}", "", *(f"    {command}" for command in commands), "", *facts, ""]


def _of_contenders(results):
    """What all lines say together: the kernels, the largest error, and who was not measured."""
    lines = [(name, line) for result in results for name, line in result.contenders.items()]
    seen = dict.fromkeys(f"{name}: {'+'.join(line['kernel']['forward'])}" for name, line in lines if "kernel" in line)
    notes = [f"Kernels seen in the forward pass: {'; '.join(seen)}."] if seen else []
    errors = [parity.largest(line["errors"]) for _, line in lines if "parity" in line]
    if errors:
        notes.append(f"Every kernel was compared with float64 first; the largest error is {max(errors):.1e}.")
    absent = {}
    for name, line in lines:
        if line["status"] != "measured":
            absent.setdefault((line["status"], line["reason"]), {})[name] = None
    return notes + [f"{status}: {', '.join(names)}: {reason}" for (status, reason), names in absent.items()]


# tables


def markdown(names: list[str], cells: Iterable[Iterable]) -> list[str]:
    """The lines of a Markdown table with columns `names`."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in [names, *cells]]
    return [lines[0], "|" + "---|" * len(names), *lines[1:]]


def tables(results: list[Result], shown: Shown) -> Iterator[str]:
    """A table for each comparison; over lengths, for all comparisons that differ in nothing else."""
    for panel, group in rows.panels(results).items():
        yield from [f"## {panel}", ""] if panel else []
        if "T" not in group[0].workload:
            yield from [*_table(group[0], shown), ""]
            continue
        yield from [f"{shown.unit}, times as fast as {group[0].baseline}", ""]
        names = list(dict.fromkeys(name for result in group for name in result.measured))
        group.sort(key=lambda result: result.workload["T"])
        cells = [[result.workload["T"], *(_cell(result, name) for name in names)] for result in group]
        yield from [*markdown(["tokens", *names], cells), ""]


def _cell(result, name):
    if name not in result.measured:
        return result.contenders.get(name, {}).get("status", "")
    ms = result.ms(name)
    times = [figures.milliseconds(ms["median_ms"])] if ms else []
    return "; ".join(filter(None, [*times, _ratio(result, name)]))


def _table(result, shown):
    lines = {}
    for name in result.measured:
        times = {}
        if ms := result.ms(name):
            median, p10, p90 = (figures.milliseconds(ms[field]) for field in ("median_ms", "p10_ms", "p90_ms"))
            times[f"{shown.unit}, median (p10 to p90)"] = f"{median} ({p10} to {p90})"
            times[f"times as fast as {result.baseline}"] = _ratio(result, name)
        lines[name] = times | shown.columns(result, name)
    names = list(dict.fromkeys(column for line in lines.values() for column in line))
    return markdown(["", *names], ([name, *(line.get(each, "") for each in names)] for name, line in lines.items()))


def _ratio(result, name):
    ratio = result.ratio(name)
    return in_figures(ratio) if ratio else ""


def in_figures(ratio: Ratio) -> str:
    """'1.414 (1.402 to 1.425)'; without an interval, how many laps there were."""
    if not ratio.known:
        return f"{ratio.times:.4g} (in {ratio.laps} lap{'s' * (ratio.laps > 1)} alone)"
    return f"{ratio.times:.4g} ({ratio.low:.4g} to {ratio.high:.4g})"


# findings, which are the titles of figures


def finding(result: Result, shown: Shown) -> str:
    """How many times as fast as the baseline the headline's contenders are."""
    ratios = result.ratios
    said = [f"{name} is {in_figures(ratios[name])} times as fast as {result.baseline}" for name in _top(result, shown)]
    start = f"{', '.join(map(str, result.workload.values()))}: " if result.workload else ""
    return start + ("; ".join(said) or "no ratio was measured")


def finding_over_lengths(results: list[Result], shown: Shown) -> str:
    """The same at the longest length that has a ratio: the range of the intervals of all its comparisons."""
    last = max((result.workload["T"] for result in results if result.ratios), default=None)
    if last is None:
        return "No ratio was measured"
    found = {}
    for result in results:
        if result.workload["T"] == last:
            for name in _top(result, shown):
                found.setdefault(name, []).append(result.ratios[name])
    said = []
    for name, ratios in found.items():
        ends = [end for ratio in ratios if ratio.known for end in (ratio.low, ratio.high)]
        few = "" if ends else ", in few laps,"
        ends = ends or [ratio.times for ratio in ratios]
        said.append(f"{name} is{few} {min(ends):.3g} to {max(ends):.3g} times as fast as {results[0].baseline}")
    return f"At {last} tokens {'; '.join(said)}"


def _top(result, shown):
    """The contenders in the title: the fastest of each in the headline, or the fastest of all."""
    fastest = sorted(result.ratios, key=lambda name: -result.ratios[name].times)
    leaders = {headline: [name for name in fastest if headline in (name, family(name))] for headline in shown.headline}
    return [names[0] for names in leaders.values() if names] or fastest[:1]


# columns that several kinds have


def gib(size: float | None) -> str:
    """Bytes as '2.13 GiB'; macOS and Windows do not say them."""
    return f"{size / 2**30:.2f} GiB" if size else "not known"


def of_training(result: Result, name: str) -> dict[str, str]:
    """What a contender that trains reached, and how it ran."""
    line = result.measured[name]
    return {
        **shares(result, name),
        "peak memory": gib(line["peak_memory"]),
        f"loss after {line['steps']} steps": f"{line['loss']:.4f}",
        "kernel seen forward / backward (as it ran)": how_it_ran(line),
    }


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


def how_it_ran(line: dict) -> str:
    """The kernels that the profiler saw, forward and backward, and with what the contender ran."""
    ran, seen = line["ran"], line["kernel"]
    ids = ran.get("padded_vocab_size", ran.get("ids"))
    more = {n for matrix in seen.get("logits", []) for n in matrix if n > ids}
    said = [ran["attention"], precision(line), "compiled" if ran["compile"] else "eager", f"{ids} ids"]
    if more:
        said.append(f"padded by the compiler to {' and '.join(map(str, sorted(more)))}")
    return f"{'+'.join(seen['forward'])} / {'+'.join(seen['backward'])} ({', '.join(said)})"


# bench.py check


def agreement(folders: list[pathlib.Path]) -> list[str]:
    """The lines that say how two folders compare. Raises UserError if they are of two kinds, or share no contender."""
    read = [rows.read(folder / "rows.jsonl") for folder in folders]
    headers, results = [header for header, _ in read], [rows.results(lines) for _, lines in read]
    one, other = (header["benchmark"] for header in headers)
    if one != other:
        raise UserError(f"{folders[0]} is of {one}, {folders[1]} of {other}: name two of one")
    found = compare(*results)
    if not (found and any(result.laps for result in results[0])):  # the rows of max_batch and numerics have none
        raise UserError(f"{folders[0]} and {folders[1]} have no ratio in common, and check compares ratios")
    said = [f"{folder}: {machine(*each)}" for folder, *each in zip(folders, headers, results)]
    verdicts = [verdict for *_, verdict in found]
    count = f"{verdicts.count('agrees')} of {len(verdicts) - verdicts.count('too few laps')} agree"
    return [*said, "", *markdown(["contender", *map(str, folders), ""], found), "", count]


def compare(one: list[Result], other: list[Result]) -> list[tuple[str, str, str, str]]:
    """(contender, what one folder says, what the other says, whether they agree) of each contender in both.

    A ratio agrees if its interval meets the other's, widened by MARGIN.
    """
    others, found = {tuple(result.workload.items()): result for result in other}, []
    for result in one:
        both = result, others.get(tuple(result.workload.items()), Result(result.workload, result.baseline))
        for name in result.contenders:
            if name not in both[1].contenders:
                continue
            label = ", ".join(map(str, (*result.workload.values(), name)))
            status, ratios = [each.contenders[name]["status"] for each in both], [each.ratio(name) for each in both]
            if all(ratios):
                found.append((label, *map(in_figures, ratios), _verdict(*ratios)))
            elif set(status) != {"measured"}:
                found.append((label, *status, "agrees" if status[0] == status[1] else "differs"))
    return found


def _verdict(one, other):
    if not (one.known and other.known):
        return "too few laps"
    meet = other.low <= one.high * (1 + MARGIN) and one.low * (1 - MARGIN) <= other.high
    return "agrees" if meet else "differs"
