"""How exact each path is: against float64, on ordinary inputs and on large ones, and which paths agree.

Appendix A of PyTorch's article: scaled before the product, q·√s (k·√s)ᵀ, the written-out attention equals SDPA to
`allclose`; scaled after it, (q kᵀ)·s, as nanoGPT does, it does not. In float16 the order decides whether it overflows.
"""

import torch

from parts import kernels, machine, parity
from parts.attention import ATTENTION
from parts.bench.rows import slug, tflops, timed, verdict
from parts.errors import UserError

SHAPE = (1, 12, 256, 64)  # (B, nh, T, hs): GPT-2's heads
INPUTS = {"ordinary": 1.0, "large": 64.0}  # q and k are normal times this: q kᵀ passes 65504, its scaled value does not
DTYPES = ("float32", "bfloat16", "float16")
PAIRS = [("scaled before", "math"), ("manual", "math"), ("scaled before", "flash"), ("manual", "flash")]
CLAIMED = {"scaled before": True, "manual": False}  # whether it is `allclose` to SDPA, as the article has it


def scaled_before(q, k, v, dropout_p=0.0):
    """`manual`, but for the order: q and k are each times √s before the product, as SDPA's math does."""
    T, root = q.size(-2), q.size(-1) ** -0.25
    scores = (q * root) @ (k * root).transpose(-2, -1)  # (B, nh, T, T)
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v


PATHS = {"scaled before": scaled_before, **{name: f for name, f in ATTENTION.items() if name != "sdpa"}}


def plan(s, device):
    """Every path in every dtype on both inputs; then the article's pairs."""
    errors = [
        {"inputs": inputs, "dtype": dtype, "path": path} for inputs in INPUTS for dtype in DTYPES for path in PATHS
    ]
    return errors + [{"pair": f"{a} = {b}", "dtype": dtype} for dtype in DTYPES for a, b in PAIRS]


def measure(spec, s, device, folder):
    """A row: errors of a path, or whether a pair is `allclose` at PyTorch's own tolerance (1e-5, 1e-8)."""
    dtype = machine.DTYPES[spec["dtype"]]
    if "pair" in spec:
        return _pair(*spec["pair"].split(" = "), device, dtype)
    attend, scale = PATHS[spec["path"]], INPUTS[spec["inputs"]]
    backward = _runs(spec["path"], device, dtype)
    errors = parity.errors(attend, SHAPE, device, dtype, backward, scale)
    row = {"errors": errors, "overflows": not all(e < float("inf") for e in errors.values())}
    if spec["inputs"] == "large":  # a finding, not a failure; the tolerance is for ordinary inputs
        return row
    row["parity"] = verdict(errors, dtype, f"on all {SHAPE[1]} heads")
    q, k, v, dy = parity.inputs(SHAPE, device, dtype, requires_grad=backward)

    def step():
        y = attend(q, k, v)
        if backward:
            torch.autograd.grad(y, (q, k, v), dy)

    row |= timed(step, s, device, folder / "traces" / f"{slug(' '.join(spec.values()))}.json")
    return row | {"tflops": tflops(SHAPE, backward, row)}


def _runs(path, device, dtype):
    """Whether `path` has a backward here. Raises UserError where it does not run at all."""
    if path == "scaled before" or not kernels.refusal(path, SHAPE, device, dtype):
        return True
    if reason := kernels.refusal(path, SHAPE, device, dtype, backward=False):
        raise UserError(reason)
    return False


def _pair(a, b, device, dtype):
    for path in (a, b):
        _runs(path, device, dtype)
    q, k, v, _ = parity.inputs(SHAPE, device, dtype, requires_grad=False)
    one, other = PATHS[a](q, k, v), PATHS[b](q, k, v)
    close = torch.allclose(one, other)
    return {
        "allclose": close,
        "claimed": CLAIMED[a],
        "reproduced": close == CLAIMED[a],
        "largest_difference": (one.double() - other.double()).abs().max().item(),
    }
