"""Only the steps that count are timed, each by the device's own clock."""

import statistics
import time
from unittest import mock

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


@pytest.fixture
def gpu(monkeypatch):
    """Stands for torch.cuda, torch.empty and a step, and notes what is called."""
    stand_in = mock.MagicMock()
    stand_in.Event.return_value.elapsed_time.return_value = 0.25
    monkeypatch.setattr(torch, "cuda", stand_in)
    monkeypatch.setattr(torch, "empty", stand_in.empty)
    return stand_in


def done(gpu):
    names = {"step": "step", "set_sync_debug_mode": "debug", "graph().__enter__": "capture", "empty().zero_": "flush"}
    names |= {"CUDAGraph().replay": "replay", "Event().record": "event", "synchronize": "wait"}
    found = [names[name] for name, _, _ in gpu.mock_calls if name in names]
    gpu.reset_mock()
    return found


def test_a_gpu_is_timed_by_replays_from_a_cold_cache(gpu):
    # a kernel of 20 us took as long as Python needs to launch it
    turn, how = timing.of_a_kernel(gpu.step, torch.device("cuda", 7))
    captured = ["debug", "step", "debug", "capture", "step", "debug"]
    assert done(gpu) == ["step", *captured, "replay"]  # the first replay uploads the graph
    assert turn.make(3) == [0.25] * 3 and how == "graph replay, cold L2"
    assert done(gpu) == [*["flush", "event", "replay", "event"] * 3, "wait"]


def test_a_call_that_waits_for_the_gpu_is_never_captured(gpu):
    # a capture that fails leaves the random numbers of the GPU unusable: dropout after auto would end the run
    gpu.step.side_effect = [None, RuntimeError("called a synchronizing CUDA operation"), None]
    assert timing.of_a_kernel(gpu.step, torch.device("cuda", 7))[1] == "calls"
    assert done(gpu) == ["step", "debug", "step", "debug", "step"]
    gpu.empty.side_effect = torch.OutOfMemoryError("CUDA out of memory")  # was timed by calls, beside others' graphs
    with pytest.raises(torch.OutOfMemoryError):
        timing.of_a_kernel(gpu.step, torch.device("cuda", 7))


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
        replays, how = timing.of_a_kernel(step, gpu)
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
        _, how = timing.of_a_kernel(step, case.device)
        assert how == "graph replay, cold L2", name
    assert timing.of_a_kernel(lambda: x.sum().item(), case.device)[1] == "calls"
    assert (torch.rand(4, device="cuda") < 1).all()  # and the GPU still works
