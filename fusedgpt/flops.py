"""The peak FLOP/s of a device, which MFU is a share of."""

import torch
from torch.nn import functional as F

from fusedgpt import timing

# dense 16-bit peaks with float32 accumulation, TFLOP/s, from the makers' data sheets; the first name that fits counts
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "V100": 125,
    "T4": 65,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "MI300X": 1307,
    "MI250": 191.5,  # PyTorch's device is one of its two dies
    "MI210": 181,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of `device` in `dtype`, and the source of the figure: the maker's data sheet, or a product timed here."""
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for part, tflops in PEAK_TFLOPS.items():
            if part in name:
                return tflops * 1e12, f"data sheet of {part}"
    n, ms, best = 128, 0.0, 0.0
    while ms < 20 and n < 16384:  # larger products come closer to the peak
        n *= 2
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        ms = min(timing.samples(lambda a=a, b=b: F.linear(a, b), device, count=5, warmup=1))
        best = max(best, 2 * n**3 / (ms / 1e3))
    return best, f"measured: products of up to {n} x {n}"
