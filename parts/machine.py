"""What this machine is and can do: device, dtype, compiler; one seed, one stream of random numbers for each use."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys

import numpy as np
import torch

from parts.errors import UserError

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter on stderr

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device(name, local_rank=None):
    """The torch.device for a setting: 'auto' takes a GPU where there is one.

    Under torchrun each rank takes the GPU of its `local_rank`, also where one was named: two would share it.
    """
    accelerator = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = torch.device(accelerator if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"device={name!r} is no device of PyTorch's: try auto, cpu, cuda, cuda:1 or mps") from error
    if chosen.type not in ("cpu", accelerator):
        raise UserError(f"device={name!r} is not here: PyTorch finds {accelerator} on this machine. Try --device=auto")
    if chosen.type == "cuda":
        index = (chosen.index or 0) if local_rank is None else local_rank
        if index >= torch.cuda.device_count():
            raise UserError(f"there is no cuda:{index}: this machine has {torch.cuda.device_count()} GPU(s)")
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen


def keep_freed_memory():
    """Let the process keep what it frees, where the C library is glibc, for its next allocation.

    It would give every large block back to the system, and a training step on a CPU frees and takes gigabytes: having
    them cleared page by page took over a tenth of the time of GPT-2 124M's, compiled. It costs memory: a tenth more
    there, but half as much again where steps are eager, so not for those.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for a large allocation
            mallopt(-1, -1)  # M_TRIM_THRESHOLD: never


def dtype(name, device):
    """The dtype of the matrix products for a setting: 'auto' takes bfloat16 where the hardware multiplies it."""
    if name != "auto":
        if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UserError(
                f"dtype='bfloat16' is not in the hardware of {torch.cuda.get_device_name(device)}: use float16"
            )
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if device.type == "cpu" and _cpu_multiplies_bfloat16() else torch.float32


def _cpu_multiplies_bfloat16():
    has = getattr(torch.cpu, "get_capabilities", dict)()  # younger than PyTorch 2.11
    return bool(has.get("avx512_bf16") or has.get("amx_tile") or has.get("bf16"))  # the last is Arm's name


def autocast(device, dtype):
    """Parameters stay float32; matrix products run in `dtype`."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def can_compile(device):
    """None where torch.compile works on `device`, else the reason it does not: it needs Triton or a C++ compiler."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # a missing compiler surfaces as one of many types, by backend
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def compiles(setting, device):
    """Whether to compile, and a word on why: 'auto' does on a GPU; True where the machine can."""
    if setting is False or (setting == "auto" and device.type != "cuda"):
        return False, "" if setting is False else "compile=auto: on GPUs only"
    reason = can_compile(device)
    return reason is None, f"torch.compile cannot work here: {reason}" if reason else ""


def seed(*stream):
    """Seed PyTorch on every device with a stream of its own for each tuple, such as (seed, 'dropout', iteration)."""
    words = [int.from_bytes(word.encode()) if isinstance(word, str) else word for word in stream]
    torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1))


def make_deterministic():
    """Refuse every operation that is not deterministic from here on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
    torch.use_deterministic_algorithms(True)


def environment(device):
    """What a figure measured here depends on."""
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda or f"ROCm {torch.version.hip}", "cudnn": torch.backends.cudnn.version()}
        found |= {"memory": torch.cuda.get_device_properties(device).total_memory}
    elif hasattr(os, "sysconf"):
        found |= {"memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    for package in ("triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


VITALS = ("driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "power.limit")


def vitals(device):
    """What changes a figure from one minute to the next: clocks, temperature, power, load; where they can be read."""
    if device.type == "cuda" and torch.version.cuda:
        ask = ["nvidia-smi", f"--query-gpu={','.join(VITALS)}", "--format=csv,noheader", f"--id={device.index}"]
        try:
            answer = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return {}
        return dict(zip(VITALS, (word.strip() for word in answer.split(","))))
    found = {"load": os.getloadavg()[0]} if hasattr(os, "getloadavg") else {}
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as file:
            mhz = [float(line.split(":")[1]) for line in file if line.startswith("cpu MHz")]
        return found | {"clock": f"{max(mhz):.0f} MHz"} if mhz else found
    return found


def _cpu_name():
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":")[1].strip()
    return platform.processor()


def _commit():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    git = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def reset_peak_memory(device):
    """Let `peak_memory` count from here on, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # proc(5): forget the peak of the resident set


def peak_memory(device):
    """Most bytes held at once: by PyTorch on the GPU, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # not from getrusage, where a process begins with the peak of the one that started it
        with open("/proc/self/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def quiet():
    """Keep the profiler's start and stop marks, written by C++ to stderr, off the console."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
