"""The rows of a benchmark: measured one by one and written at once, so that an interrupted run continues.

A row of rows.jsonl holds what identifies it (its spec), a status and, if the status is "measured", what was measured:

    {"rung": "flash", …, "status": "measured", "median_ms": 113.0, …}
    {"rung": "efficient", …, "status": "refused", "reason": "PyTorch has it on GPUs only"}

A measured row is also marked "disturbed" if something else on the machine disturbed it (disturbance.py); its "tries"
are measurements that were dropped for that reason. The first line is the header: the settings and the machine. A row's
"call" is the number of the call of bench.py that measured it. Each such call has a line "before", with its command and
the state of the machine (clocks, temperature), and a line "after". Rows may come from several machines of one kind:
"machine" in "before" is the machine of this call. A line "trial" is a part of a row that takes long (max_batch.py).
"""

import contextlib
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from fusedgpt.bench import disturbance
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError, first_line, out_of_memory, shown
from fusedgpt.machine.environment import FLASH_PACKAGES
from fusedgpt.machine.files import atomic, read_jsonl

FINAL = ("measured", "refused", "parity failed", "out of memory")  # a row that "failed" does not count
RETRIED = "out of memory"  # a row that counts, but is tried again by each call: others may have held the memory
FULL = ("CUDA out of memory", "HIP out of memory", "DefaultCPUAllocator")  # why a kernel did not run, but not its own
AGAIN = 2  # measure a disturbed row so many more times
PAUSE = 1.0  # seconds before it is measured again
# the parts of the environment that measurements depend on; on a CPU also the threads
COMPARED = ("device", "torch", "cuda", "cudnn", "transformers", *FLASH_PACKAGES)
REFERENCE_KEYS = {"before_ms", "after_ms", "best_ms", "preempted", "cpu_s"}  # a row's "reference" has these
BEGAN = time.monotonic()  # about when bench.py started


class OutOfTime(Exception):
    """The time budget is over in the middle of a row, which is left for the next call."""


def time_is_up(max_seconds: float | None) -> bool:
    """Whether the time budget is over: `max_seconds` since bench.py started; None is no limit."""
    return max_seconds is not None and time.monotonic() - BEGAN >= max_seconds


def attempt(measure: Callable[[dict], dict], spec: dict, reference: Callable[[], float]) -> dict:
    """The row of `spec`: what measure(spec) returns, or how it failed. A failed row does not stop the others.

    Raises OutOfTime if measure does.
    """
    try:
        return {**spec, "status": "measured", **disturbance.bracketed(measure, spec, reference)}
    except OutOfTime:
        raise
    except UserError as error:
        full = any(sign in str(error) for sign in FULL)
        return {**spec, "status": "out of memory" if full else "refused", "reason": str(error)}
    except ParityError as error:
        return {**spec, "status": "parity failed", "reason": str(error)}
    except Exception as error:  # whatever it is, the next row must run
        status = "out of memory" if out_of_memory(error) else "failed"
        return {**spec, "status": status, "reason": f"{type(error).__name__}: {first_line(error)}"}


def run(
    plan: list[dict],
    measure: Callable[[dict], dict],
    path: pathlib.Path,
    header: dict,
    reference: Callable[[], float],
    state: Callable[[], dict],
    say: Callable[[str], None],
    still_ours: Callable[[], None] = lambda: None,
    group: Sequence[str] = (),
    profile: bool = False,
    max_seconds: float | None = None,
) -> None:
    """Measure the rows of `plan` that `path` does not have yet, and write each as soon as it is measured.

    Rows in `path` count if its header has the same settings and kind of machine (COMPARED); otherwise the file is moved
    aside. A disturbed row is measured again with all rows of its group: those with the same values of the keys `group`.
    With `profile`, measured rows without a trace are measured again too. reference() times the fixed product that shows
    disturbances, state() reads the machine's state. still_ours() is called before each write; it raises UserError if
    the folder no longer belongs to this call. No row begins after `max_seconds` (time_is_up). Raises UserError if
    `path` is damaged.
    """
    earlier = disturbance.judged(latest(_rows_that_count(path, header, say)), group)
    untraced = [spec for spec in plan if profile and not trace_path(path.parent, spec).exists()]
    todo = _missing(plan, _done(earlier, group, untraced))
    seen = [line for line in earlier if not _is_of(line, todo)]  # these rows tell how fast the reference can be
    if len(todo) < len(plan):
        say(f"{len(plan) - len(todo)} of {len(plan)} rows are there already")
    call = 1 + sum(line["kind"] == "before" for line in earlier)
    if todo:  # without a new measurement the header keeps its date
        before = {"kind": "before", "call": call, "command": header["command"], **state()}
        _write(path, [{"kind": "header", **header}, *earlier, before])
    seconds = {}  # {part: seconds of each row}; rows of one part may take many times as long as those of another
    with open(path, "a", buffering=1, encoding="utf-8") as file, contextlib.suppress(OutOfTime):
        for n, spec in enumerate(todo, start=1):
            if time_is_up(max_seconds):
                break
            began = time.perf_counter()
            row = _measured_in_peace(measure, spec, reference, seen, group, say, max_seconds)
            still_ours()
            file.write(json.dumps({"kind": "row", **row, "call": call}) + "\n")
            seconds.setdefault(spec.get("part"), []).append(time.perf_counter() - began)
            left = _seconds_left(seconds, todo[n:])
            say(f"[{n}/{len(todo)}] {name_of(spec)}: {_outcome(row)}; about {_duration(left)} left")
    still_ours()
    lines = disturbance.judged(latest(read(path)), group)  # judge again, because only now is the best reference known
    _write(path, [*lines, *([{"kind": "after", **state()}] if todo else [])])
    disturbed, missing = sum(1 for line in lines if line.get("disturbed")), len(_missing(todo, lines))
    if disturbed:
        say(f"disturbed rows: {disturbed}. The same command measures them again")
    if missing:
        remedy = ". The same command continues" * bool(seconds)  # without a new row, the next call gets no further
        say(f"max_seconds={max_seconds:g} is over: {missing} of {len(plan)} rows are missing{remedy}")


