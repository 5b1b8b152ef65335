"""Only the calls that count are timed, and their summary is right."""

import contextlib
import itertools
import math
import shutil
import subprocess
import sys
import time
import types

import pytest
import torch

from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.machine import timing
from tests.launch import ROOT

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


def test_the_reference_waits_until_the_clocks_of_a_gpu_have_risen(monkeypatch):
    # it warmed up for 4 ms, so that a row after a pause of the GPU would have been called disturbed
    told = [0.0]

    class Product:
        """A stand-in for a matrix on a GPU, whose product takes 0.2 ms, and 0.5 ms until the clocks have risen."""

        def __matmul__(self, other):
            told[0] += 0.0005 if told[0] < 0.28 else 0.0002

    monkeypatch.setattr(timing, "now", lambda device: told[0])
    monkeypatch.setattr(torch, "full", lambda *args, **options: Product())
    assert timing.reference(torch.device("cuda")) == pytest.approx(0.2)
    assert told[0] == pytest.approx(0.35, abs=0.02)  # as its description says


def test_samples_leave_warm_up_out(monkeypatch):
    told = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: told[0])
    costs = iter([9.0, 9.0, 0.001, 0.002, 0.003])  # seconds; the first two are warm-up

    def step():
        told[0] += next(costs)

    assert timing.samples(step, CPU, count=3, warmup=2) == pytest.approx([1.0, 2.0, 3.0])
    # skewed samples, as times are: for 1, 2, 3 the mean would equal the median
    found = timing.summary([2.0, 1.0, 9.0])
    assert found == pytest.approx({"median_ms": 2.0, "p10_ms": 1.2, "p90_ms": 7.6, "samples": 3})


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

    def __init__(self, monkeypatch, why_not=None, l2=200):
        self.did, self.stream = [], "main"
        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        for name, stand_in in {
            "Stream": lambda device: stream,
            "current_stream": lambda device: stream,
            "stream": self.on_side,
            "CUDAGraph": lambda: types.SimpleNamespace(replay=self.note("replay"), reset=self.note("reset")),
            "graph": self.capture,
            "Event": self.event,
            "set_sync_debug_mode": self.did.append,
            "synchronize": lambda *device: self.did.append("wait"),
            "get_device_properties": lambda device: types.SimpleNamespace(L2_cache_size=l2 << 20),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch, "empty", self.buffer)
        self.why_not = why_not

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
        if self.why_not:
            raise self.why_not
        yield
        self.did.append("captured")

    def event(self, enable_timing):
        assert enable_timing
        return types.SimpleNamespace(record=self.note("event"), elapsed_time=lambda end: 0.25)

    def buffer(self, n, dtype, device):
        self.flushed = n
        return types.SimpleNamespace(zero_=self.note("flush"))

    def step(self):
        self.did.append(f"step on {self.stream}")


GPU_7 = torch.device("cuda", 7)  # no test on a GPU has this one


def test_a_gpu_is_timed_by_replays_from_a_cold_cache(monkeypatch):
    # a kernel of 20 us took as long as Python needs to launch it
    device = StandIns(monkeypatch)
    found = timing.device_samples(device.step, GPU_7, count=3, warmup=2)
    assert found == ([0.25] * 3, "graph replay, cold L2")
    captured = [*["step on side"] * 2, "error", "step on side", "default", "capture", "step on side", "captured"]
    assert device.did == [*captured, "replay", *["flush", "event", "replay", "event"] * 3, "wait", "reset"]
    assert device.stream == "main"


@pytest.mark.parametrize(("l2", "hip", "flushed"), [(200, None, 400), (50, None, 256), (4, "7.2", 512)])
def test_what_is_written_between_replays_is_twice_the_cache(l2, hip, flushed, monkeypatch):
    # an MI300X has an L2 cache of 4 MiB and 256 MiB behind it: a flush of 256 MiB would leave some inputs there
    device = StandIns(monkeypatch, l2=l2)
    monkeypatch.setattr(torch.version, "hip", hip)
    timing.device_samples(device.step, GPU_7, count=1, warmup=0)
    assert device.flushed == flushed << 20


