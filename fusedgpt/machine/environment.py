"""Record what a measurement depends on: hardware, versions, commit, and the state of the machine."""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys

import torch

from fusedgpt import home
from fusedgpt.machine.device import cpu_has_amx, cpu_multiplies_bfloat16

FLASH_PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4")  # their kernels run on GPUs only
CPUINFO = pathlib.Path("/proc/cpuinfo")


def environment(device: torch.device) -> dict:
    """What a measurement on `device` depends on, as far as it stays the same for all rows of a benchmark."""
    found = {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        # the variable comes first: a copy on a lent machine may lie in another history. An installed package may lie in
        # a repository of its user's
        "commit": os.environ.get("FUSEDGPT_COMMIT") or (None if home.INSTALLED else commit(home.SCRIPTS)),
    }
    if device.type == "cuda":
        found |= {"memory": torch.cuda.get_device_properties(device).total_memory}
    elif hasattr(os, "sysconf"):
        found |= {"memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    return found | kernel_versions(device) | _versions("triton", "transformers")


def kernel_versions(device: torch.device) -> dict:
    """The versions, beside PyTorch's, of what has kernels for `device`: CUDA, cuDNN and packages."""
    if device.type != "cuda":
        return {}
    found = {"cuda": torch.version.cuda or f"ROCm {torch.version.hip}", "cudnn": torch.backends.cudnn.version()}
    return found | _versions("triton", *FLASH_PACKAGES)


def _versions(*packages):
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the CPU's with its instructions, because generations of very different speed share one."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = []
    if sys.platform == "linux":  # which gives Arm's processors numbers instead of names
        names = _cpuinfo("model name") or [f"CPU part {number}" for number in _cpuinfo("CPU part")]
    instructions = torch.backends.cpu.get_cpu_capability()
    if cpu_multiplies_bfloat16():
        instructions += "+bfloat16" + ("+AMX" if cpu_has_amx() else "")
    return f"{names[0] if names else platform.processor()}, {instructions}"


def _cpuinfo(name):
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.split(":")[1].strip() for line in lines if line.startswith(name)]


def commit(folder: str | os.PathLike) -> str | None:
    """The commit of the clone in `folder`, marked if its files were changed since; None if it is no clone."""
    # a copy without .git may lie in another repository, which then has none of its files
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=12") if _git(folder, "ls-files", ".") else None


def _git(folder, *command):
    """What a git command says of `folder`; None if it fails."""
    git = ["git", "-C", folder, *command]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
