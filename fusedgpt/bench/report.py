"""report.md and the figures of a benchmark, drawn from its rows alone, and the parts that all reports share."""

import dataclasses
import pathlib
import types
from collections.abc import Iterable
from typing import Literal

from fusedgpt.attention.table import EXPANDED
from fusedgpt.bench import drawing, rows
from fusedgpt.bench.disturbance import speedup
from fusedgpt.bench.options import EARLIER
from fusedgpt.errors import UserError
from fusedgpt.machine.files import atomic

GIB = 2**30


@dataclasses.dataclass
class Settings:
    format: Literal["svg", "pdf"] = "svg"  # format of the figures beside PNG
    title: str = ""  # title of the figures; empty: each one's own


def read(folder: pathlib.Path) -> tuple[dict, list[dict]]:
    """(header, all other lines) of rows.jsonl in `folder`. Raises UserError if the file is missing or damaged."""
    path = folder / "rows.jsonl"
    lines = rows.read(path) if path.exists() else []
    if not lines:
        raise UserError(f"{path} does not exist, or is empty: name the folder of a benchmark, such as out-bench/ladder")
    header, *others = lines
    parts = [header.get(name) for name in ("settings", "environment")]
    if not {"benchmark", "command", "set"} <= header.keys() or not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path} does not begin with the header of a benchmark: name a folder that bench.py wrote")
    return header, others


def rows_in(lines: list[dict]) -> list[dict]:
    """The rows among the lines of rows.jsonl; if a row was measured more than once, the latest."""
    return [line for line in rows.latest(lines) if line["kind"] == "row"]


def write(folder: pathlib.Path, kind: types.ModuleType, form: str = "svg", title: str = "") -> list[pathlib.Path]:
    """Write report.md and the figures of the benchmark `kind` from the rows in `folder`; returns the paths written.

    form: svg or pdf, beside the PNG that report.md shows. title: what stands above each figure in place of its own
    title. Raises UserError if there are no rows, or if they lack what a table shows.
    """
    header, lines = read(folder)
    found = rows_in(lines)
    try:
        figures, findings = kind.figures(found, header["settings"]), []

        def titled():
            for name, own, *rest in figures:
                findings.append(f"- **{own}.**")
                yield name, title or own, *rest

        drawn = drawing.save(titled(), folder, machine(header, lines, kind), form)
        text = [*_heading(header, lines, kind), *findings, ""] if findings else _heading(header, lines, kind)
        text += [*kind.table(found), "", *drawing.shown(drawn)]
        text += _disturbances(found)
        text += [f"- {'; '.join(names)}: {': '.join(why)}" for why, names in rows.unmeasured(found).items()]
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"no report can be drawn from {folder / 'rows.jsonl'}, which is damaged or of another version:"
            f" {type(error).__name__}: {error}. Take a whole copy, or measure again"
        ) from error
    with atomic(folder / "report.md", "w") as file:
        file.write("\n".join(text).rstrip() + "\n")
    return [folder / "report.md", *drawn]


def _environment(header, lines):
    """{name: text} of the environment of the rows, which may come from several calls on different machines."""
    last = header["environment"]
    machines = [*(line["machine"] for line in lines if "machine" in line), last]
    environment = {}
    for name in last:
        values = dict.fromkeys(machine.get(name, last[name]) for machine in machines)
        environment[name] = ", ".join(f"{v / GIB:.0f} GiB" if name == "memory" else str(v) for v in values)
    return environment


def machine(header: dict, lines: list[dict], kind: types.ModuleType) -> str:
    """A line with the machine, the versions, the commit and the day of a benchmark of this `kind`.

    It also says if a CPU returned freed memory to the system, because the figures do not show it.
    """
    found = _environment(header, lines)
    on_cpu = "threads" in found and "cuda" not in found
    said = [found.get("device", "an unknown device")]
    if on_cpu:
        said.append(f"{found['threads']} thread{'s' * (str(found['threads']) != '1')}")
    times_calls = on_cpu and any(field.name == "freed_memory" for field in dataclasses.fields(kind.Settings))
    if times_calls and header["settings"].get("freed_memory", EARLIER["freed_memory"]) == "returned":
        said.append("freed memory returned" + " in attention alone" * kind.TRAINS)  # train.py always keeps it
    versions = [name for name in ("torch", "cuda", "cudnn", "transformers", "commit") if name in found]
    return ", ".join([*said, *(f"{name} {found[name]}" for name in versions), found.get("date", "no date recorded")])


