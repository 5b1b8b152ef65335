"""Record what a measurement depends on: hardware, versions, commit, and the state of the machine."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys

import torch

from fusedgpt import home
from fusedgpt.machine.device import cpu_instructions, cpu_multiplies_bfloat16
from fusedgpt.machine.memory import total_memory

FLASH_PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4")  # their kernels run on GPUs only


def environment(device: torch.device) -> dict:
    """What a measurement on `device` depends on, as far as it stays the same for all rows of a benchmark."""
    found = {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "commit": os.environ.get("FUSEDGPT_COMMIT") or commit(home.SCRIPTS),  # a copy may lie in another history
        "memory": total_memory(device),
    }
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda or f"ROCm {torch.version.hip}", "cudnn": torch.backends.cudnn.version()}
    for package in ("triton", "transformers", *FLASH_PACKAGES):  # beside PyTorch, they may have kernels
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the CPU's with its instructions, because generations of very different speed share one."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor()
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next((line.partition(": ")[2].strip() for line in file if line.startswith("model name")), name)
    name += f", {torch.backends.cpu.get_cpu_capability()}" + ", MPS" * (device.type == "mps")
    if cpu_multiplies_bfloat16():
        name += "+bfloat16"
        if "amx_tile" in cpu_instructions():
            name += "+AMX"
    return name


def commit(folder: str | os.PathLike) -> str | None:
    """The commit of the clone in `folder`, and a digest of how its code was changed since; None if it is no clone."""
    if os.path.exists(os.path.join(folder, ".git")):
        ask = ["describe", "--always", "--abbrev=12"], ["diff", "HEAD", "--", "*.py"]  # not rows that were added
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # git is not installed, or refuses the folder
            said, changes = (subprocess.check_output(["git", *a], cwd=folder, stderr=subprocess.DEVNULL) for a in ask)
            return said.decode().strip() + (f"-dirty-{hashlib.sha256(changes).hexdigest()[:6]}" if changes else "")
    return None
