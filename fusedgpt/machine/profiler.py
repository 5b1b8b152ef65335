"""Run one call under PyTorch's profiler, and read what it recorded."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's log messages on stderr


def profile(step: Callable[[], object], memory: bool = False, shapes: bool = False) -> torch.autograd.profiler.profile:
    """Run `step` once under the profiler, which records the CPU, and the GPU if there is one.

    memory: record the CPU and its allocations, and no GPU. shapes: record the operators' tensors, for `factors`.
    """
    options = {"profile_memory": memory, "record_shapes": shapes}
    if torch.cuda.is_available() and not memory:
        kinds = torch.profiler.ProfilerActivity
        recorder = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], **options)
    else:  # what torch.profiler.profile is made of: it would import torch._inductor to ask for CUDA graphs
        recorder = torch.autograd.profiler.profile(use_kineto=True, **options)
    with _quiet(), recorder:
        step()
    return getattr(recorder, "profiler", recorder)


def factors(profiled: torch.autograd.profiler.profile) -> set[tuple[int, int]]:
    """(columns, stride of a row) of each matrix that a matrix product read or wrote, recorded with `shapes`.

    Columns are those of the matrix or of its transpose, whichever is contiguous along a row.
    """
    todo, found = list(profiled.kineto_results.experimental_event_tree()), set()
    while todo:
        event = todo.pop()
        todo += event.children
        if event.name not in ("aten::mm", "aten::addmm"):
            continue
        for x in event.extra_fields.inputs:
            if hasattr(x, "sizes") and len(x.sizes) == 2 and 1 in x.strides:
                along = x.strides.index(1)
                found.add((x.sizes[along], x.strides[1 - along]))
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop stderr, to which the profiler's C++ code writes start and stop marks."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
