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
    """A GPU and the links to its neighbours, from its data sheet."""

    peak: float  # FLOP/s, dense 16-bit products
    memory: float  # bytes, with a sheet's GB as 1e9. A chip's GB is 2**30; the other 7 % are left for CUDA and NCCL
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s in one direction to the other GPUs of its node
    hop: float  # seconds for a message over that link
    per_node: int  # GPUs per node
    reached: float = 0.8  # share of the peak in the fastest product that anyone measured; if unknown, an H100's


@dataclass(frozen=True)
class Network:
    """The network between nodes."""

    rate: float  # bytes/s in one direction for each GPU
    hop: float = 14.0e-6  # seconds for a message


# measured TFLOP/s over the peak, from "Maximum Achievable Matmul FLOPS" in stas00/ml-engineering, compute/accelerator
_REACHED = {"A100": 267.9 / 312, "H100": 792.1 / 989, "H200": 794.5 / 989, "B200": 1745 / 2250, "MI300X": 781.9 / 1307}
# latency of one step of a ring with the simple protocol, from NCCL's own model in its src/graph/tuning.cc
NVLINK_HOP, PCIE_HOP = 3.4e-6, 5.7e-6
# GB and GB/s of memory, GB/s of the links in one direction (sheets add both), seconds per hop, GPUs per node. Links are
# NVLink or Infinity Fabric if the card has it, otherwise PCIe x16. If the maker sells no server, a usual node is taken
_SHEETS = {
    "A100": (80, 2039, 300, NVLINK_HOP, 8),
    "A100 40GB": (40, 1555, 300, NVLINK_HOP, 8),
    "H100": (80, 3350, 450, NVLINK_HOP, 8),
    "H200": (141, 4800, 450, NVLINK_HOP, 8),
    "B200": (180, 8000, 900, NVLINK_HOP, 8),
    "MI300X": (192, 5300, 448, NVLINK_HOP, 8),
    "L4": (24, 300, 32, PCIE_HOP, 8),
    "L40S": (48, 864, 32, PCIE_HOP, 8),
    "RTX 4090": (24, 1008, 32, PCIE_HOP, 4),
    "RTX 5090": (32, 1792, 64, PCIE_HOP, 4),
}
_CHIPS = {name: name.removesuffix(" 40GB") for name in _SHEETS}
GPUS = {
    name: GPU(PEAK_TFLOPS[chip] * 1e12, gb * 1e9, memory * 1e9, link * 1e9, hop, per_node, _REACHED.get(chip, 0.8))
    for (name, chip), (gb, memory, link, hop, per_node) in zip(_CHIPS.items(), _SHEETS.values())
}
# InfiniBand NDR and HDR have 400 and 200 Gbit/s for each GPU, as in NVIDIA's DGX H100 and DGX A100. Ethernet has
# 100 Gbit/s for a node of 8 GPUs.
NETWORKS = {"ndr": Network(50e9), "hdr": Network(25e9), "ethernet": Network(12.5e9 / 8)}
