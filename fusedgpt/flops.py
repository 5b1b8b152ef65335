"""The peak FLOP/s of a device, which MFU is a share of."""

import re

import torch
from torch.nn import functional as F

from fusedgpt import timing

# dense 16-bit products with float32 accumulation, TFLOP/s, from the makers' data sheets; of RTX cards from NVIDIA's
# white papers on Ampere, Ada and Blackwell. A device that is not here is measured
PEAK_TFLOPS = {
    "V100": 125,
    "V100 PCIE": 112,
    "V100S PCIE": 130,
    "T4": 65,
    "A100": 312,
    "A100 PCIE": 312,
    "A800": 312,
    "A800 PCIE": 312,
    "A30": 165,
    "A40": 149.7,
    "A10": 125,
    "A10G": 70,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "H100": 989,
    "H100 PCIE": 756,
    "H100 NVL": 835,
    "H800": 989,
    "H800 PCIE": 756,
    "H20": 148,
    "H200": 989,
    "H200 NVL": 835,
    "GH200": 989,
    "B200": 2250,
    "GB200": 2500,
    "B300": 2250,
    "GB300": 2500,
    "RTX A6000": 154.8,
    "RTX 3090": 71,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
    "MI210": 181,
    "MI250": 181,  # PyTorch's device is one of its two dies
    "MI250X": 191.5,  # likewise
    "MI300A": 980.6,
    "MI300X": 1307,
    "MI325X": 1307,
    "MI350X": 2307,
    "MI355X": 2517,
}
# words of a name that do not change the peak: maker, line, socket, memory. Any other word does, such as Laptop, Ti, D,
# MIG, or the 64GB of an A100 that was built for one machine
_NO_DIFFERENCE = re.compile(r"NVIDIA|AMD|TESLA|INSTINCT|GEFORCE|SXM\d?|HBM3E?|(16|32|40|80|120|480)GB|144G")


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of `device` in `dtype`, and the source of the figure: the maker's data sheet, or a product timed here."""
    if device.type == "cuda" and dtype != torch.float32:
        words = re.split(r"[\s-]+", torch.cuda.get_device_name(device).upper())
        model = " ".join(word for word in words if not _NO_DIFFERENCE.fullmatch(word))
        if model in PEAK_TFLOPS:
            return PEAK_TFLOPS[model] * 1e12, f"data sheet of {model}"
    n, ms, best = 128, 0.0, 0.0
    while ms < 20 and n < 16384:  # larger products come closer to the peak
        n *= 2
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        ms = min(timing.samples(lambda a=a, b=b: F.linear(a, b), device, count=5, warmup=1))
        best = max(best, 2 * n**3 / (ms / 1e3))
    return best, f"measured: products of up to {n} x {n}"
