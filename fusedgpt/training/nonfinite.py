"""Find where a number that is not finite comes from: the first tensors of a forward and backward that have one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fusedgpt.data.dataloader import DataLoader
from fusedgpt.errors import out_of_memory
from fusedgpt.machine import determinism
from fusedgpt.parallel.distributed import Ranks

MOST_NAMED = 3  # name at most so many tensors, because later ones only inherit from the first


def explain(
    model: nn.Module,
    loader: DataLoader,
    seed: int,
    micro_steps: Sequence[int],
    cast: AbstractContextManager,
    scaler: GradScaler,
    ranks: Ranks,
    iteration: int,
) -> str:
    """Why the step of `iteration` had no finite gradient: the first tensors that are not finite, and their batch.

    Repeats the micro-steps of each rank with the same batch and dropout, but the current weights.
    """
    if ranks.shards > 1:
        return "parallel=fsdp cannot name the tensor in which this began: repeat the run with parallel=ddp"
    if scaler.is_enabled():
        return "a gradient overflowed in float16, whose scale is halved now; --dtype=float32 would name the tensor"
    found = None
    for micro_step in micro_steps:
        determinism.seed(seed, "dropout", iteration, micro_step)
        try:
            tensors = first_tensors(model, *loader.train(iteration, micro_step), cast)
        except Exception as error:
            if not out_of_memory(error):
                raise
            tensors = "a tensor that is not known, because memory does not suffice to repeat the step"
        if tensors:
            starts = ", ".join(map(str, loader.starts(iteration, micro_step)))
            found = f"first in {tensors}, in micro-step {micro_step}, whose windows begin at tokens {starts} of train"
            break
    found = next((each for each in ranks.gather(found) if each), None)
    return found or "not seen again when the step is repeated eagerly: suspect the compiled kernels or the device"


def first_tensors(model: nn.Module, x: Tensor, y: Tensor, cast: AbstractContextManager) -> str | None:
    """Compute the loss of x and y (B, T) and its gradients eagerly; name the first tensors that are not finite, if any.

    Weights come first, then outputs of modules in the order of the forward, then gradients in the order of the
    backward.
    """
    if bad := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
        return f"weights: {', '.join(bad[:MOST_NAMED])}"
    bad = []

    def look(name):
        def hook(module, inputs, output):
            if isinstance(output, Tensor) and not output.detach().isfinite().all():  # recompute=block counts tensors
                bad.append(name)

        return hook

    with ExitStack() as hooks, cast:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(look(name)))
        _, loss = model.forward(x, y, logits=False)  # not model(), which may be compiled and would run no hook
    if bad:
        return f"outputs: {', '.join(bad[:MOST_NAMED])}"
    if not loss.isfinite():
        return "the loss alone"
    names, params = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad))
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    bad = [name for name, grad in zip(names, gradients) if grad is not None and not grad.isfinite().all()]
    return f"gradients: {', '.join(bad[::-1][:MOST_NAMED])}" if bad else None
