"""How long the GPU worked in a profiled call."""

import types

import pytest
import torch
from torch.autograd import DeviceType

from fusedgpt.machine.profiler import busy_ms, profile


def event(start, end, device=DeviceType.CUDA, annotation=False):
    """An event of a profile, from `start` to `end` in microseconds."""
    numbers = dict(start_ns=1000 * start, end_ns=1000 * end, device_type=device, is_user_annotation=annotation)
    return types.SimpleNamespace(**{name: lambda value=value: value for name, value in numbers.items()})


def profile_of(*events):
    results = types.SimpleNamespace(events=lambda: list(events))
    return types.SimpleNamespace(kineto_results=results)


def test_the_gpu_is_busy_while_any_kernel_runs():
    # in a plain sum, parallel kernels would count twice, and a mark over a whole step once more
    side_by_side = (event(500, 900), event(100, 400), event(350, 450), event(120, 130))
    around = (event(0, 2000, annotation=True), event(0, 5000, device=DeviceType.CPU))
    assert busy_ms(profile_of(*side_by_side, *around)) == pytest.approx(0.75)
    assert busy_ms(profile_of(event(0, 5000, device=DeviceType.CPU))) is None


def test_a_real_profile_of_a_cpu_has_no_gpu():
    assert busy_ms(profile(lambda: torch.ones(8) + 1)) is None


@pytest.mark.gpu
def test_a_gpu_is_busy_for_part_of_the_call():
    x = torch.ones(4096, 4096, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def step():
        start.record()
        for _ in range(5):
            x @ x
        end.record()
        torch.cuda.synchronize()

    step()
    busy = busy_ms(profile(step))
    assert 0.5 * start.elapsed_time(end) < busy <= 1.05 * start.elapsed_time(end)
