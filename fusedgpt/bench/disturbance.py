"""Whether something else disturbed the time of a row, and what may be drawn from it.

There are two signs. A fixed product (timing.reference) is timed right before and right after each row: if it took
clearly longer than at best in the rows of this benchmark, the device was shared or throttled. And the system counts how
often it took the CPU away from the row, in the middle too. The row's own samples do not tell: if each of them was
disturbed alike, they agree with each other.
"""

import resource
import sys
from collections.abc import Callable, Iterable

SLOWER = 1.25  # times the best reference
# involuntary context switches in a second of CPU time; elsewhere the system counts other things among them
PREEMPTED = 100 if sys.platform == "linux" else float("inf")


def bracketed(measure: Callable[[dict], dict], spec: dict, reference: Callable[[], float]) -> dict:
    """measure(spec), and if that has a time, a "reference": its ms before and after, and the preemptions meanwhile."""
    before, (switches, cpu) = reference(), _usage()
    row = measure(spec)
    if "median_ms" not in row:
        return row
    (switches_then, cpu_then), after = _usage(), reference()
    around = {"before_ms": before, "after_ms": after, "best_ms": min(before, after)}
    return row | {"reference": around | {"preempted": switches_then - switches, "cpu_s": cpu_then - cpu}}


def _usage():
    """How often the system suspended this process and its children that have ended, and their seconds of CPU time."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(r.ru_nivcsw for r in both), sum(r.ru_utime + r.ru_stime for r in both)


def judged(rows: Iterable[dict]) -> list[dict]:
    """`rows`, each marked "disturbed", with a reason, if its reference says so; best_ms is then the best of them all.

    Rows without a reference have no time, or were measured before there was one: they stay as they are.
    """
    rows = list(rows)
    best = min((row["reference"]["best_ms"] for row in rows if "reference" in row), default=None)
    return [_judged(row, best) if "reference" in row else row for row in rows]


def _judged(row, best):
    around = row["reference"] | {"best_ms": best}
    before, after, rate = around["before_ms"], around["after_ms"], around["preempted"] / max(around["cpu_s"], 0.5)
    reasons = []
    if max(before, after) > SLOWER * best:  # if before and after differ by more, one of them is beyond the best too
        reasons = [f"a fixed product took {before:.3g} ms before and {after:.3g} ms after it, {best:.3g} ms at best"]
    if rate > PREEMPTED:
        reasons.append(f"it lost the CPU {around['preempted']} times in {around['cpu_s']:.3g} s of CPU time")
    row = row | {"reference": around}
    return row | {"disturbed": True, "reason": ", and ".join(reasons)} if reasons else row


def comparable(row: dict | None) -> bool:
    """Whether a ratio may be drawn from the time of a row: it was measured, and is not known to be disturbed."""
    return row is not None and row["status"] == "measured" and not row.get("disturbed")


def speedup(row: dict | None, base: dict | None) -> tuple[float, float, float] | None:
    """How many times as fast as `base` a row is, and the spread of that: the p10 of one against the p90 of the other.

    None if one of them is not comparable.
    """
    if not (comparable(row) and comparable(base)):
        return None
    low, high = base["p10_ms"] / row["p90_ms"], base["p90_ms"] / row["p10_ms"]
    return base["median_ms"] / row["median_ms"], low, high
