"""Contenders take turns until their ratios are known; whoever ends early does not take the others with it."""

import time
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch

from fusedgpt.bench import comparison, rows
from fusedgpt.bench.comparison import Comparison, Measurement
from fusedgpt.bench.rows import Ended, Result

CPU = torch.device("cpu")


class Fake:
    """A contender that takes `ms` a step. ends: the turn in which it does; most_alive: how many have room."""

    alive: ClassVar[list] = []

    def __init__(self, ms, ends=None, most_alive=None):
        self.ms, self.ends, self.turns, self.closed = ms, ends, 0, False
        Fake.alive = [other for other in Fake.alive if not other.closed]
        if most_alive and len(Fake.alive) >= most_alive:
            raise torch.OutOfMemoryError("no room")
        Fake.alive.append(self)

    def ready(self):
        return {"errors": {"y": 0.0}}

    def turn(self, seconds):
        self.turns += 1
        if self.turns == self.ends:
            raise Ended("failed", "it hung")
        return [100.0 if self.turns == 1 else self.ms]  # the first turn is a warm-up

    def close(self):
        self.closed = True


@pytest.fixture
def measure(monkeypatch):
    """measure({name: how to make it}, …) -> (the result, the lines written, what was said)."""
    Fake.alive = []

    def measure(contenders, result=None, baseline="a", turn=0.5, precision=0.01, seconds=0.0, **more):
        result = result or Result({"T": 64}, baseline)
        lines, said = [], []
        Measurement(
            Comparison(result.workload, tuple(contenders), baseline),
            result,
            lambda name: contenders[name](),
            lambda line: lines.append(line) or line,
            said.append,
            CPU,
            turn,
            precision,
            seconds,
            **{"end": float("inf")} | more,
        ).run()
        assert all(contender.closed for contender in Fake.alive)
        return result, lines, said

    return measure


def test_laps_go_on_until_the_intervals_are_narrow(measure):
    result, lines, _ = measure({"b": lambda: Fake(2.0), "a": lambda: Fake(1.0)}, seconds=1000.0)
    assert len(result.laps) == 10 and result.ratio("b").times == 0.5
    assert result.laps[0] == {"a": 1.0, "b": 2.0}  # a warm-up would have been 100 ms
    assert [line["name"] for line in lines[:2]] == ["a", "b"]  # the baseline is built first
    (written,) = rows.results(lines)
    assert written.laps == result.laps and written.ratio("b") == result.ratio("b")  # what is written is what is known


def test_laps_end_when_the_time_is_over_and_the_same_command_adds_more(measure):
    noise = iter(range(10**6))

    def noisy():
        contender = Fake(1.0)
        contender.turn = lambda seconds: [1.0 + next(noise) % 2]
        return contender

    both = {"a": noisy, "b": lambda: Fake(1.0)}
    result, _, said = measure(both)
    assert len(result.laps) == comparison.LEAST and said[-1] == "6 laps: the widest interval is b's, ± 33.3 %"
    result, _, _ = measure(both, result)
    assert len(result.laps) == 2 * comparison.LEAST
    result, lines, _ = measure(both, result, precision=10.0)
    assert lines == []  # all is known
    result, lines, _ = measure(both, result, end=time.monotonic() - 1)
    assert lines == []


@pytest.mark.parametrize("ends", [1, 3])  # the first turn is the warm-up
def test_whoever_ends_early_leaves_the_others_their_figures(ends, measure):
    found = {"a": lambda: Fake(1.0), "b": lambda: Fake(2.0, ends), "c": lambda: Fake(4.0)}
    result, _, said = measure(found, seconds=1000.0)
    assert result.ratio("c").times == 0.25 and result.ratio("b") is None
    assert result.contenders["b"]["reason"] == "it hung" and "64, b: failed: it hung" in said
    result, _, _ = measure(found | {"b": lambda: Fake(2.0)}, result, seconds=1000.0)  # and it is tried again
    assert result.ratio("b").times == 0.5


def test_without_a_baseline_there_are_times(measure):
    # manual is out of memory at lengths where others are not: these went on for ever, or had nothing
    full = Mock(side_effect=MemoryError("no room"))
    result, _, _ = measure({"a": full, "b": lambda: Fake(2.0), "c": lambda: Fake(4.0)}, seconds=1000.0)
    assert result.contenders["a"]["status"] == "out of memory" and result.ratio("c") is None
    assert result.ms("c")["median_ms"] == 4.0 and len(result.laps) == comparison.FEWEST


def test_a_baseline_that_ends_ends_the_laps(measure):
    result, _, _ = measure({"a": lambda: Fake(1.0, ends=4), "b": lambda: Fake(2.0)}, seconds=1000.0)
    assert len(result.laps) == 3 and result.contenders["a"]["status"] == "failed"


