"""Does an attention function compute attention? Its output and gradients against float64, written out in full."""

import torch

# the largest error allowed, as `errors` counts it: some ten times the rounding of one number
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def inputs(shape, device, dtype, requires_grad=True, scale=1.0):
    """q, k, v and the gradient of y, each (B, nh, T, hs), normal, the same for every device and kernel.

    q and k are times `scale`.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(shape, generator=generator) for _ in range(4))
    q, k, v, dy = (x.to(device, dtype) for x in (q * scale, k * scale, v, dy))
    return *(x.requires_grad_(requires_grad) for x in (q, k, v)), dy


def reference(q, k, v, dy=None):
    """Causal attention in float64: (y,), or (y, dq, dk, dv) by the written-out chain rule.

    Shapes as in parts/attention.py. No autograd and no function of PyTorch's that a kernel might share.
    """
    q, k, v = map(_double, (q, k, v))
    T, Tk, scale = q.size(-2), k.size(-2), q.size(-1) ** -0.5
    hidden = torch.ones(T, Tk, dtype=torch.bool, device=q.device).triu(Tk - T + 1)
    scores = (q @ k.mT * scale).masked_fill(hidden, float("-inf"))
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True)  # (B, nh, T, Tk)
    if dy is None:
        return (p @ v,)
    dy = _double(dy)
    dp = dy @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return p @ v, ds @ k, ds.mT @ q, p.mT @ dy


def _double(x):
    x = x.detach()
    return (x.cpu() if x.device.type == "mps" else x).double()  # MPS has no float64


def errors(attend, shape, device, dtype, backward=True, scale=1.0):
    """Largest error of `attend`: {'y': …} and, with `backward`, 'dq', 'dk', 'dv'.

    `shape` is (B, nh, T, hs). An error is a share of the largest output, or of the largest of all three gradients
    (at T = 1 the true dq and dk are 0: their own largest value is no measure). Not-a-number counts as infinite. q and k
    are normal, times `scale`.
    """
    q, k, v, dy = inputs(shape, device, dtype, requires_grad=backward, scale=scale)
    y = attend(q, k, v)
    got = (y, *torch.autograd.grad(y, (q, k, v), dy)) if backward else (y,)
    want = reference(q, k, v, dy if backward else None)
    largest = {"y": want[0].abs().max(), "d": max((w.abs().max() for w in want[1:]), default=None)}
    return {
        name: ((_double(g) - w).abs().max() / largest[name[0]]).nan_to_num(nan=torch.inf).item()
        for name, g, w in zip(("y", "dq", "dk", "dv"), got, want)
    }


def passes(found, dtype):
    """Whether every error of `errors` is within the tolerance stated for `dtype`."""
    return all(error <= TOLERANCE[dtype] for error in found.values())
