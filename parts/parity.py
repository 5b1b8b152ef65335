"""Does an attention function compute attention? Its output and gradients against float64, written out in full."""

import torch

# the largest error allowed, as `errors` counts it: some ten times the rounding of one number
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
FLOOR = 0.1


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


def errors(attend, shape, device, dtype, backward=True, scale=1.0, heads=None):
    """Largest error of `attend`: {'y': …} and, with `backward`, 'dq', 'dk', 'dv'.

    `shape` is (B, nh, T, hs); q and k are normal, times `scale`. Float64 holds T² scores a head: `heads` compares that
    many of the first sequence only. An error is a share of the largest number of its own row, as late rows are small;
    of FLOOR of the largest of all where that is more (the true dq of the first row is 0: no measure). Not-a-number
    counts as infinite.
    """
    q, k, v, dy = inputs(shape, device, dtype, requires_grad=backward, scale=scale)
    y = attend(q, k, v)
    got = (y, *torch.autograd.grad(y, (q, k, v), dy)) if backward else (y,)
    some = (slice(None), slice(None)) if heads is None else (slice(1), slice(heads))
    want = reference(*(x[some] for x in (q, k, v)), dy[some] if backward else None)
    largest = {"y": want[0].abs().max(), "d": max((w.abs().max() for w in want[1:]), default=None)}
    found = {}
    for name, g, w in zip(("y", "dq", "dk", "dv"), got, want):
        share = (_double(g[some]) - w).abs() / w.abs().amax(-1, keepdim=True).clamp(min=FLOOR * largest[name[0]])
        found[name] = share.max().nan_to_num(nan=torch.inf).item()
    return found


def passes(found, dtype):
    """Whether every error of `errors` is within the tolerance stated for `dtype`."""
    return all(error <= TOLERANCE[dtype] for error in found.values())
