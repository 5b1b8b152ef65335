"""A training step in this process, as train.py makes it, for the kinds that look into a step."""

from collections.abc import Callable

import torch

from fusedgpt.dimensions import GPTConfig
from fusedgpt.machine import determinism
from fusedgpt.machine.device import autocast
from fusedgpt.parallel.distributed import gradient_norm
from fusedgpt.training.optimizer import update_weights
from model import GPT


def training_step(
    config: GPTConfig, batch_size: int, device: torch.device, dtype: torch.dtype, compiled: bool = False
) -> Callable[[], None]:
    """A step of a new GPT of `config` on `batch_size` random sequences: forward, backward, gradient norm and AdamW.

    Every call of the result makes one more step. The first one makes AdamW's moments and, if `compiled`, compiles.
    """
    determinism.seed(0, "init")
    with torch.device(device):
        model = GPT(config)
        idx = torch.randint(config.vocab_size, (batch_size, config.block_size + 1))
    x, y = idx[:, :-1].contiguous(), idx[:, 1:].contiguous()
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    if compiled:
        torch.compiler.reset()  # PyTorch counts recompilations over a whole process, and stops at the eighth
        model.compile(dynamic=False)

    def step():
        with autocast(device, dtype):
            _, loss = model(x, y, logits=False)
        loss.backward()
        update_weights(optimizer, gradient_norm(model), 1.0)
        optimizer.zero_grad(set_to_none=True)

    return step
