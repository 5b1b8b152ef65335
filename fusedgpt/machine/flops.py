"""The peak FLOP/s of a device. MFU is the share of this peak that a run reaches."""

import re

import torch
from torch.nn import functional as F

from fusedgpt.machine import timing
from fusedgpt.machine.gpus import PEAK_TFLOPS

# Words in a device's name that do not change the peak: maker, product line, socket, memory. Any other word may change
# it, such as Laptop, Ti, D, MIG, or the 64GB of an A100 that was built for one machine.
_NO_DIFFERENCE = re.compile(r"NVIDIA|AMD|TESLA|INSTINCT|GEFORCE|SXM\d?|HBM3E?|(16|32|40|80|120|480)GB|144G")


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Peak FLOP/s of `device` in `dtype`, and the source: the maker's data sheet, or a matrix product timed here."""
    if device.type == "cuda" and dtype != torch.float32:
        words = re.split(r"[\s-]+", torch.cuda.get_device_name(device).upper())
        model = " ".join(word for word in words if not _NO_DIFFERENCE.fullmatch(word))
        if model in PEAK_TFLOPS:
            return PEAK_TFLOPS[model] * 1e12, f"data sheet of {model}"
    n, ms, best = 128, 0.0, 0.0
    random = torch.Generator(device).manual_seed(0)  # its own, so that a run draws the same whether this ran or not
    while ms < 20 and n < 16384:  # larger products come closer to the peak
        n *= 2
        a, b = (torch.randn(n, n, generator=random, device=device, dtype=dtype) for _ in range(2))
        ms = min(timing.Steps(lambda a=a, b=b: F.linear(a, b), device).make(5))
        best = max(best, 2 * n**3 / (ms / 1e3))
    return best, f"measured: products of up to {n} x {n}"
