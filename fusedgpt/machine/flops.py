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


GPUS = {  # a device that is not here is measured
    "V100": GPU(125e12, 16e9),
    "T4": GPU(65e12, 16e9),
    "A100": GPU(312e12, 80e9),
    "A100 PCIE": GPU(312e12, 80e9),
    "A100 40GB": GPU(312e12, 40e9),
    "A10G": GPU(70e12, 24e9),
    "L4": GPU(121e12, 24e9),
    "L40S": GPU(362e12, 48e9),
    "H100": GPU(989e12, 80e9),
    "H100 PCIE": GPU(756e12, 80e9),
    "H200": GPU(989e12, 141e9),
    "B200": GPU(2250e12, 180e9),
    "RTX 3090": GPU(71e12, 24e9),
    "RTX 4090": GPU(165.2e12, 24e9),
    "RTX 5090": GPU(209.5e12, 32e9),
    "MI300X": GPU(1307e12, 192e9),
}
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
