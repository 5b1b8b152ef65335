"""Ratios within laps, intervals by order statistics, random order; a race drops who is far behind."""

import statistics
import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fusedgpt.machine import timing, turns


def test_the_interval_holds_the_median_in_95_of_100_samples():
    # an interval of means would miss the median of such samples nearly always
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        low, high = turns.interval((draw.lognormal(0.0, 2.0, 25)).tolist())
        held += low <= 1.0 <= high
    assert 0.93 <= held / 400 <= 0.99
    assert turns.interval([1.0] * 5) == (0.0, float("inf"))  # 2 / 2**5 is more than 5 %
    assert turns.interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)


def test_a_ratio_is_taken_within_each_lap():
    # load that doubles in the second half doubles both; medians of all times would say 1.5 or 2
    base = [1.0] * 9 + [4.0] * 11
    laps = [{"a": ms, "b": 2 * ms} for ms in base]
    found = turns.ratio(laps, "b", "a")
    assert (found.times, found.low, found.high, found.laps) == (0.5, 0.5, 0.5, 20)
    assert found.precision == 0
    assert turns.ratio([*laps, {"a": 1.0}, {"b": 1.0}], "b", "a").laps == 20  # a lap that lacks one has no ratio
    assert turns.ratio([{"a": 1.0}], "b", "a") is None


def test_a_ratio_is_the_median():
    # a lap in which another program had the processor is one of many
    assert turns.ratio([{"a": 2.0, "b": 1.0}] * 8 + [{"a": 90.0, "b": 1.0}], "b", "a").times == 2.0


def test_turns_come_in_a_new_random_order_each_lap():
    order = []
    laps = turns.Laps({name: lambda seconds, name=name: order.append(name) or [1.0] for name in "abc"})
    for _ in range(200):
        laps.run(0.5)
    each = [tuple(order[n : n + 3]) for n in range(0, len(order), 3)]
    assert all(sorted(lap) == ["a", "b", "c"] for lap in each)  # nobody twice, nobody left out
    assert len(set(each)) == 6


def test_a_lap_has_the_median_of_a_turn_and_passes_the_seconds_on():
    asked = []
    laps = turns.Laps({"a": lambda seconds: asked.append(seconds) or [3.0, 1.0, 50.0]})
    assert laps.run(0.25) == {"a": 3.0} and asked == [0.25]


def test_who_fails_takes_no_more_turns_and_the_others_go_on():
    def fails(seconds):
        raise RuntimeError("gone")

    laps = turns.Laps({"a": lambda seconds: [1.0], "b": fails})
    assert laps.run(0.0) == laps.run(0.0) == {"a": 1.0}
    assert str(laps.failed["b"]) == "gone" and laps.by_speed() == ["a"]
    laps = turns.Laps({"a": lambda seconds: (_ for _ in ()).throw(torch.AcceleratorError("an illegal access"))})
    with pytest.raises(torch.AcceleratorError):  # the GPU has crashed, for every other contender too
        laps.run(0.0)


def test_a_race_in_which_all_fail_raises_what_they_raised():
    # out of memory while dtypes were timed was a bare StopIteration
    full = Mock(side_effect=MemoryError("no room"))
    with pytest.raises(MemoryError, match="no room"):
        turns.race({"a": full, "b": full}, seconds=0.0)


def test_a_race_ends_in_time_and_drops_who_is_far_behind(monkeypatch):
    told, made = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: told[0])

    def turn(name, ms):
        def take(seconds):
            made.append(name)
            told[0] += ms / 1e3
            return [ms]

        return take

    found = {name: turn(name, ms) for name, ms in dict(a=1.0, b=1.2, slow=2.0, hopeless=30.0).items()}
    laps = turns.race(found, seconds=0.2)
    assert laps.by_speed() == ["a", "b", "slow", "hopeless"]
    warm_up = 1  # lap
    assert made.count("hopeless") == warm_up + 1 and made.count("slow") == warm_up + turns.LAPS_TO_TELL
    assert 70 < made.count("a") == made.count("b") < 110
    assert laps.of("a") == [1.0] * len(laps.ms)


def test_a_summary_is_of_percentiles():
    # a p90 in the place of the p10, or a mean in the median's
    ms = [float(n) for n in range(1, 12)] + [1000.0]
    got = timing.summary(ms)
    assert got["median_ms"] == statistics.median(ms) and got["samples"] == 12
    assert (got["p10_ms"], got["p90_ms"]) == tuple(np.percentile(ms, [10, 90])) and got["p10_ms"] < got["p90_ms"]
