"""Whether something else disturbed the time of a row, and what may be concluded from it.

There are three signs. A fixed product (timing.reference) is timed right before and after each row. If it took longer
than its best time beside these rows, the device was shared or throttled. The system counts how often it took the CPU
away while the row was measured. And the row's own samples may lie far apart. Samples that lie close together prove
nothing, because a steady load slows all of them alike.

Rows whose times are compared with each other, such as those of a round, form a group. The limit within a group is
stricter. A group is measured again as a whole, because the rows that happen to remain would favour one contender.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence

from fusedgpt.machine.timing import PREEMPTED, usage

SLOWER = 1.25  # limit of a row's reference over the best of all rows
SLOWER_IN_GROUP = 1.1  # limit of its reference over the best of its group
WIDE = 1.25  # limit of its p90 over its p10


def bracketed(measure: Callable[[dict], dict], spec: dict, reference: Callable[[], float]) -> dict:
    """The row of measure(spec). If it has a time, it gets a "reference": ms before and after, and preemptions."""
    before, (switches, cpu) = reference(), usage()
    row = measure(spec)
    if "median_ms" not in row:
        return row
    (switches_then, cpu_then), after = usage(), reference()
    around = {"before_ms": before, "after_ms": after, "best_ms": min(before, after)}
    return row | {"reference": around | {"preempted": switches_then - switches, "cpu_s": cpu_then - cpu}}


def group_of(row: dict, keys: Sequence[str]) -> tuple:
    """The group of a row: its values of `keys`, the kind's GROUP."""
    return tuple(row.get(key) for key in keys)


def judged(rows: Iterable[dict], keys: Sequence[str] = ()) -> list[dict]:
    """`rows`, each marked "disturbed" with a reason if there is a sign. Each best_ms becomes the best of all rows.

    keys: fields of a row; rows with equal values of them form a group. A row without a reference stays as it is: it has
    no time, or was measured before there were references.
    """
    rows = list(rows)
    timed = [row for row in rows if "reference" in row]
    best, of_group = min((row["reference"]["best_ms"] for row in timed), default=None), {}
    for row in timed:
        around, group = row["reference"], group_of(row, keys)
        of_group[group] = min(around["before_ms"], around["after_ms"], of_group.get(group, float("inf")))
    return [_judged(row, best, of_group[group_of(row, keys)]) if "reference" in row else row for row in rows]


def _judged(row, best, best_of_group):
    around = row["reference"] | {"best_ms": min(best, best_of_group)}
    before, after, rate = around["before_ms"], around["after_ms"], around["preempted"] / max(around["cpu_s"], 0.5)
    reasons = []
    # before and after need no comparison: the slower one is compared with the best, which is at most the faster one
    took = f"a fixed product took {before:.3g} ms before and {after:.3g} ms after it"
    if max(before, after) > SLOWER_IN_GROUP * best_of_group:
        reasons = [f"{took}, {best_of_group:.3g} ms at best beside the rows that it is compared with"]
    elif max(before, after) > SLOWER * best:
        reasons = [f"{took}, {best:.3g} ms at best beside all rows"]
    if rate > PREEMPTED:
        reasons.append(f"it lost the CPU {around['preempted']} times in {around['cpu_s']:.3g} s of CPU time")
    if row["p90_ms"] > WIDE * row["p10_ms"]:
        reasons.append(f"its samples lie far apart, {row['p10_ms']:.4g} to {row['p90_ms']:.4g} ms from p10 to p90")
    row = {key: value for key, value in row.items() if key not in ("disturbed", "reason")} | {"reference": around}
    return row | {"disturbed": True, "reason": ", and ".join(reasons)} if reasons else row


def comparable(row: dict | None) -> bool:
    """Whether a ratio may use the time of a row: the row was measured and is not marked as disturbed."""
    return row is not None and row["status"] == "measured" and not row.get("disturbed")


def speedup(row: dict | None, base: dict | None) -> tuple[float, float, float] | None:
    """How many times as fast as `base` a row is, with the least and the greatest; None if a row is not comparable.

    For rows that stand for several rounds (rounds.pooled) these are the mean, the least and the greatest of the ratios
    within each round. "again_ms" is a second median of `base`, in rows from before there were rounds. For other rows,
    the least and the greatest divide the p10 of one row by the p90 of the other.
    """
    if not (comparable(row) and comparable(base)):
        return None
    ratios = [base["rounds"][n] / ms for n, ms in row.get("rounds", {}).items() if n in base.get("rounds", {})]
    if "again_ms" in base:
        ratios.append(base["again_ms"] / row["median_ms"])
    if len(ratios) > 1:
        return statistics.mean(ratios), min(ratios), max(ratios)
    return base["median_ms"] / row["median_ms"], base["p10_ms"] / row["p90_ms"], base["p90_ms"] / row["p10_ms"]
