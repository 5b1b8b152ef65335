"""Contenders take turns: how much faster one is than another, on a machine that other programs use too.

A lap gives each contender one turn of a fraction of a second, in a new random order. Load hits all of them alike, so a
ratio is taken within each lap: the median of all laps, with an interval by order statistics.
"""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch

Turn = Callable[[float], list[float]]  # takes seconds; makes steps, one at least; returns the ms of each

CONFIDENCE = 0.95
FAR_BEHIND, LAPS_TO_TELL = 1.5, 3  # in a race, drop out if a step takes so many times as long as the fastest's
HOPELESS = 4  # drop out after one lap
FEWEST = 5  # laps of a race, however long they take


class Laps:
    """Laps of contenders, {name: its turn}. `ms` has a dict for each lap: {name: median milliseconds of a step}.

    A contender whose turn raises an exception takes no more turns; `failed` has the exception.
    """

    def __init__(self, turns: Mapping[Hashable, Turn]):
        self.turns, self.order = dict(turns), random.Random()
        self.ms: list[dict[Hashable, float]] = []
        self.failed: dict[Hashable, Exception] = {}

    def run(self, seconds: float) -> dict[Hashable, float]:
        """One lap, with `seconds` for each turn. Raises what means that the device is lost."""
        names, ms = list(self.turns), {}
        self.order.shuffle(names)
        for name in names:
            try:
                ms[name] = statistics.median(self.turns[name](seconds))
            except torch.AcceleratorError:  # the GPU has crashed, for every other contender too
                raise
            except Exception as error:
                self.failed[name] = error.with_traceback(None)  # its frames would keep tensors
                del self.turns[name]
        self.ms.append(ms)
        return ms

    def of(self, name: Hashable) -> list[float]:
        """The milliseconds of a contender, lap by lap."""
        return [lap[name] for lap in self.ms if name in lap]

    def by_speed(self) -> list[Hashable]:
        """The contenders that did not fail, from the fastest on; one that was dropped is judged by its own laps."""
        timed = [name for name in dict.fromkeys(name for lap in self.ms for name in lap) if name not in self.failed]
        if not self.turns:
            return sorted(timed, key=lambda name: statistics.median(self.of(name)))
        base = next(iter(self.turns))  # it ran in every lap
        return sorted(timed, key=lambda name: -statistics.median(ratios(self.ms, name, base)))


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another a contender is, in how many laps. 0 to infinity is no knowledge."""

    times: float
    low: float
    high: float
    laps: int

    @property
    def precision(self) -> float:
        """Half the width of the interval, as a share of the ratio."""
        return (self.high - self.low) / 2 / self.times

    @property
    def known(self) -> bool:
        """Whether there were laps enough for an interval."""
        return self.high < float("inf")


def ratio(laps: list[Mapping[Hashable, float]], name: Hashable, base: Hashable) -> Ratio | None:
    """How many times as fast as `base` a contender is; None if they were never in one lap."""
    found = ratios(laps, name, base)
    return Ratio(statistics.median(found), *interval(found), len(found)) if found else None


def ratios(laps: list[Mapping[Hashable, float]], name: Hashable, base: Hashable) -> list[float]:
    """How many times as fast as `base` a contender was, in each lap that has both."""
    return [lap[base] / lap[name] for lap in laps if base in lap and name in lap]


def interval(values: list[float]) -> tuple[float, float]:
    """The interval that has the median of the population with CONFIDENCE, from the order of `values` alone.

    With fewer than six values no interval can be so sure: it is (0, infinity).
    """
    from scipy import stats  # takes a second to import

    if len(values) < 6:
        return 0.0, float("inf")
    return tuple(map(float, stats.quantile_test(values, p=0.5).confidence_interval(CONFIDENCE)))


def race(turns: Mapping[Hashable, Turn], seconds: float) -> Laps:
    """Laps of one step for `seconds`, to find the fastest contender: whoever is far behind drops out.

    Raises what the first contender raised if none is left.
    """
    laps = Laps(turns)
    laps.run(0.0)  # warms up
    laps.ms.clear()
    end = time.perf_counter() + seconds
    while laps.turns and (len(laps.ms) < FEWEST or time.perf_counter() < end):
        laps.run(0.0)
        behind = HOPELESS if len(laps.ms) < LAPS_TO_TELL else FAR_BEHIND
        middle = {name: statistics.median(laps.of(name)) for name in laps.turns}
        for name in [name for name in middle if middle[name] > behind * min(middle.values())]:
            del laps.turns[name]
        if len(laps.turns) == 1:
            break
    if laps.failed and not laps.by_speed():
        raise next(iter(laps.failed.values()))
    return laps
