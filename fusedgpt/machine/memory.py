"""Bytes: what a process or a call holds at its peak, what a machine has and reads."""

import contextlib
import ctypes
import itertools
import os
import statistics
import sys
from collections.abc import Callable

import torch

from fusedgpt.machine import timing
from fusedgpt.machine.profiler import profile


def keep_freed_memory(keep: bool) -> None:
    """Let the process keep the memory that it frees for its next allocation, or return it (glibc only).

    By default glibc returns every large block to the kernel, and a training step on a CPU frees and allocates
    gigabytes: the kernel has to clear each page again. A step of GPT-2 124M on 1 x 1024 tokens took 3.70 s of CPU time
    that way and 3.03 with this call, for 11 % more memory (in float32 55 %); a compiled one, on another day, 1722 ms
    and 1532. If ranks share the model, they are short of memory. A rank of two that train 99M parameters holds 1.5 GB
    at its peak if freed memory is returned at once, and 2.9 GB by glibc's default.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a C library other than glibc
            mallopt = ctypes.CDLL(None).mallopt
            if keep:
                mallopt(-4, 0)  # M_MMAP_MAX: never give a large allocation a mapping of its own
                mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap
            else:
                mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: give each allocation of 1 MiB or more its own mapping


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from here on, if the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # proc(5): reset the peak of the resident set


def peak_memory(device: torch.device) -> int:
    """Most bytes held at once: by PyTorch on a GPU, otherwise by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # not getrusage, where a child starts with its parent's peak
        with open("/proc/self/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def page_faults() -> int:
    """How often the system has given this process a page of memory, cleared or shared (0 if it does not say)."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Most bytes that a call of `step` holds beyond what was held before: tensors and the kernels' scratch memory."""
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        reset_peak_memory(device)
        step()
        return peak_memory(device) - held
    # a CPU process keeps what it frees, so its size says little: add up the allocator's own events instead
    events = [e for e in profile(step, memory=True).profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def total_memory(device: torch.device) -> int:
    """Bytes of memory that `device` has in all: a GPU's own, otherwise the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bandwidth(device: torch.device) -> float:
    """Bytes a second that PyTorch reads from the memory of `device`: the median of five sums over 1 GiB."""
    words = torch.ones(2**28, device=device)  # more than the caches of any processor hold
    ms = timing.samples(words.sum, device, count=5, warmup=1)
    return words.nbytes / (statistics.median(ms) / 1e3)
