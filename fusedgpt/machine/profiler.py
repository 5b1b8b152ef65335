"""Run one call under PyTorch's profiler, and read what it recorded."""

import os
from collections.abc import Callable

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's log messages on stderr


def profile(step: Callable[[], object], shapes: bool = False) -> torch.autograd.profiler.profile:
    """Run `step` once under the profiler, which records the CPU, and the GPU if there is one.

    shapes: record the operators' tensors, for `factors`.
    """
    device = "cuda" if torch.cuda.is_available() else None
    # what torch.profiler.profile is made of: that would import torch._inductor to ask for CUDA graphs
    with torch.autograd.profiler.profile(use_kineto=True, use_device=device, record_shapes=shapes) as found:
        step()
    return found


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
