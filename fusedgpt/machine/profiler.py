"""One call under PyTorch's profiler, and how long the GPU worked for it."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
from torch.autograd import DeviceType

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's log messages on stderr


def profile(step: Callable[[], object], memory: bool = False) -> torch.profiler.profile:
    """Run `step` once under the profiler, on the CPU and the GPU if there is one.

    memory: record the allocations of the CPU instead, which needs no GPU activity.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available() and not memory:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    options = {"profile_memory": True} if memory else {}
    with _quiet(), torch.profiler.profile(activities=activities, **options) as profiled:
        step()
    return profiled


def busy_ms(profiled: torch.profiler.profile) -> float | None:
    """Milliseconds in which the GPU ran a kernel or a copy, without the gaps between; None if it ran none."""
    events = [e for e in profiled.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA]  # ROCm's too
    spans = sorted((e.start_ns(), e.end_ns()) for e in events if not e.is_user_annotation())
    busy = until = 0
    for start, end in spans:  # those that run side by side count once
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6 if spans else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep stderr off the console: the profiler's C++ code writes start and stop marks there."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