_CALL_FIELDS = ("kind", "machine", "commit", "call", "command")  # fields of a line "before" beside the machine's state


def _heading(header, lines, kind):
    s, environment = header["settings"], _environment(header, lines)
    for when in ("before", "after"):
        states = [line for line in lines if line["kind"] == when]
        if states:
            state = {name: value for name, value in states[-1].items() if name not in _CALL_FIELDS}
            state = {name: f"{value:.2f}" if isinstance(value, float) else value for name, value in state.items()}
            environment[f"{when} the rows"] = ", ".join(f"{name} {value}" for name, value in state.items())
    # the commands of all calls that measured rows; files of earlier versions have only the last one
    commands = dict.fromkeys([*(line["command"] for line in lines if "command" in line), header["command"]])
    own = {field.name for field in dataclasses.fields(kind.Settings)}
    used = [name for name in header["set"] if name in own or (kind.TRAINS and name not in kind.UNUSED)]
    settings = ", ".join(f"{name} {s[name]}" for name in used)  # headers of earlier versions have settings of all kinds
    return [
        f"# {header['benchmark'].replace('_', ' ')}",
        "",
        kind.__doc__.partition("\n\n")[0].replace("\n", " "),
        "",
        "\n\n".join(f"`{command}`" for command in commands),
        "",
        *markdown(["", ""], [*environment.items(), ("settings other than the defaults", settings)]),
        "",
    ]


def _disturbances(found):
    """The disturbed rows and the dropped measurements, with reasons."""
    text, again = [], []
    for row in found:
        if row.get("disturbed"):
            text.append(f"- {rows.name_of(row)}: disturbed: {row['reason']}")
        for each in row.get("tries", []):
            again.append(f"- {rows.name_of(row)}: {spread(each, 4)} ms: {each['reason']}")
    why = "Something else used the device while the rows marked *disturbed* were measured, so no ratio uses them."
    if text:
        text = [f"{why} The same command measures them again.", "", *text, ""]
    if again:
        text += ["Disturbed, dropped and measured again at once:", "", *again, ""]
    return text


def markdown(names: list[str], cells: Iterable[Iterable]) -> list[str]:
    """The lines of a Markdown table with columns `names`."""
    lines = [names, *cells]
    lines = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return [lines[0], "|" + "---|" * len(names), *lines[1:]]


def spread(row: dict, digits: int = 1) -> str:
    """The median of a row, its 10th and 90th percentile, and a mark if it is disturbed: '113.0 (112.1-115.9)'."""
    return f"{row['median_ms']:.{digits}f} ({row['p10_ms']:.{digits}f}-{row['p90_ms']:.{digits}f}){mark(row)}"


def ratio(row: dict, base: dict | None, spread: bool = False) -> str:
    """How a row stands beside `base`: '1.20x' or '2.20x as long', with the spread '1.20x (1.15-1.26)'; or nothing."""
    found, word = speedup(row, base), ""
    if found and found[0] < 1:
        found, word = speedup(base, row), " as long"
    if found is None or row is base:
        return ""
    return f"{found[0]:.2f}x{word}" + f" ({found[1]:.2f}-{found[2]:.2f})" * spread


@dataclasses.dataclass(frozen=True)
class Beside:
    """How a row stands beside another: so many times as fast or as long, or no different if the spread hides it."""

    word: Literal["fast", "long", "same"]
    times: float  # 1 or more, unless the word is "same"

    def __str__(self) -> str:
        return "no difference" if self.word == "same" else f"{self.times:.3g} times as {self.word}"


def beside(row: dict | None, base: dict | None, noise: float = 0.0) -> Beside | None:
    """How a row stands beside `base`; None without a ratio.

    noise: the share by which ratios differ between measurements; it hides smaller differences.
    """
    found = speedup(row, base)
    if found is None:
        return None
    times, low, high = found
    if low <= 1 <= high or abs(times - 1) <= noise:
        return Beside("same", times)
    return Beside("fast", times) if times > 1 else Beside("long", speedup(base, row)[0])


