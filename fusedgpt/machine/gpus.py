"""What GPUs can do, from the makers' data sheets. This module does not import PyTorch."""

from dataclasses import dataclass

# TFLOP/s of dense 16-bit products with float32 accumulation. From the makers' data sheets; for RTX cards, from NVIDIA's
# white papers on Ampere, Ada and Blackwell. A device that is not in this table is measured.
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
    "MI250X": 191.5,  # see MI250
    "MI300A": 980.6,
    "MI300X": 1307,
    "MI325X": 1307,
    "MI350X": 2307,
    "MI355X": 2517,
}


@dataclass(frozen=True)
class GPU:
    peak: float  # FLOP/s, dense 16-bit products
    memory: float  # bytes, with a sheet's GB as 1e9. A chip's GB is 2**30; the other 7 % are left for CUDA and NCCL


_GB = {"A100": 80, "A100 40GB": 40, "H100": 80, "H200": 141, "B200": 180, "MI300X": 192, "L4": 24, "L40S": 48}
_GB |= {"RTX 4090": 24, "RTX 5090": 32}
GPUS = {name: GPU(PEAK_TFLOPS[name.removesuffix(" 40GB")] * 1e12, gb * 1e9) for name, gb in _GB.items()}
