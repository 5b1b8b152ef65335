"""The settings device, dtype and compile, resolved against the machine."""

import contextlib
import functools
import os
import sys
import warnings

import torch

from fusedgpt.errors import UserError, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_lowered = os.environ.get("ATEN_CPU_CAPABILITY")
if _lowered and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # PyTorch 2.13 reuses cached graphs whatever instructions they were made for, and the wrong ones corrupt the heap
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second to import, so only here

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{default_cache_dir()}_{_lowered}"


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device that a setting names; 'auto' takes a GPU if there is one. Raises UserError if it is not here.

    Under torchrun each rank takes the GPU of its `local_rank`, even if the setting names one: no two share one.
    """
    accelerator = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(accelerator if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"device={name!r} is no device of PyTorch's: try auto, cpu, cuda, cuda:1 or mps") from error
    if device.type not in ("cpu", accelerator):
        raise UserError(f"device={name!r} is not here: PyTorch finds {accelerator} on this machine. Try --device=auto")
    if device.type == "cuda":
        index = (device.index or 0) if local_rank is None else local_rank
        if index >= torch.cuda.device_count():
            raise UserError(f"there is no cuda:{index}: this machine has {torch.cuda.device_count()} GPU(s)")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products that a setting names; 'auto' takes bfloat16 if the hardware multiplies it.

    Raises UserError if a GPU only emulates it, and warns if a CPU does.
    """
    if name != "auto":
        if name == "bfloat16" and device.type == "cpu" and not cpu_multiplies_bfloat16():
            _warn_once(
                "this CPU has no instructions for bfloat16 and takes many times as long as for float32:"
                " give --dtype=float32"
            )
        if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UserError(
                f"dtype='bfloat16' is not in the hardware of {torch.cuda.get_device_name(device)}: use float16"
            )
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if device.type == "cpu" and cpu_multiplies_bfloat16() else torch.float32


@functools.cache  # Python's own count restarts whenever warnings are caught
def _warn_once(sentence):
    warnings.warn(sentence, stacklevel=3)


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware of `device` multiplies bfloat16, and not only emulates it."""
    return resolve_dtype("auto", device) == torch.bfloat16


def cpu_multiplies_bfloat16() -> bool:
    """Whether PyTorch multiplies bfloat16 with instructions for it. Without them, products take many times as long."""
    has = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.11 does not have it yet
    can = has.get("avx512_bf16") or has.get("amx_tile") or has.get("bf16")  # the last is Arm's name
    # oneDNN makes these products, and ONEDNN_MAX_CPU_ISA=AVX2 keeps it from instructions that the CPU has
    used = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)  # absent from a build without oneDNN
    return bool(can and used())


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """A context in which matrix products run in `dtype`; parameters stay float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def resolve_compile(setting: bool | str, device: torch.device) -> tuple[bool, str]:
    """Whether to compile, and if not, why. 'auto' compiles on a GPU; True compiles if this machine can."""
    if setting is False or (setting == "auto" and device.type != "cuda"):
        return False, ""
    reason = why_no_compiler(device)
    return reason is None, f"torch.compile cannot work here: {reason}" if reason else ""


def why_no_compiler(device: torch.device) -> str | None:
    """Why torch.compile fails on `device`, or None if it works. It needs Triton or a C++ compiler."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # each backend reports a missing compiler with an exception type of its own
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process, forward and backward together counted as one."""
    dynamo = sys.modules.get("torch._dynamo")  # a second to import, and not needed unless something is compiled
    return dynamo.utils.counters["aot_autograd"]["total"] if dynamo else 0
