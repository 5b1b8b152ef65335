"""Run one call under PyTorch's profiler, and find out how long the GPU worked for it."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
from torch.autograd import DeviceType

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's log messages on stderr


def profile(step: Callable[[], object], memory: bool = False, shapes: bool = False) -> torch.profiler.profile:
    """Run `step` once under the profiler, which records the CPU, and the GPU if there is one.

    memory: record the CPU and its allocations, and no GPU. shapes: record the operators' tensors, for `factors`.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available() and not memory:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    options = ({"profile_memory": True} if memory else {}) | ({"record_shapes": True} if shapes else {})
    with _quiet(), torch.profiler.profile(activities=activities, **options) as profiled:
        step()
    return profiled


def busy_ms(profiled: torch.profiler.profile) -> float | None:
    """Milliseconds in which the GPU ran at least one kernel or copy; None if it ran none."""
    events = [e for e in profiled.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA]  # ROCm's too
    spans = sorted((e.start_ns(), e.end_ns()) for e in events if not e.is_user_annotation())
    busy = until = 0
    for start, end in spans:  # time with several at once counts once
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6 if spans else None


def factors(profiled: torch.profiler.profile) -> set[tuple[int, int]]:
    """(columns, stride of a row) of each matrix that a matrix product read or wrote, recorded with `shapes`.

    Columns are those of the matrix or of its transpose, whichever is contiguous along a row.
    """
    found, todo = set(), list(profiled.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.name in ("aten::mm", "aten::addmm"):
            for x in event.extra_fields.inputs:
                if len(getattr(x, "sizes", ())) == 2 and 1 in x.strides:
                    along = x.strides.index(1)
                    found.add((x.sizes[along], x.strides[1 - along]))
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what is written to stderr, because the profiler's C++ code writes start and stop marks there."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
