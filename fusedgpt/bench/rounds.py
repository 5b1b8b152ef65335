"""Rows measured round after round, each contender once per round: which rounds count, and one row for all of them.

A round counts for all contenders or for none. If only the disturbed rows were left out, the contender with the calmest
remaining rounds would be favoured. Ratios are taken within rounds (disturbance.speedup), because a machine that slows
down between two rounds does so for all contenders in the second one.
"""

import math
from collections.abc import Iterable

from fusedgpt.bench.disturbance import comparable
from fusedgpt.machine.timing import summary

RATES = ("tokens_per_s", "mfu")  # fields that are inversely proportional to a row's median
LARGEST = ("final_loss", "last_loss", "val_loss", "peak_memory")  # fields whose largest value over the rounds counts


def whole(rows: Iterable[dict], by: str) -> set[int]:
    """The rounds with an undisturbed row of every contender that was measured in any round.

    by: the field of a row that names its contender. Rows of a benchmark without rounds count as round 1.
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


def pooled(rows: Iterable[dict], by: str) -> dict[str | int, dict]:
    """{contender: one row for all its rounds}, in the order of first appearance, with the samples of whole rounds.

    "rounds" has the median of each whole round, "dropped" that of each other round. Errors and losses are the largest
    of the whole rounds, so that a round that differs can be seen, and what ran is that of each of them: 'flash or
    blocked'. If no round is whole, the row has all samples and is marked as disturbed. A contender that failed parity
    in one round has no time.
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
    found = {"rounds": {}, "dropped": {}}
    for row in measured:
        found["rounds" if number(row) in kept else "dropped"][number(row)] = row["median_ms"]
    if "errors" in chosen[0]:
        found["errors"] = {name: max(row["errors"][name] for row in chosen) for name in chosen[0]["errors"]}
    for name in LARGEST:
        values = [row[name] for row in chosen if name in row]
        if values:
            found[name] = next((value for value in values if not math.isfinite(value)), max(values))
    for name in ("samples_ms", "first_token_ms"):
        if name in chosen[0]:
            found[name] = [ms for row in chosen for ms in row[name]]
    last = chosen[-1]
    found |= {name: _joined([row[name] for row in chosen if name in row]) for name in ("ran", "kernel") if name in last}
    found |= summary(found["samples_ms"]) if len(chosen) > 1 else {"median_ms": last["median_ms"]}
    found |= {name: last[name] * last["median_ms"] / found["median_ms"] for name in RATES if name in last}
    if not kept:
        reasons = [row["reason"] for row in measured if row.get("disturbed")]
        found |= {"disturbed": True, "reason": "; ".join(reasons) or "no round is whole: others were disturbed in each"}
    return last | found


def _joined(values):
    """What all `values` are, or each of them: 'flash or blocked'. Of dictionaries key by key; lists are united."""
    if all(value == values[0] for value in values):
        return values[0]
    if isinstance(values[0], dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _joined([value[name] for value in values if name in value]) for name in names}
    if isinstance(values[0], list):
        every = [each for value in values for each in value]
        return [each for n, each in enumerate(every) if each not in every[:n]]
    return " or ".join(dict.fromkeys(map(str, values)))


def medians(row: dict) -> str:
    """The median of each round of a pooled row, with dropped rounds in brackets: '113.2, (140.1), 112.9'."""
    every = sorted((row["rounds"] | row["dropped"]).items())
    return ", ".join(f"{ms:.1f}" if n in row["rounds"] else f"({ms:.1f})" for n, ms in every)


def calls(rows: Iterable[dict]) -> list[str]:
    """A sentence for each round that was not measured in turn throughout, but in more than one call of bench.py.

    Rows of earlier versions do not name their call, and a row without a time takes no turn.
    """
    found = {}
    for row in (row for row in rows if row["status"] == "measured"):
        found.setdefault(number(row), set()).add(row.get("call"))
    split = {n: sorted(each) for n, each in sorted(found.items()) if None not in each and len(each) > 1}
    return [f"Round {n} was measured in {len(each)} calls, not in one." for n, each in split.items()]
