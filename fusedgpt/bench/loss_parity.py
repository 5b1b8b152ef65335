"""Is the loss exact? Each token's loss, and the gradient by the logits, against float64, at GPT-2's vocabulary."""

import torch
from torch import Tensor

from fusedgpt import loss
from fusedgpt.bench.proof import ParityError
from fusedgpt.machine.device import autocast

TOKENS, IDS, PADDED = 64, 50257, 50304  # logits are (TOKENS, PADDED), and only the first IDS of them count
# GradScaler multiplies too, so that float16 does not round small gradients to 0
SCALE = 2.0**12
# The largest errors allowed. Log-probabilities of about -11 are rounded by up to 5e-7 in float32, 4e-3 in float16 and
# 3e-2 in bfloat16. The gradient has the dtype of the logits, which rounds it by 6e-8, 5e-4 or 4e-3 of itself.
NATS = 2e-5
SHARE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(logits, targets): normal logits (TOKENS, PADDED) in `dtype`, and ids (TOKENS,), a quarter of which are -1."""
    random = torch.Generator().manual_seed(0)
    z = torch.randn(TOKENS, PADDED, generator=random).to(device, dtype)
    targets = torch.randint(IDS, (TOKENS,), generator=random)
    targets[::4] = -1  # such a target does not count
    return z, targets.to(device)


def reference(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, on the CPU: the loss of each token (TOKENS,), and the gradient of their sum by z, (TOKENS, PADDED).

    Written out: it uses neither autograd nor a function that fusedgpt/loss.py might use too.
    """
    z, targets = z.detach().cpu().double()[:, :IDS], targets.cpu()
    counts = targets >= 0
    tokens = torch.arange(len(z))[counts]
    z = z - z.amax(-1, keepdim=True)
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    losses, gradient = torch.zeros(len(z)).double(), torch.zeros(len(z), PADDED).double()
    losses[counts] = -p[tokens, targets[counts]].log()
    gradient[counts, :IDS] = p[counts]
    gradient[tokens, targets[counts]] -= 1
    return losses, gradient


def compare(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The largest errors of fusedgpt/loss.py as train.py calls it: under autocast, on logits in `dtype`.

    'loss' is the error of a token's loss, in nats. 'gradient' is a share of the number itself, because the probability
    of an id is far smaller than the largest number in its row. If the gradient should be 0, any other number counts as
    infinite, and so does NaN.
    """
    z, targets = inputs(device, dtype)
    z.requires_grad_()
    with autocast(device, dtype):
        losses, mean = loss.whole(z, targets, IDS, reduction="none"), loss.whole(z, targets, IDS)
    (mean * SCALE * (targets >= 0).sum()).backward()
    want, gradient = reference(z, targets)
    off = (z.grad.cpu().double() / SCALE - gradient).abs()
    share = torch.where(off == 0, 0.0, off / gradient.abs())
    errors = {"loss": (losses.detach().cpu().double() - want).abs(), "gradient": share}
    return {name: error.max().nan_to_num(torch.inf, torch.inf).item() for name, error in errors.items()}


def proven(device: torch.device, dtype: torch.dtype) -> dict:
    """{'errors': …, 'allowed': …, 'parity': a sentence}. Raises ParityError if an error is beyond what is allowed."""
    errors, allowed = compare(device, dtype), {"loss": NATS, "gradient": SHARE[dtype]}
    sentence = f"a token's loss is off by up to {errors['loss']:.1e} nats, allowed {NATS:.0e};"
    sentence += f" its gradient by {errors['gradient']:.1e} of itself, allowed {SHARE[dtype]:.0e}"
    if not all(errors[name] <= allowed[name] for name in errors):
        raise ParityError(sentence)
    return {"errors": errors, "allowed": allowed, "parity": f"passed: {sentence}"}
