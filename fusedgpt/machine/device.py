"""Resolve the settings device, dtype and compile for this machine."""

import contextlib
import sys
import warnings
from collections.abc import Iterator

import torch

from fusedgpt.errors import UserError, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device that a setting names; 'auto' takes a GPU if there is one. Raises UserError if it is not here.

    Under torchrun each rank takes the GPU of its `local_rank`, even if the setting names another.
    """
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in here if here[kind] and (kind != "mps" or local_rank is None))  # no group has mps
    if not here.get(name.partition(":")[0]):
        names = " or ".join(f"--device={kind}" for kind in here if here[kind])
        raise UserError(f"device={name!r} is not on this machine, or not supported: give {names}, or leave it out")
    device = torch.device(name)
    if device.type == "cuda":
        index = local_rank
        if index is None:
            index = device.index or 0
        if index >= torch.cuda.device_count():
            raise UserError(f"there is no cuda:{index}: this machine has {torch.cuda.device_count()} GPU(s)")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products that a setting names. 'auto' takes bfloat16 if the hardware has instructions for it.

    No clock decides here: on a busy machine, ranks would disagree. Warns of bfloat16 that is only emulated.
    """
    if device.type == "cuda":
        has, other = torch.cuda.is_bf16_supported(including_emulation=False), "float16"
    else:
        has, other = device.type == "cpu" and cpu_multiplies_bfloat16(), "float32"
    if name == "auto":
        return torch.bfloat16 if has else DTYPES[other]
    if name == "bfloat16" and not has and device.type != "mps":
        said = f"this {device.type} device only emulates bfloat16: give --dtype={other}, which is many times as fast"
        warnings.warn(said, stacklevel=1)  # from one line, so that Python seldom repeats it
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def cpu_instructions() -> set[str]:
    """The instructions that PyTorch can use on this CPU, by its names: 'avx2', 'amx_tile' …"""
    found = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.11 does not have it yet
    return {name for name, can in found.items() if can}


def cpu_multiplies_bfloat16() -> bool:
    """Whether PyTorch has CPU instructions for products in bfloat16. Without them, products take many times as long."""
    can = {"avx512_bf16", "amx_tile", "bf16"} & cpu_instructions()  # bf16 is Arm's name
    # oneDNN computes these products, and ONEDNN_MAX_CPU_ISA=AVX2 forbids it to use newer instructions
    used = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)  # missing if built without oneDNN
    return bool(can and used())


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """A context in which matrix products run in `dtype`; parameters stay float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """A context in which CUDA may, or may not, round the factors of float32 products to TF32 (float16's 11 bits)."""
    products = torch.backends.cuda.matmul
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(setattr, products, "allow_tf32", products.allow_tf32)
        products.allow_tf32 = allowed
        yield


def multiplies_tf32(device: torch.device) -> bool:
    """Whether products of float32 on `device` are in TF32 in this process."""
    return device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32


def asks_to_compile(setting: bool | str, device: torch.device) -> bool:
    """Whether a setting asks for torch.compile: 'auto' does on a GPU only."""
    return setting is True or (setting == "auto" and device.type == "cuda")


def resolve_compile(setting: bool | str, device: torch.device) -> tuple[bool, str]:
    """Whether to compile, and why it is not possible if it was asked for. It needs Triton or a C++ compiler."""
    if not asks_to_compile(setting, device):
        return False, ""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # each backend has its own exception type for a missing compiler
        return False, f"torch.compile cannot work here: {type(error).__name__}: {first_line(error)}"
    return True, ""


def graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process. A forward with its backward counts as one."""
    dynamo = sys.modules.get("torch._dynamo")  # present after a compile; an import would take a second
    return dynamo.utils.counters["aot_autograd"]["total"] if dynamo else 0


def cuda_graphs(device: torch.device) -> bool:
    """Whether all graphs that torch.compile has made are replayed as CUDA graphs. PyTorch leaves out some."""
    if device.type != "cuda" or not graphs_compiled():
        return False
    from torch._inductor import config  # takes a second to import

    skipped = sys.modules["torch._dynamo"].utils.counters["inductor"]["cudagraph_skips"]
    return config.triton.cudagraphs and not skipped
