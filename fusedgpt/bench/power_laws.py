"""What the rows of growth.py say: curves, and the power law y = a n^b of each.

A cost is a sum of terms. The one that grows fastest leads at the end of a curve, and hardly shows at its start.
"""

import dataclasses

import numpy as np

from fusedgpt.attention.table import scores_held
from fusedgpt.bench import rounds
from fusedgpt.bench.disturbance import comparable

BEND = 1.1  # a curve bends if one power law for all of it misses a point by more than this factor
FEWEST = 3  # fit at least so many points of a curve that bends
STEPS = ("length", "depth", "width", "batch")  # parts that time training steps


@dataclasses.dataclass(frozen=True)
class Axis:
    """What grows along a curve: its name, its letter, and the power of it with which time grows in the end."""

    what: str
    letter: str
    limit: int


# by `over` of a row, or by its part
AXES = {
    "length": Axis("tokens", "T", 2),  # every token has a score for every other one
    "depth": Axis("layers", "L", 1),
    "width": Axis("channels", "C", 2),  # matrices are C x C
    "batch": Axis("sequences", "B", 1),
    "tokens": Axis("new tokens", "T", 2),  # each reads the keys of all before it
    "samples": Axis("samples", "B", 1),
    "text": Axis("megabytes", "n", 1),
    "cores": Axis("cores", "p", -1),
}


def fit(points: dict[float, float]) -> tuple[float, float]:
    """(b, a) of the y = a n^b closest to `points`, {n: y}: least squares of the logarithms. Needs two points."""
    b, log_a = np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)
    return float(b), float(np.exp(log_a))


def straight(points: dict[float, float]) -> dict[float, float]:
    """Those of `points` to fit: all, or the last half of a curve that bends."""
    b, a = fit(points)
    if all(1 / BEND <= y / (a * n**b) <= BEND for n, y in points.items()):
        return points
    last = sorted(points)[-max(FEWEST, (len(points) + 1) // 2) :]
    return {n: points[n] for n in last}


def curves(rows: list[dict]) -> dict[tuple[str, str], dict[int, dict]]:
    """{(part, kernel or axis): {n: one row for its rounds}}. A round counts if no point of the curve was disturbed."""
    found = {}
    for row in rows:
        found.setdefault(curve_of(row), []).append(row)
    return {curve: dict(sorted(rounds.pooled(group, by="n").items())) for curve, group in found.items()}


def curve_of(row: dict) -> tuple[str, str]:
    """The curve of a row, or of a law."""
    return row["part"], row.get("attention") or row["over"]


def laws(rows: list[dict]) -> list[dict]:
    """A row for the power law of each curve: of its time and, for steps, of its memory.

    `exponent` is that of the medians over all rounds, `exponents` has that of each round, `doubling` is by what the
    cost is multiplied for twice the n. `n` has the points that were fitted. `counted` is the exponent of the count (of
    FLOPs, bytes or estimated memory) at these points, `limit` that of the term that grows fastest.
    """
    found = []
    for (part, name), points in curves(rows).items():
        of = {"part": part, "attention": name} if part in STEPS else {"part": part, "over": name}
        found += _law(of | {"law": "time"}, points, "median_ms", "work", AXES[of.get("over", part)].limit)
        if part in STEPS:
            # of sequences, the backward needs the softmax of every score, or of none
            limit = 1 if part == "length" and scores_held(name) == "none" else AXES[part].limit
            found += _law(of | {"law": "memory"}, points, "peak_memory", "estimated_memory", limit)
    return found


def _law(of, points, field, count, limit):
    """[the law of a curve], or [] if it has less than two points."""
    points = {n: row for n, row in points.items() if counts(row, of["law"])}
    if len(points) < 2:
        return []
    fitted = straight({n: row[field] for n, row in points.items()})
    exponent, factor = fit(fitted)
    whole = points[next(iter(fitted))]["rounds"] if of["law"] == "time" else ()  # of one curve all have the same
    each = {number: fit({n: points[n]["rounds"][number] for n in fitted})[0] for number in whole}
    counted, _ = fit({n: points[n][count] for n in fitted})
    found = {"exponent": exponent, "exponents": each, "doubling": 2**exponent, "factor": factor, "n": list(fitted)}
    return [{**of, "status": "measured", **found, "counted": counted, "limit": limit}]


def counts(row: dict, law: str) -> bool:
    """Whether a law may use a row: a disturbance spoils times only."""
    return comparable(row) if law == "time" else row["status"] == "measured"
