"""What PyTorch does for its compiler, left out: a run that is not compiled starts in half the time.

The first call of each of PyTorch's own versions imports torch._dynamo or sympy.
"""

import inspect

import torch
from torch import nn


class Optimizer(torch.optim.Optimizer):
    """torch.optim.Optimizer without its guards against torch.compile."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(Optimizer, torch.optim.AdamW):
    """torch.optim.AdamW without these guards: its steps, to the bit."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def embedding(rows: int, columns: int) -> nn.Embedding:
    """nn.Embedding, not initialised. PyTorch's draws normal numbers, on the meta device in Python."""
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


def to_empty(module: nn.Module) -> None:
    """module.to_empty on the default device. From the meta device, PyTorch's works out strides with symbols."""
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
