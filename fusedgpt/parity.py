"""Does an attention function compute attention? Its output and gradients against float64, written out in full."""

from dataclasses import replace

import torch
from torch import Tensor

from fusedgpt.case import Attend, Case

# the largest error allowed, as `compare` counts it: 450, 168, 10 and 5 times the epsilon of the dtype
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
FLOOR = 0.1  # as a fraction of the largest number of all


def reference(q: Tensor, k: Tensor, v: Tensor, dy: Tensor | None = None) -> tuple[Tensor, ...]:
    """Causal attention in float64: (y,), or (y, dq, dk, dv) by the chain rule, written out.

    Shapes as in fusedgpt/attention.py. It uses neither autograd nor a function that one of the kernels might use too.
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
    # backward of the softmax: each score moves its own weight up and all others of its row down
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return p @ v, ds @ k, ds.mT @ q, p.mT @ dy


def _double(x):
    x = x.detach()
    return (x.cpu() if x.device.type == "mps" else x).double()  # MPS has no float64


def compare(attend: Attend, case: Case, scale: float = 1.0, heads: int | None = None) -> dict[str, float]:
    """Largest error of `attend`, without dropout: {'y': …}, and 'dq', 'dk', 'dv' if `case` has a backward.

    q and k are times `scale`. The reference holds T² scores per head: `heads` compares that many heads of the first
    sequence only.

    An error is a fraction of the largest number in its own row: late rows average many values and are small, so that
    a fraction of the largest of all would hide them. The divisor is at least FLOOR of the largest of all, because some
    rows are 0 in theory (dq of the first token). Not-a-number counts as infinite.
    """
    case = replace(case, dropout=0.0)
    q, k, v, dy = case.inputs(scale)
    got = case.run(attend, q, k, v, dy)
    some = (slice(None), slice(None)) if heads is None else (slice(1), slice(heads))
    want = reference(*(x[some] for x in (q, k, v)), dy[some] if case.backward else None)
    largest = {"y": want[0].abs().max(), "d": max((w.abs().max() for w in want[1:]), default=None)}
    found = {}  # one divisor for y, and one for the three gradients together ("dq"[0] is "d")
    for name, g, w in zip(("y", "dq", "dk", "dv"), got, want):
        fraction = (_double(g[some]) - w).abs() / w.abs().amax(-1, keepdim=True).clamp(min=FLOOR * largest[name[0]])
        found[name] = fraction.max().nan_to_num(nan=torch.inf).item()
    return found


def passes(found: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether every error of `compare` is within the tolerance for `dtype`."""
    return all(error <= TOLERANCE[dtype] for error in found.values())
