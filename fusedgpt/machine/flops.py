"""The peak FLOP/s of a device, of which MFU is the share that a run reaches, and what GPUs can do."""

import re
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fusedgpt.machine import timing


class GPU(NamedTuple):
    """What a GPU can do, from its maker's data sheet; for RTX cards, from NVIDIA's white papers."""

    peak: float  # FLOP/s of dense 16-bit products with float32 accumulation
    memory: float  # bytes, with a sheet's GB as 1e9. A chip's GB is 2**30; the other 7 % are left for CUDA and NCCL


_SHEETS = {  # TFLOP/s and GB. A device that is not here is measured
    "V100": (125, 16),
    "T4": (65, 16),
    "A100": (312, 80),
    "A100 PCIE": (312, 80),
    "A100 40GB": (312, 40),
    "A10G": (70, 24),
    "L4": (121, 24),
    "L40S": (362, 48),
    "H100": (989, 80),
    "H100 PCIE": (756, 80),
    "H200": (989, 141),
    "B200": (2250, 180),
    "RTX 3090": (71, 24),
    "RTX 4090": (165.2, 24),
    "RTX 5090": (209.5, 32),
    "MI300X": (1307, 192),
}
GPUS = {name: GPU(tflops * 1e12, gb * 1e9) for name, (tflops, gb) in _SHEETS.items()}
# Words in a device's name that do not change the peak: maker, product line, socket, memory. Any other word may change
# it, such as Laptop, Ti, D, MIG, or the 64GB of an A100 that was built for one machine.
_NO_DIFFERENCE = re.compile(r"NVIDIA|AMD|TESLA|INSTINCT|GEFORCE|SXM\d?|HBM3E?|(16|32|40|80)GB")


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Peak FLOP/s of `device` in `dtype`, and the source: the maker's data sheet, or a matrix product timed here."""
    if device.type == "cuda" and dtype != torch.float32:
        words = re.split(r"[\s-]+", torch.cuda.get_device_name(device).upper())
        model = " ".join(word for word in words if not _NO_DIFFERENCE.fullmatch(word))
        if model in GPUS:
            return GPUS[model].peak, f"data sheet of {model}"
    n, ms, best = 128, 0.0, 0.0
    random = torch.Generator(device).manual_seed(0)  # its own, so that a run draws the same whether this ran or not
    while ms < 5 and n < 16384:  # larger products come closer to the peak, and take eight times as long
        n *= 2
        a, b = (torch.randn(n, n, generator=random, device=device, dtype=dtype) for _ in range(2))
        ms = min(timing.Steps(lambda a=a, b=b: F.linear(a, b), device).make(5))
        best = max(best, 2 * n**3 / (ms / 1e3))
    return best, f"measured: products of up to {n} x {n}"
