"""Times are of the calls that count, and their summary is right."""

import itertools
import time

import pytest
import torch

from fusedgpt import timing

CPU = torch.device("cpu")


def test_the_reference_is_a_mean_of_milliseconds_a_call(monkeypatch):
    # a process that is suspended now and then still has a fast call, and even a fast median
    told, costs = [0.0], itertools.cycle([0.001, 0.001, 0.007])  # seconds a call

    def now(device):
        told[0] += next(costs)
        return told[0]

    monkeypatch.setattr(timing, "now", now)
    assert timing.reference(CPU) == pytest.approx(3.0, abs=1.6)
    monkeypatch.undo()
    assert 0 < timing.reference(CPU) < 1e4


def test_samples_leave_warm_up_out(monkeypatch):
    told = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: told[0])
    costs = iter([9.0, 9.0, 0.001, 0.002, 0.003])  # seconds; the first two are warm-up

    def step():
        told[0] += next(costs)

    assert timing.samples(step, CPU, count=3, warmup=2) == pytest.approx([1.0, 2.0, 3.0])
    assert timing.summary([1.0, 2.0, 3.0]) == {"median_ms": 2.0, "p10_ms": 1.2, "p90_ms": 2.8, "samples": 3}


def test_steps_on_a_gpu_are_timed_by_its_own_events(monkeypatch):
    # a stand-in for the device: its events are stamped as they are recorded, and may be read once it was waited for
    clock, waits = itertools.count(), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock) ** 2

        def elapsed_time(self, other):
            assert waits
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    steps = timing.StepClock(torch.device("cuda"))
    for _ in range(3):
        steps.start()
        steps.stop()
    assert not waits
    assert steps.read() == [1, 5, 9] and len(waits) == 1
    assert steps.read() == []