def _done(earlier, group, untraced):
    """Those of the lines `earlier` whose rows need not be measured again. untraced: specs whose trace is wanted."""
    spoilt = {disturbance.group_of(line, group) for line in earlier if line.get("disturbed")} if group else set()
    earlier = [line for line in earlier if line.get("status") != RETRIED]
    done = [n for n in earlier if not n.get("disturbed") and disturbance.group_of(n, group) not in spoilt]
    # rows without "kernel" never have a trace
    done = [line for line in done if "kernel" not in line or not _is_of(line, untraced)]
    # a row that was refused or failed parity would end the same way again, even if its group was disturbed
    return done + [line for line in earlier if _is_final(line) and line["status"] != "measured" and line not in done]


def left(plan: list[dict], path: pathlib.Path, header: dict) -> tuple[int, dict[str, int]]:
    """How many rows of `plan` are missing in `path`, and {what is wrong with others: their number}.

    What is wrong is "disturbed", or the status of a row that was not measured.
    """
    lines = read(path) if path.exists() else []
    there = list(filter(_is_final, latest(lines))) if lines and _same(lines[0], header) else []
    wrong = ["disturbed" if line.get("disturbed") else line["status"] for line in there if _is_of(line, plan)]
    return len(_missing(plan, there)), {what: wrong.count(what) for what in ("disturbed", *FINAL[1:]) if what in wrong}


def _measured_in_peace(measure, spec, reference, seen, group, say, max_seconds):
    """The row of `spec`, measured up to AGAIN more times while it is disturbed. Every attempt is added to `seen`."""
    tries = []
    for left in reversed(range(1 + AGAIN)):
        seen.append(attempt(measure, spec, reference))
        row = disturbance.judged(seen, group)[-1]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not left or not row.get("disturbed") or time_is_up(max_seconds):
            return row | ({"tries": tries} if tries else {})
        tries.append({name: row[name] for name in ("median_ms", "p10_ms", "p90_ms", "reason")})
        say(f"{name_of(spec)}: {_outcome(row)}; it is measured again")
        time.sleep(PAUSE)


def read(path: pathlib.Path) -> list[dict]:
    """The lines of the rows.jsonl at `path`: the header, rows and lines of other kinds; [] if the file is empty.

    A last line that a kill cut short is left out. Raises UserError if any other line is damaged.
    """
    lines = read_jsonl(path)
    *ended, last = path.read_bytes().split(b"\n")
    objects = sum(1 for line in ended if line.strip())
    with contextlib.suppress(ValueError, RecursionError):  # a line that a kill cut short
        objects += isinstance(json.loads(last), dict)
    lost = objects - len(lines)
    if lost > 0:
        raise UserError(f"{path} is damaged: {lost} lines hold no JSON object. Take a whole copy, or measure again")
    for line in lines[1:]:
        if not _is_sound(line):
            remedy = "Take a whole copy, or delete the line: the same command measures its row again"
            raise UserError(f"{path} is damaged: bench.py writes no line like {shown(line)}. {remedy}")
    return lines


