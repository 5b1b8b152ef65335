"""Run one call under PyTorch's profiler, and read what it recorded."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's log messages on stderr


def profile(step: Callable[[], object], memory: bool = False, shapes: bool = False) -> torch.autograd.profiler.profile:
    """Run `step` once under the profiler, which records the CPU, and the GPU if there is one.

    memory: record the CPU and its allocations, and no GPU. shapes: record the operators' tensors, for `factors` and
    `batches`.
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
    found = set()
    for x in _inputs(profiled, "aten::mm", "aten::addmm"):
        if len(x.sizes) == 2 and 1 in x.strides:
            along = x.strides.index(1)
            found.add((x.sizes[along], x.strides[1 - along]))
    return found


def batches(profiled: torch.autograd.profiler.profile) -> set[int]:
    """The number of matrices in each tensor that a batched matrix product read or wrote, recorded with `shapes`."""
    return {x.sizes[0] for x in _inputs(profiled, "aten::bmm", "aten::baddbmm") if len(x.sizes) == 3}


def _inputs(profiled, *names):
    """The tensors that were given to the operators called `names`."""
    todo = list(profiled.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.name in names:
            yield from (x for x in event.extra_fields.inputs if hasattr(x, "sizes"))


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