def test_a_call_that_cannot_be_captured_is_timed_as_a_call_and_says_so(monkeypatch):
    device = StandIns(monkeypatch, why_not=RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(timing, "samples", lambda step, device, count, warmup: [7.0] * count)
    assert timing.device_samples(device.step, GPU_7, count=2, warmup=1) == ([7.0, 7.0], "calls")
    assert "replay" not in device.did


def test_a_call_that_waits_for_the_gpu_is_never_captured(monkeypatch):
    # a capture that fails leaves the random numbers of the GPU unusable: dropout after auto would end the run
    def waits():
        device.did.append("step")
        if device.did[-2:] == ["error", "step"]:
            raise RuntimeError("called a synchronizing CUDA operation")

    device = StandIns(monkeypatch)
    monkeypatch.setattr(timing, "samples", lambda step, device, count, warmup: [7.0] * count)
    assert timing.device_samples(waits, GPU_7, count=1, warmup=1) == ([7.0], "calls")
    assert device.did == ["step", "error", "step", "default"] and device.stream == "main"


@pytest.mark.gpu
def test_replays_leave_the_launch_out_and_agree_on_long_kernels():
    gpu = torch.device("cuda", torch.cuda.current_device())
    small, large = torch.ones(16, device=gpu), torch.ones(8192, 8192, device=gpu, dtype=torch.bfloat16)

    def short():  # many launches, which Python makes more slowly than the GPU runs them
        x = small
        for _ in range(20):
            x = x + 1
        return x

    def median(ms):
        return timing.summary(ms)["median_ms"]

    held = torch.cuda.memory_allocated(gpu)
    for step, same in ((short, False), (lambda: large @ large, True)):
        ms, how = timing.device_samples(step, gpu, count=20, warmup=3)
        calls = median(timing.samples(step, gpu, count=20, warmup=3))
        assert how == "graph replay, cold L2"
        assert median(ms) == pytest.approx(calls, rel=0.1) if same else median(ms) < calls
    # cuBLAS keeps a workspace for each of two streams, 32 MiB each on Hopper; a result that is kept has 128 MiB
    assert torch.cuda.memory_allocated(gpu) < held + 2**27


@pytest.mark.gpu
def test_a_forward_and_backward_is_captured_and_a_call_that_waits_is_not():
    case = Case((1, 2, 64, 32), torch.device("cuda"), torch.bfloat16)
    inputs, x = case.inputs(), torch.ones(4, device="cuda")
    steps = {name: lambda n=name: case.run(ATTENTION[n], *inputs) for name in ("manual", "math", "efficient", "flash")}
    for name, step in steps.items():
        _, how = timing.device_samples(step, case.device, count=2, warmup=2)
        assert how == "graph replay, cold L2", name
    assert timing.device_samples(lambda: x.sum().item(), case.device, count=3, warmup=1)[1] == "calls"
    assert (torch.rand(4, device="cuda") < 1).all()  # and the GPU still works


def test_time_that_other_programs_took_is_not_a_calls_own(monkeypatch):
    # beside ten programs every call waits for the processor, and which kernel auto took was luck
    clocks = {"wall": 0.0, "cpu": 0.0}

    def step():
        clocks["wall"] += waits.pop()
        clocks["cpu"] += 0.002

    monkeypatch.setattr(timing, "now", lambda device: clocks["wall"])
    monkeypatch.setattr(timing, "own_clock", lambda: lambda: clocks["cpu"])
    waits = [0.001, 0.050, 0.030]  # the last: two threads on an idle machine
    assert timing.own_samples(step, CPU, count=2, warmup=1) == pytest.approx([2.0, 1.0])


def test_calls_that_other_programs_held_up_are_recognised(monkeypatch):
    # 7 of 80 choices beside a busy process rested on calls that were all disturbed, each by another share

    def held_up(switches, ms, alone_ms, cpu_s=2.0):
        monkeypatch.setattr(timing, "usage", lambda: (7 + switches, 1.0 + cpu_s))
        return timing.held_up((7, 1.0), ms, alone_ms)

    monkeypatch.setattr(timing, "PREEMPTED", 100)
    assert not held_up(199, [9.0], 1.0)  # on many cores a small model is slower than on one, without other programs
    assert held_up(201, [1.0], 2.0)
    assert not held_up(9, [1.0], 2.0, cpu_s=0.0)
    assert held_up(11, [1.0], 2.0, cpu_s=0.0)
    monkeypatch.setattr(timing, "PREEMPTED", math.inf)  # no Linux
    assert not held_up(999, [1.0, 1.0, 9.0], 1.0)
    assert held_up(0, [1.0, 1.2, 1.2], 1.0)  # the median: one lucky call does not count


def test_on_one_thread_and_back_even_after_an_error():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # the tests have one: nothing would have to change
    try:
        with pytest.raises(ZeroDivisionError), timing.on_one_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_usage_is_that_of_this_process_and_of_its_children(monkeypatch):
    # rows of the ladder are measured in children, and those of the sweep here: either half alone misses disturbances
    counts = {
        "self": types.SimpleNamespace(ru_nivcsw=1, ru_nvcsw=2**20, ru_utime=10.0, ru_stime=2.0),
        "children": types.SimpleNamespace(ru_nivcsw=300, ru_nvcsw=2**30, ru_utime=0.25, ru_stime=0.5),
    }
    fake = types.SimpleNamespace(RUSAGE_SELF="self", RUSAGE_CHILDREN="children", getrusage=counts.get)
    monkeypatch.setattr(timing, "resource", fake)
    assert timing.usage() == (301, 12.75)
    monkeypatch.setattr(timing, "resource", None)  # Windows
    monkeypatch.setattr(timing.time, "process_time", lambda: 7.0)
    assert timing.usage() == (0, 7.0)


@pytest.mark.skipif(not shutil.which("sh") or sys.platform == "win32", reason="needs ulimit")
def test_under_a_limit_of_cpu_time_calls_have_times(monkeypatch):
    # Linux then counts CPU time in steps of 4 ms: `auto` divided by 0, or remembered a choice by whole steps
    code = "from fusedgpt.machine import timing; import time, torch; print(timing.own_clock() is time.perf_counter)"
    code += "; print(min(timing.own_samples(lambda: torch.ones(9), torch.device('cpu'), 20, 1)) > 0)"
    said = subprocess.run(
        ["sh", "-c", f'ulimit -t 1000; exec "{sys.executable}" -c "{code}"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert said[1] == "True" and (said[0] == "True" or sys.platform != "linux")