def _is_sound(line):
    """Whether a line is a row with the fields that readers need, or of another kind."""
    if not isinstance(line.get("machine", {}), dict):
        return False
    if line.get("kind") != "row":
        return isinstance(line.get("kind"), str)
    times = [line[name] for name in ("median_ms", "p10_ms", "p90_ms") if name in line]
    around = line.get("reference", dict.fromkeys(REFERENCE_KEYS, 0))
    names = [line.get("status"), line.get("reason", "")]
    return (
        all(isinstance(name, str) for name in names)
        and ("reason" in line or line["status"] == "measured")
        and not any(isinstance(value, dict | list) for value in spec_of(line).values())
        and len(times) in (0, 3)
        and isinstance(around, dict)
        and around.keys() >= REFERENCE_KEYS
        and all(isinstance(number, int | float) for number in [*times, *(around[name] for name in REFERENCE_KEYS)])
    )


def latest(lines: list[dict]) -> list[dict]:
    """`lines` of rows.jsonl without the rows that a later line replaces."""
    found = {}
    for n, line in enumerate(lines):
        key = key_of(line) if line["kind"] == "row" else n
        found.pop(key, None)
        found[key] = line
    return list(found.values())


def spec_of(row: dict) -> dict:
    """The fields that identify a row: all before its status."""
    before = itertools.takewhile(lambda item: item[0] != "status", row.items())
    return {key: value for key, value in before if key != "kind"}


def name_of(row: dict) -> str:
    """The values that identify a row, as text."""
    return ", ".join(map(str, spec_of(row).values()))


def unmeasured(rows: Iterable[dict]) -> dict[tuple[str, str], list[str]]:
    """{(status, reason): names of the rows without a measurement that have it}."""
    reasons = {}
    for row in rows:
        if row["status"] != "measured":
            named = name_of(row)
            if row["status"] == "refused" or "T" not in row:  # a refusal holds for a kernel at any length
                named = next((row[key] for key in ("rung", "peer", "path", "pair", "attention") if key in row), named)
            reasons.setdefault((row["status"], row["reason"]), {})[named] = None
    return {why: list(names) for why, names in reasons.items()}


def key_of(row: dict) -> tuple:
    """The fields that identify a row, as a key of a dictionary."""
    return tuple(spec_of(row).items())


def _write(path, lines):
    with atomic(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _rows_that_count(path, header, say):
    """The lines of earlier calls that still count: all except the header and failed rows."""
    if not path.exists():
        return []
    old = read(path)
    if old and _same(old[0], header):
        return [line for line in old[1:] if line["kind"] != "row" or _is_final(line)]
    names = (path.with_name(f"rows.previous-{n}.jsonl") for n in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.replace(aside)
    say(f"{path} has other settings, or is of another kind of machine: moved to {aside}")
    return []


def _is_final(line):
    """Whether a line is a row that need not be tried again."""
    return line["kind"] == "row" and line["status"] in FINAL


def _is_of(line, specs):
    """Whether a line is the row of one of `specs`."""
    return line["kind"] == "row" and any(spec.items() <= line.items() for spec in specs)


def _missing(specs, lines):
    """Those of `specs` whose row is not in `lines`."""
    return [spec for spec in specs if not any(_is_of(line, [spec]) for line in lines)]


def _same(one, other):
    """Whether two headers have the same settings and the same values of COMPARED (on a CPU also of threads)."""
    then, now = one.get("environment", {}), other["environment"]
    compared = COMPARED if "cuda" in now else (*COMPARED, "threads")
    return one.get("settings") == other["settings"] and all(then.get(name) == now.get(name) for name in compared)


def trace_path(folder: pathlib.Path, spec: dict) -> pathlib.Path:
    """The file for the profile of the row `spec`."""
    return folder / "traces" / f"{slug(name_of(spec))}.json"


def slug(text: str) -> str:
    """`text` as a file name: 'flash + padded' becomes 'flash-padded'."""
    return "-".join("".join(c if c.isalnum() or c in "._" else " " for c in text).split())


def _seconds_left(seconds, todo):
    overall = statistics.mean(itertools.chain(*seconds.values()))
    means = {part: statistics.mean(each) for part, each in seconds.items()}
    return sum(means.get(spec.get("part"), overall) for spec in todo)


def _outcome(row):
    if row["status"] != "measured":
        return f"{row['status']}: {row['reason']}"
    if "median_ms" in row:
        times = f"median {row['median_ms']:.3f} ms (p10 {row['p10_ms']:.3f}, p90 {row['p90_ms']:.3f})"
        return f"{times}, disturbed: {row['reason']}" if row.get("disturbed") else times
    return "measured"


def _duration(seconds):
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
