"""What a GPU and its links reach of their data sheets."""

import math
from dataclasses import dataclass
from typing import Self

from fusedgpt.machine.gpus import GPU, Network

PRODUCTS = 0.81  # share of the largest products' rate: 640 of 794 TFLOP/s for products over 768 channels on an H200
# the shares of a data sheet's figures that kernels reach
FLASH = 0.3  # FLOP/s of a fused attention kernel with heads of 64: FlashAttention-3, arXiv:2407.08608, figures 5, 6
TRAFFIC = 0.9  # bytes/s of the memory: 4.3 of 4.8 TB/s on an H200
LINK = 0.8  # bytes/s of a link: NCCL's authors expect 370 of an H100's 450 GB/s (NVIDIA/nccl-tests#212)


@dataclass(frozen=True)
class Machine:
    """What a GPU and its links really reach: FLOP/s, bytes/s, and seconds of a hop."""

    peak: float  # FLOP/s of the data sheet; MFU is a share of it
    products: float  # FLOP/s of matrix products
    flash: float  # FLOP/s of a fused attention kernel, counting only the FLOPs that it does
    traffic: float  # bytes/s of memory
    link: float = math.inf  # bytes/s to the other GPUs of the node
    hop: float = 0.0
    network: float = math.inf  # bytes/s of a GPU to other nodes
    network_hop: float = 0.0
    per_node: int = 1

    @classmethod
    def of(cls, gpu: GPU, network: Network) -> Self:
        """What a GPU and a network are assumed to reach of their data sheets."""
        products, traffic = PRODUCTS * gpu.reached * gpu.peak, TRAFFIC * gpu.bandwidth
        links = LINK * gpu.link, gpu.hop, LINK * network.rate, network.hop
        return cls(gpu.peak, products, FLASH * gpu.peak, traffic, *links, gpu.per_node)
