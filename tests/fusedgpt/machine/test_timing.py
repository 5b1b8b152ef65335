"""Only the steps that count are timed, each by the device's own clock."""

import contextlib
import itertools
import statistics
import time
import types

import pytest
import torch

from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.machine import timing

CPU = torch.device("cpu")


def test_a_turn_has_as_many_steps_as_fit_and_one_at_least(monkeypatch):
    told = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: told[0])
    costs = iter([9.0, 9.0, 0.001, 0.002, 0.003, 0.002, 0.010])  # seconds; the first two are warm-up

    def step():
        told[0] += next(costs)

    turn = timing.Steps(step, CPU, warmup=2)
    assert turn(0.5) == pytest.approx([1.0])  # how long a step takes is not known before
    assert turn(0.0035) == pytest.approx([2.0, 3.0, 2.0])
    assert turn(0.0001) == pytest.approx([10.0])


def test_steps_on_a_gpu_are_timed_by_its_own_events(monkeypatch):
    # in a stand-in for the device, events are stamped when recorded, and can be read after waiting for it
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


class StandIns:
    """What PyTorch has for CUDA graphs, without a GPU: `did` is what was asked of the device, in order."""

    def __init__(self, monkeypatch):
        self.did, self.stream = [], "main"
        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        for name, stand_in in {
            "Stream": lambda device: stream,
            "current_stream": lambda device: stream,
            "stream": self.on_side,
            "CUDAGraph": lambda: types.SimpleNamespace(replay=self.note("replay")),
            "graph": self.capture,
            "Event": self.event,
            "set_sync_debug_mode": self.did.append,
            "synchronize": lambda *device: self.did.append("wait"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch, "empty", self.buffer)

    def note(self, what):
        return lambda: self.did.append(what)

    @contextlib.contextmanager
    def on_side(self, stream):
        self.stream = "side"
        try:
            yield
        finally:
            self.stream = "main"

    @contextlib.contextmanager
    def capture(self, graph, stream):
        self.did.append("capture")
        yield
        self.did.append("captured")

    def event(self, enable_timing):
        assert enable_timing
        return types.SimpleNamespace(record=self.note("event"), elapsed_time=lambda end: 0.25)

    def buffer(self, n, dtype, device):
        return types.SimpleNamespace(zero_=self.note("flush"))

    def step(self):
        self.did.append(f"step on {self.stream}")


GPU_7 = torch.device("cuda", 7)  # no test on a GPU has this one


def test_a_gpu_is_timed_by_replays_from_a_cold_cache(monkeypatch):
    # a kernel of 20 us took as long as Python needs to launch it
    device = StandIns(monkeypatch)
    turn, how = timing.of_a_kernel(device.step, GPU_7, warmup=2)
    captured = ["error", "step on side", "default", "capture", "step on side", "captured", "default"]
    assert device.did == [*["step on side"] * 2, *captured, "replay"]  # the first one uploads the graph
    assert device.stream == "main"
    device.did.clear()
    assert turn.make(3) == [0.25] * 3 and how == "graph replay, cold L2"
    assert device.did == [*["flush", "event", "replay", "event"] * 3, "wait"]


def test_a_call_that_waits_for_the_gpu_is_never_captured(monkeypatch):
    # a capture that fails leaves the random numbers of the GPU unusable: dropout after auto would end the run
    def waits():
        device.did.append("step")
        if device.did[-2:] == ["error", "step"]:
            raise RuntimeError("called a synchronizing CUDA operation")

    device = StandIns(monkeypatch)
    assert timing.of_a_kernel(waits, GPU_7, warmup=1)[1] == "calls"
    assert device.did == ["step", "error", "step", "default", "step"] and device.stream == "main"


@pytest.mark.gpu
def test_replays_leave_the_launch_out_and_agree_on_long_kernels():
    gpu = torch.device("cuda", torch.cuda.current_device())
    small, large = torch.ones(16, device=gpu), torch.ones(8192, 8192, device=gpu, dtype=torch.bfloat16)

    def short():  # many launches, which Python makes more slowly than the GPU runs them
        x = small
        for _ in range(20):
            x = x + 1
        return x

    held = torch.cuda.memory_allocated(gpu)
    for step, same in ((short, False), (lambda: large @ large, True)):
        replays, how = timing.of_a_kernel(step, gpu, warmup=3)
        ms, calls = (statistics.median(turn.make(20)) for turn in (replays, timing.Steps(step, gpu, warmup=3)))
        assert how == "graph replay, cold L2"
        assert ms == pytest.approx(calls, rel=0.1) if same else ms < calls
    del replays
    # cuBLAS keeps a workspace for each of two streams, 32 MiB each on Hopper; a result that is kept has 128 MiB
    assert torch.cuda.memory_allocated(gpu) < held + 2**27


@pytest.mark.gpu
def test_a_forward_and_backward_is_captured_and_a_call_that_waits_is_not():
    case = Case((1, 2, 64, 32), torch.device("cuda"), torch.bfloat16)
    inputs, x = case.inputs(), torch.ones(4, device="cuda")
    steps = {name: lambda n=name: case.run(ATTENTION[n], *inputs) for name in ("manual", "math", "efficient", "flash")}
    for name, step in steps.items():
        _, how = timing.of_a_kernel(step, case.device, warmup=2)
        assert how == "graph replay, cold L2", name
    assert timing.of_a_kernel(lambda: x.sum().item(), case.device)[1] == "calls"
    assert (torch.rand(4, device="cuda") < 1).all()  # and the GPU still works
