"""Measure memory: the peak of a process, and the size."""

import contextlib
import ctypes
import math
import os
import pathlib
import re
import sys

import torch

OWN_GROUPS, CGROUPS = pathlib.Path("/proc/self/cgroup"), pathlib.Path("/sys/fs/cgroup")


def keep_freed_memory(keep: bool) -> None:
    """Let the process keep freed memory for its next allocation, or return it at once (glibc only).

    By default glibc returns every large block to the kernel, which has to clear each page again: a step of GPT-2 124M
    on 1 x 1024 tokens took 3.70 s of CPU time so, and 3.03 s with keep=True, for 11 % more memory (in float32 55 %).
    fsdp ranks are short of memory: one of two that train 99M parameters peaks at 1.5 GB with keep=False, otherwise 2.9.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)  # another C library has none
    if keep:
        mallopt(-4, 0)  # M_MMAP_MAX: large allocations get no mapping of their own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks
    else:
        mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: allocations of 1 MiB or more get their own mapping


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from here on, if the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # proc(5): reset the peak of the resident set


def peak_memory(device: torch.device) -> float:
    """Most bytes held at once, by PyTorch on a GPU, otherwise by this process; NaN on macOS and Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform != "linux":
        return math.nan
    # not by getrusage, because a child would start with its parent's peak
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        return next((1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM")), math.nan)


def total_memory(device: torch.device) -> float:
    """Bytes of memory of a GPU, otherwise of the machine or its container; infinite where there is no Linux."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if sys.platform != "linux":
        return math.inf
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(size for size, _ in _limits())])


def _limits():
    """(bytes that Docker, SLURM or systemd allow, bytes taken) of each control group (version 2) of this process."""
    path = OWN_GROUPS.read_text(encoding="utf-8", errors="replace").rpartition("::")[2].strip()
    group = pathlib.PurePosixPath(path.lstrip("/"))
    for each in (group, *group.parents):  # a limit holds for all below; Docker shows a container only its own
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            size = int((CGROUPS / each / "memory.max").read_text(encoding="ascii"))
            taken = re.search(r"^anon (\d+)", (CGROUPS / each / "memory.stat").read_text("ascii"), re.MULTILINE)
            yield size, int(taken[1])


def free_memory(device: torch.device) -> float:
    """Bytes that a new process could get on `device` now; infinite if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if sys.platform != "linux":
        return math.inf
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return min([available, *(size - taken for size, taken in _limits())])
