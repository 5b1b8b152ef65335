"""Weights laid out once as oneDNN reads them in products of bfloat16. nn.Linear lays them out anew in each call.

For a few rows that takes longer than the product: on 2 cores of an Intel Xeon with AVX-512 the output layer of GPT-2
took 11 ms for one row, and 3 ms with its weight laid out before (PyTorch 2.13).
"""

import platform

import torch
from torch import Tensor, nn

from fusedgpt.machine.device import cpu_multiplies_bfloat16


class PackedLinear(nn.Module):
    """An nn.Linear in bfloat16 for inference on a CPU, with a copy of its weight that only oneDNN can read."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        # a layout for one row; long prompts neither gain nor lose by it
        weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in channels) to (..., out channels), both in bfloat16, as nn.Linear."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def gains(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether to pack weights of `dtype` on `device`. Float32 and float16 gained nothing; Arm has not been tried."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    has = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return device.type == "cpu" and dtype == torch.bfloat16 and x86 and has and cpu_multiplies_bfloat16()


def pack(module: nn.Module) -> None:
    """Replace each nn.Linear in `module` by a PackedLinear, but no derived class or layer with hooks."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and not child._forward_hooks and not child._forward_pre_hooks:
            setattr(module, name, PackedLinear(child))
        else:
            pack(child)