def clause(pairs: Iterable[tuple[dict, dict | None]], other: str, noise: float = 0.0) -> str | None:
    """How rows stand beside their bases, as the rest of a sentence, such as 'takes 1.1 to 2.2 times as long as manual'.

    pairs: (row, base). None if no pair has a ratio. noise: as in `beside`.
    """
    said = [each for pair in pairs if (each := beside(*pair, noise)) is not None]
    parts = []
    for verb, word in (("is", "fast"), ("takes", "long")):
        numbers = [each.times for each in said if each.word == word]
        if numbers:
            many = span(numbers) if len(numbers) == len(said) else f"up to {max(numbers):.3g}"
            parts.append(f"{verb} {many} times as {word} as {other}")
    if said and not parts:
        return f"shows no difference from {other} beyond the noise"
    return " and ".join(parts).replace(f" as {other} and", " and") or None


def time(row: dict, base: dict | None, noise: float = 0.0) -> str:
    """'1,337 ms, 1.2 times as fast': the time of a row, and how it stands beside `base` (as `beside` says it)."""
    ms = row["median_ms"]
    text = f"{ms:,.0f} ms" if ms >= 1000 else f"{ms:.4g} ms"
    said = None if row is base else beside(row, base, noise)
    return text if said is None else f"{text}, {said}"


def span(numbers: Iterable[float]) -> str:
    """'1.1 to 2.2': the smallest and the largest number, or the one that both are."""
    return " to ".join(dict.fromkeys(f"{end(numbers):.3g}" for end in (min, max)))


def why_not(row: dict | None) -> str:
    """Why no ratio uses a row: 'not measured', 'disturbed', 'refused', 'parity failed', …"""
    return "not measured" if row is None else "disturbed" if row.get("disturbed") else row["status"]


def compiled(row: dict) -> str:
    """How a run's model ran: 'compiled', 'eager' or, if its rounds differ, 'compiled or eager'."""
    return str(row["ran"]["compile"]).replace("True", "compiled").replace("False", "eager")


def precision(row: dict) -> str:
    """The dtype in which a run multiplied, or TF32 if it rounded float32 to that."""
    ran = row["ran"]
    return "TF32" if ran.get("tf32") and ran["dtype"] == "float32" else ran["dtype"]  # earlier rows lack tf32


def mark(row: dict) -> str:
    """The mark after the time of a disturbed row; empty for other rows."""
    return ", *disturbed*" if row.get("disturbed") else ""


def kernel(row: dict, backward: bool = True) -> str:
    """The kernels that the profiler saw in a row: 'flash / flash', forward and backward."""
    directions = ["forward", "backward"] if backward else ["forward"]
    seen = " / ".join("+".join(row["kernel"][direction]) for direction in directions)
    return f"{seen}, {EXPANDED}" if row["kernel"].get("expanded") else seen


def how_timed(rows: list[dict]) -> list[str]:
    """A sentence for each way in which attention alone was timed in `rows`, unless they are of earlier versions."""
    ways = {}
    for row in rows:
        if "timed" in row:
            ways.setdefault(row["timed"], {})[row.get("path") or row["attention"]] = None
    said = {
        "graph replay, cold L2": "the device's: a CUDA graph of the call is replayed, each time from a cold L2 cache",
        "calls": "of whole calls, from Python",
    }
    text = [f"Times of attention alone are {said[way]} ({', '.join(names)})." for way, names in ways.items()]
    return text + page_faults(rows)


def page_faults(rows: Iterable[dict]) -> list[str]:
    """A sentence with the most page faults of a timed call, if rows say so."""
    most = max((row["page_faults"] for row in rows if "page_faults" in row), default=None)
    return [] if most is None else [f"The median call of a row had at most {most:,.0f} page faults."]


def best_peaks(rows: Iterable[dict]) -> dict[str, float]:
    """{precision: peak FLOP/s}: the largest in any of `rows`, because a disturbed measurement finds less."""
    best = {}
    for row in rows:
        best[precision(row)] = max(best.get(precision(row), 0), row["peak_flops"])
    return best


def mfu_convention(rows: Iterable[dict]) -> str:
    """A sentence that says how MFU is counted in `rows`."""
    rows = list(rows)
    peaks = ", ".join(f"{peak / 1e12:.4g} TFLOP/s in {name}" for name, peak in best_peaks(rows).items())
    return f"MFU counts 6 N + 12 L nh hs T per token, against {peaks} ({rows[0]['peak_source']})."
