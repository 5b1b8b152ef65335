"""rows.jsonl of a benchmark: a header, a line for each contender, a line for each lap.

    {"kind": "header", "benchmark": "ladder", "command": …, "settings": …, "environment": …}
    {"kind": "contender", "workload": {}, "name": "flash", "baseline": "manual", "status": "measured", "commit": …, …}
    {"kind": "lap", "workload": {}, "ms": {"manual": 143.1, "flash": 113.0, …}}

`workload` is what all contenders of a comparison have in common. A contender that was not measured has a "reason" in
place of what it found out. The last line about a contender counts, and laps add up: to continue is to add laps.
"""

import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Iterable

from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError, first_line, out_of_memory
from fusedgpt.machine import timing, turns
from fusedgpt.machine.environment import FLASH_PACKAGES
from fusedgpt.machine.files import atomic, read_jsonl

FULL = ("out of memory", "DefaultCPUAllocator")  # of PyTorch's error, or in the reason why a kernel cannot run
SETTLED = ("refused", "parity failed")  # not tried again
# the parts of the environment that measurements depend on; on a CPU also the threads
COMPARED = ("device", "torch", "cuda", "cudnn", "transformers", *FLASH_PACKAGES)


class Ended(Exception):
    """A contender cannot go on: its status and the reason."""


def status_of(error: BaseException) -> tuple[str, str]:
    """(status, reason) of a contender that raised `error`: refused, parity failed, out of memory or failed."""
    if isinstance(error, Ended):
        return error.args
    if isinstance(error, ParityError):
        return "parity failed", str(error)
    if out_of_memory(error) or any(sign in str(error) for sign in FULL):
        return "out of memory", first_line(error) or type(error).__name__
    if isinstance(error, UserError):
        return "refused", str(error)
    return "failed", f"{type(error).__name__}: {first_line(error)}"


@dataclasses.dataclass
class Result:
    """What rows.jsonl says about one comparison."""

    workload: dict[str, str | int]
    baseline: str
    contenders: dict[str, dict] = dataclasses.field(default_factory=dict)  # {name: its last line}
    laps: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def add(self, line: dict) -> None:
        """Take over the line of a contender. Its laps do not count once it was measured with other code."""
        before = self.contenders.get(line["name"])
        if before and _code(before) != _code(line):
            for lap in self.laps:
                lap.pop(line["name"], None)
        self.contenders[line["name"]] = line

    @property
    def measured(self) -> dict[str, dict]:
        """{name: line} of the contenders that were measured."""
        return {name: line for name, line in self.contenders.items() if line["status"] == "measured"}

    def ratio(self, name: str) -> turns.Ratio | None:
        """How many times as fast as the baseline a contender is; None for the baseline, or without laps."""
        both = {name, self.baseline} <= self.measured.keys()
        return turns.ratio(self.laps, name, self.baseline) if both and name != self.baseline else None

    @property
    def ratios(self) -> dict[str, turns.Ratio]:
        """{name: ratio} of the contenders that have one."""
        return {name: ratio for name in self.measured if (ratio := self.ratio(name))}

    def ms(self, name: str) -> dict[str, float] | None:
        """The median, 10th and 90th percentile of a contender's laps in milliseconds; None without laps."""
        ms = [lap[name] for lap in self.laps if name in lap]
        return timing.summary(ms) if ms and name in self.measured else None

    def precise(self, names: Iterable[str], precision: float) -> bool:
        """Whether the interval of each of `names`, as a share of its ratio, is ± `precision` or narrower.

        Without a baseline there are no ratios, and nothing to wait for.
        """
        if self.baseline not in self.measured:
            return True
        found = [self.ratio(name) for name in names if name != self.baseline]
        return all(ratio is not None and ratio.precision <= precision for ratio in found)


def read(path: pathlib.Path) -> tuple[dict, list[dict]]:
    """(the header, the other lines) of the rows.jsonl at `path`. A last line that a kill cut short is left out.

    Raises UserError if the file is missing, or is of another kind.
    """
    lines = read_jsonl(path) if path.exists() else []
    if not lines:
        raise UserError(f"{path} does not exist, or is empty: name the folder of a benchmark, such as out-bench/ladder")
    header, *others = lines
    if header.get("kind") != "header":
        raise UserError(f"{path} does not begin with the header of a benchmark: name a folder that bench.py wrote")
    return header, others


def results(lines: Iterable[dict]) -> list[Result]:
    """The results of the lines of rows.jsonl, in the order in which comparisons began."""
    found = {}
    for line in lines:
        key = tuple(line["workload"].items())
        if line["kind"] == "lap":
            if key in found:
                found[key].laps.append(dict(line["ms"]))
            continue
        found.setdefault(key, Result(line["workload"], line["baseline"])).add(line)
    return list(found.values())


def _code(line):
    """What code a contender ran: the commit of this project, of a clone of another, and the user's own kernel."""
    return line.get("commit"), line.get("ran", {}).get("commit"), line.get("own_kernel")


def panels(results: Iterable[Result]) -> dict[str, list[Result]]:
    """{name of what results have in common beside the length T: the results}."""
    found = {}
    for result in results:
        found.setdefault(", ".join(str(v) for name, v in result.workload.items() if name != "T"), []).append(result)
    return found


def family(name: str) -> str:
    """The kernel or the project of a contender: flash of 'flash + padded vocabulary', nanoGPT of 'nanoGPT, eager'."""
    return re.split(r",| \+", name)[0]


def begin(path: pathlib.Path, header: dict) -> tuple[list[Result], str]:
    """(the results there are, what to say): rows.jsonl at `path` is continued, or begun with `header`.

    Rows of other settings or of another kind of machine (COMPARED) are moved aside.
    """
    said = ""
    if path.exists() and path.stat().st_size:
        old, lines = read(path)
        if _same(old, header):
            return results(lines), ""
        names = (path.with_name(f"rows.previous-{n}.jsonl") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        path.replace(aside)
        said = f"{path} has other settings, or is of another kind of machine: moved to {aside}"
    with atomic(path, "w") as file:
        file.write(json.dumps({"kind": "header", **header}) + "\n")
    return [], said


def _same(one, other):
    then, now = one["environment"], other["environment"]
    compared = COMPARED if "cuda" in now else (*COMPARED, "threads", "threads wait")
    return one["settings"] == other["settings"] and all(then.get(name) == now.get(name) for name in compared)
