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
