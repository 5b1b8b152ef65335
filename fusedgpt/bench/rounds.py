"""Rows that were measured round after round, each contender once in each: which rounds count, and one row for all.

A round counts for all contenders or for none. If the disturbed rows alone were left out, whoever has the calmest rounds
left would be favoured. Ratios are drawn within rounds (disturbance.speedup), because a machine that slows down between
two rounds does so for all contenders of the second.
"""

import math
from collections.abc import Iterable

from fusedgpt.bench.disturbance import comparable
from fusedgpt.timing import summary

RATES = ("tokens_per_s", "mfu")  # of a row: they go with its median
LOSSES = ("final_loss", "last_loss", "val_loss")


def named(n: int, rounds: int) -> dict[str, int]:
    """What the spec of a row says of its round; nothing, if there is only one."""
    return {"round": n} if rounds > 1 else {}


def whole(rows: Iterable[dict], by: str) -> set[int]:
    """The rounds in which all were measured that were measured in any, and nothing was disturbed. by: who rows are of.

    Rows of a benchmark that has no rounds are of round 1.
    """
    measured = [row for row in rows if row["status"] == "measured"]
    everybody = {row[by] for row in measured}
    calm = {}
    for row in filter(comparable, measured):
        calm.setdefault(number(row), set()).add(row[by])
    return {n for n, names in calm.items() if names == everybody}


def number(row: dict) -> int:
    """The round of a row."""
    return row.get("round", 1)


def pooled(rows: Iterable[dict], by: str) -> dict[str, dict]:
    """{contender: one row for all its rounds}: the samples of whole rounds together, in the order of the first round.

    "rounds" has the median of each of these, "dropped" that of all other rounds. Errors and losses are the largest of
    them: a round that differs shows. If no round is whole, the row is disturbed, and has all samples. A contender that
    failed parity in one round has no time.
    """
    rows, groups = list(rows), {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    kept = whole(rows, by)
    return {name: _together(sorted(group, key=number), kept) for name, group in groups.items()}


def _together(group, kept):
    measured = [row for row in group if row["status"] == "measured"]
    wrong = [row for row in group if row["status"] == "parity failed"]
    if wrong or not measured:
        return (wrong or group)[-1]
    chosen = [row for row in measured if number(row) in kept] or measured
    medians = {number(row): row["median_ms"] for row in measured if "median_ms" in row}
    found = {"rounds": {n: ms for n, ms in medians.items() if n in kept}}
    found["dropped"] = {n: ms for n, ms in medians.items() if n not in kept}
    if peaks := [row["peak_memory"] for row in chosen if "peak_memory" in row]:
        found["peak_memory"] = max(peaks)
    if "errors" in chosen[0]:
        found["errors"] = {name: max(row["errors"][name] for row in chosen) for name in chosen[0]["errors"]}
    for name in LOSSES:
        if losses := [row[name] for row in chosen if name in row]:
            found[name] = next((loss for loss in losses if not math.isfinite(loss)), max(losses))
    for name in ("samples_ms", "first_token_ms"):
        if name in chosen[0]:
            found[name] = [ms for row in chosen for ms in row[name]]
    last = chosen[-1]
    found |= summary(found["samples_ms"]) if len(chosen) > 1 else {"median_ms": last["median_ms"]}
    found |= {name: last[name] * last["median_ms"] / found["median_ms"] for name in RATES if name in last}
    if not kept:
        reasons = [row["reason"] for row in measured if row.get("disturbed")]
        found |= {"disturbed": True, "reason": "; ".join(reasons) or "no round is whole: others were disturbed in each"}
    return last | found


def medians(row: dict) -> str:
    """The median of each round of a pooled row, those in brackets that were dropped: '113.2, (140.1), 112.9'."""
    every = sorted((row["rounds"] | row["dropped"]).items())
    return ", ".join(f"{ms:.1f}" if n in row["rounds"] else f"({ms:.1f})" for n, ms in every)


def calls(rows: Iterable[dict]) -> list[str]:
    """A sentence for each round whose rows come from more than one call of bench.py: it did not go in turn throughout.

    Rows of earlier versions do not say which call they are of.
    """
    found = {}
    for row in rows:
        found.setdefault(number(row), set()).add(row.get("call"))
    split = {n: sorted(each) for n, each in sorted(found.items()) if None not in each and len(each) > 1}
    return [f"Round {n} was measured in {len(each)} calls, not in one." for n, each in split.items()]
