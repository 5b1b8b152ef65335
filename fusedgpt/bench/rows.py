"""The rows of a benchmark: measured one by one and written at once, so that an interrupted run continues.

A row of rows.jsonl is what identifies it (its spec), a status and, if that is "measured", what was measured:

    {"rung": "flash", …, "status": "measured", "median_ms": 113.0, …}
    {"rung": "efficient", …, "status": "refused", "reason": "PyTorch has this kernel on GPUs only"}

The first line is the header: the settings, and the machine. Lines "before" and "after" hold the machine's state
(clocks, temperature) around the rows.
"""

import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import torch

from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError, first_line, out_of_memory
from fusedgpt.files import atomic, read_jsonl

FINAL = ("measured", "refused", "parity failed", "out of memory")  # "failed" is not final: it is tried again


def attempt(measure: Callable[[dict], dict], spec: dict) -> dict:
    """The row of `spec`: what measure(spec) returns, or how it failed. A row that fails does not end the others."""
    try:
        return {**spec, "status": "measured", **measure(spec)}
    except UserError as error:
        return {**spec, "status": "refused", "reason": str(error)}
    except ParityError as error:
        return {**spec, "status": "parity failed", "reason": str(error)}
    except Exception as error:  # whatever it is, the row says it, and the next row runs
        status = "out of memory" if out_of_memory(error) else "failed"
        return {**spec, "status": status, "reason": f"{type(error).__name__}: {first_line(error)}"}


def run(
    plan: list[dict],
    measure: Callable[[dict], dict],
    path: pathlib.Path,
    header: dict,
    state: Callable[[], dict],
    say: Callable[[str], None],
    profile: bool = False,
) -> None:
    """Measure the rows of `plan` that `path` does not have yet, and write each as soon as it is measured.

    Rows in `path` count if its header has the same settings and machine; otherwise the file is moved aside. With
    `profile`, a measured row without a trace is measured again. state() reads the machine's state.
    """
    kept = _rows_that_count(path, header, say)
    if profile:
        untraced = [spec for spec in plan if not trace_path(path.parent, spec).exists()]
        kept = [line for line in kept if "kernel" not in line or not _is_of(line, untraced)]  # others have no profile
    with atomic(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in [{"kind": "header", **header}, *kept])
        file.write(json.dumps({"kind": "before", **state()}) + "\n")
    todo = [spec for spec in plan if not any(_is_of(line, [spec]) for line in kept)]
    if len(todo) < len(plan):
        say(f"{len(plan) - len(todo)} of {len(plan)} rows are there already")
    seconds = {}  # by part: the rows of one part may take a hundred times as long as another's
    with open(path, "a", buffering=1) as file:
        for n, spec in enumerate(todo, start=1):
            began = time.perf_counter()
            row = attempt(measure, spec)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            file.write(json.dumps({"kind": "row", **row}) + "\n")
            seconds.setdefault(spec.get("part"), []).append(time.perf_counter() - began)
            left = _seconds_left(seconds, todo[n:])
            say(f"[{n}/{len(todo)}] {_name(spec)}: {_outcome(row)}; about {_duration(left)} left")
        file.write(json.dumps({"kind": "after", **state()}) + "\n")


def _rows_that_count(path, header, say):
    """The lines of an earlier run that still count: all but its header and its failed rows."""
    if not path.exists():
        return []
    old = read_jsonl(path)
    if old and _same(old[0], header):
        return [line for line in old[1:] if line["kind"] != "row" or line["status"] in FINAL]
    aside = next(name for n in itertools.count(1) if not (name := path.with_name(f"rows.previous-{n}.jsonl")).exists())
    path.replace(aside)
    say(f"{path} is of other settings, or of another machine: moved to {aside}")
    return []


def _is_of(line, specs):
    """Whether a line of rows.jsonl is the row of one of `specs`."""
    return any(spec.items() <= line.items() for spec in specs)


def _same(one, other):
    """Whether two headers have the same settings and machine. The command and the commit may differ."""
    machines = [{**header.get("environment", {}), "commit": None} for header in (one, other)]
    return one.get("settings") == other["settings"] and machines[0] == machines[1]


def trace_path(folder: pathlib.Path, spec: dict) -> pathlib.Path:
    """Where the profile of the row `spec` goes."""
    return folder / "traces" / f"{slug(_name(spec))}.json"


def slug(text: str) -> str:
    """`text` as a file name: 'flash + padded' becomes 'flash-padded'."""
    return "-".join("".join(c if c.isalnum() or c in "._" else " " for c in text).split())


def _seconds_left(seconds, todo):
    overall = statistics.mean(itertools.chain(*seconds.values()))
    means = {part: statistics.mean(each) for part, each in seconds.items()}
    return sum(means.get(spec.get("part"), overall) for spec in todo)


def _name(spec):
    return ", ".join(str(value) for value in spec.values())


def _outcome(row):
    if row["status"] != "measured":
        return f"{row['status']}: {row['reason']}"
    if "median_ms" in row:
        return f"median {row['median_ms']:.3f} ms (p10 {row['p10_ms']:.3f}, p90 {row['p90_ms']:.3f})"
    return "measured"


def _duration(seconds):
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
