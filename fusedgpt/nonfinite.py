"""Where a number that is not finite comes from: the first tensors of a forward and backward that have one."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

MOST = 3  # tensors to name: what follows the first ones only inherits from them


def first_tensors(model: nn.Module, x: Tensor, y: Tensor, cast: AbstractContextManager, scale: float = 1) -> str | None:
    """The first tensors that are not finite if `model` computes the loss of x and y (B, T) and its gradients, eagerly.

    Weights come first, then the outputs of modules in the order of the forward, then gradients in the order of the
    backward. None if all are finite. `scale`: what float16 multiplies the loss by. Changes no weight and no gradient.
    """
    if bad := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
        return f"weights: {', '.join(bad[:MOST])}"
    bad = []

    def look(name):
        def hook(module, inputs, output):
            if isinstance(output, Tensor) and not output.isfinite().all():
                bad.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with cast:
            _, loss = model.forward(x, y)  # not model(), which may be compiled and would run no hook
    finally:
        for hook in hooks:
            hook.remove()
    if bad:
        return f"outputs: {', '.join(bad[:MOST])}"
    if not loss.isfinite():
        return "the loss alone"
    names, params = zip(*model.named_parameters())
    gradients = torch.autograd.grad(loss * scale, params)
    bad = [name for name, gradient in zip(names, gradients) if not gradient.isfinite().all()]
    return f"gradients: {', '.join(bad[::-1][:MOST])}" if bad else None