@pytest.mark.parametrize("many", [1, 4])
def test_contenders_that_do_not_fit_together_take_turns_in_groups(many, measure):
    names = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}
    found = {name: lambda ms=ms: Fake(ms, most_alive=2) for name, ms in names.items()}
    result, _, _ = measure(found, seconds=1000.0, many=many)
    assert {name: result.ratio(name).times for name in "bcd"} == {"b": 0.5, "c": 0.25, "d": 0.125}
    assert all("a" in lap and len(lap) <= 2 for lap in result.laps)


def test_another_is_not_started_if_there_is_no_room_for_it(measure, monkeypatch):
    # a machine that swaps, or whose system kills what is largest, does not say that memory is full
    free = iter([10e9, 7e9, 7e9, 4e9, *[2e9] * 99])
    monkeypatch.setattr(comparison.memory, "free_memory", lambda device: next(free))
    result, _, _ = measure({name: lambda: Fake(1.0) for name in "abc"}, seconds=1000.0)
    assert [sorted(lap) for lap in result.laps] == [["a", "b"]] * 10 + [["a", "c"]] * 10


def test_a_contender_that_is_refused_or_wrong_is_not_tried_again(measure):
    built = []

    def refused():
        built.append("b")
        raise Ended("refused", "on GPUs only")

    both = {"a": lambda: Fake(1.0), "b": refused, "c": lambda: Fake(1.0)}
    result, _, said = measure(both)
    measure(both, result)
    assert built == ["b"] and "64, b: refused: on GPUs only" in said


def test_what_takes_no_turns_is_known_once_it_is_built(measure):
    built = []

    def contender():
        built.append("a")
        return comparison.InProcess(None, {"errors": {"y": 0.0}})

    result, _, _ = measure({"a": contender}, turn=0.0)
    measure({"a": contender}, result, turn=0.0)
    assert built == ["a"] and result.laps == [] and result.measured.keys() == {"a"}


def test_only_what_is_absent_is_built_again_if_the_others_are_known(measure):
    # one kernel that never fits made the same command measure all others again
    full = Mock(side_effect=MemoryError("no room"))
    found = {"a": lambda: Fake(1.0), "b": lambda: Fake(2.0), "c": full}
    result, _, _ = measure(found, seconds=1000.0)
    _, lines, _ = measure(found, result, seconds=1000.0)
    assert {line["name"] for line in lines if line["kind"] == "contender"} == {"a", "c"}
    # after a commit, the new line of the baseline dropped its laps, and b had no ratio
    _, lines, _ = measure(found, result, seconds=1000.0, stale=True)
    assert {line["name"] for line in lines if line["kind"] == "contender"} == {"a", "b", "c"}


def test_laps_of_other_code_tell_nothing_of_how_narrow_the_intervals_are(measure):
    # 96 laps of the code before ended the laps of the new code, and the report had half of the precision asked for
    both = {"a": lambda: Fake(1.0), "b": lambda: Fake(2.0)}
    result, _, _ = measure(both, precision=-1.0)
    for line in result.contenders.values():
        line["commit"] = "the one before"
    result, _, _ = measure(both, result, precision=-1.0)
    assert sum("b" in lap for lap in result.laps) == comparison.LEAST < len(result.laps)


def test_nothing_is_built_once_the_time_is_over(measure, monkeypatch):
    built = []
    monkeypatch.setattr(comparison.time, "monotonic", lambda: 0.3 * len(built))
    found = {name: lambda name=name: built.append(name) or Fake(1.0) for name in "abcd"}
    result, _, _ = measure(found, end=0.5)
    assert built == ["a", "b"] and result.laps == []


def test_ctrl_c_ends_all_contenders(measure):
    def interrupted():
        contender = Fake(1.0)
        contender.turn = lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt)
        return contender

    with pytest.raises(KeyboardInterrupt):
        measure({"a": lambda: Fake(1.0), "b": interrupted})
    assert all(contender.closed for contender in Fake.alive)
    with pytest.raises(KeyboardInterrupt):  # while one is built
        measure({"a": lambda: Fake(1.0), "b": lambda: (_ for _ in ()).throw(KeyboardInterrupt)})
    assert all(contender.closed for contender in Fake.alive)


def test_two_per_cent_more_are_found(measure):
    # the planted contender sleeps 2 % of each step, while the machine is up to three times as slow
    clock = iter(range(10**6))

    def planted(ms):
        contender = Fake(ms)
        contender.turn = lambda seconds: [ms * (1 + (next(clock) // 2) % 7 / 3)]
        return contender

    result, _, _ = measure({"a": lambda: planted(1.0), "b": lambda: planted(1.02)}, precision=1e-9, seconds=0.05)
    assert result.ratio("b").times == pytest.approx(1 / 1.02, rel=5e-3)
