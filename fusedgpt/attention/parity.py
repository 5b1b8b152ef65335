"""Does an attention function compute attention? Its output and gradients against float64, written out in full."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fusedgpt.attention.case import Attend, Case

# the largest error allowed, as `compare` counts it: 450, 168, 10 and 5 times the epsilon of the dtype
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
FLOOR = 0.1  # the divisor of an error is at least this fraction of the largest number in all rows
# the largest root mean square of all errors allowed: 113, 42, 2 and 1.5 times the epsilon. On CPUs, with and without
# AVX-512, the kernels' own rounding reaches 1.9e-15, 7.7e-7, 6.0e-4 and 6.9e-3. A gradient that is 2 % too large fails
# this limit in every dtype. The largest error cannot show that: rounding to bfloat16 alone makes it 3.6 %.
RMS_TOLERANCE = {torch.float64: 2.5e-14, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# Kernels work on blocks of 64, 128 or 256 rows. Some were wrong in a last block that is not full, if it was the only
# block or if full ones came before it.
ODD_LENGTHS = (127, 300)
ODD_WINDOW = 37  # shorter than these
FIRST_TOKENS = 2**15  # whose dropout is looked at: enough to tell p = 0.2 from 3/16, to which cuDNN may round it
MOST_COMPARED = 2048  # tokens of the longest comparison that must be quick: the scores of two heads take 0.3 GB


def reference(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor | None, documents: Tensor | None = None, window: int | None = None
) -> tuple[Tensor, ...]:
    """Causal attention in float64: (y,), or (y, dq, dk, dv) by the chain rule, without autograd. See functions.py."""
    q, k, v, dy = (None if x is None else _double(x) for x in (q, k, v, dy))
    T, Tk, group = q.size(-2), k.size(-2), q.size(1) // k.size(1)
    hidden = torch.ones(T, Tk, dtype=torch.bool, device=q.device).triu(Tk - T + 1)
    if window is not None:
        distance = torch.arange(Tk - T, Tk, device=q.device)[:, None] - torch.arange(Tk, device=q.device)
        hidden = hidden | (distance >= window)
    if documents is not None:
        numbers = documents.to(q.device, torch.float64)
        hidden = hidden | ((numbers[:, None, Tk - T :, None] - numbers[:, None, None]) != 0)
    # of heads that share keys and values, one at a time: each has T Tk scores
    each = [_one_to_one(q[:, n::group], k, v, None if dy is None else dy[:, n::group], hidden) for n in range(group)]
    of_queries = [torch.stack(parts, dim=2).flatten(1, 2) for parts in zip(*(found[:2] for found in each))]
    return *of_queries, *(sum(parts) for parts in zip(*(found[2:] for found in each)))


def _one_to_one(q, k, v, dy, hidden):
    """Attention of as many heads of queries as of keys: y, or y, dq, dk and dv."""
    scale = q.size(-1) ** -0.5
    scores = (q @ k.mT * scale).masked_fill(hidden, float("-inf"))
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True)  # (B, nh, T, Tk)
    if dy is None:
        return (p @ v,)
    dp = dy @ v.mT
    # backward of the softmax: each score moves its own weight up and all others of its row down
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return p @ v, ds @ k, ds.mT @ q, p.mT @ dy


def _double(x):
    x = x.detach()
    return (x.cpu() if x.device.type == "mps" else x).double()  # MPS has no float64


def compare(
    attend: Attend, case: Case, inputs: tuple[Tensor, ...] | None = None, heads: int | None = None
) -> dict[str, float]:
    """Errors of `attend`, without dropout, on `inputs` (q, k, v, dy), or on those of `case`.

    Returns the largest error of each result, {'y': …, 'dq': …, 'dk': …, 'dv': …}, and as 'rms' the largest root mean
    square of one's errors. `heads` compares only so many heads of keys, the last of the last sequence, because the
    reference holds T² scores per head. Raises ValueError if `attend` changes its inputs, or returns another dtype.

    An error is divided by the largest number in its own row: late rows average many values and are small. The divisor
    is at least FLOOR of the largest in all rows, because some rows are 0 in theory (dq of the first token). 'rms' is
    divided by that of y, or for gradients by the largest of their three, because dq and dk are 0 in theory if there is
    one token. NaN counts as infinite.
    """
    case = replace(case, dropout=0.0)
    q, k, v, dy = inputs or case.inputs()
    first, group = -1 if heads else None, q.size(1) // k.size(1)

    def some(x):
        return x[first:, -heads * (group if x.size(1) == q.size(1) else 1) :] if heads else x

    given = [some(x).detach().clone() for x in (q, k, v, dy)]  # or `attend` could change what it is compared with
    got = case.run(attend, q, k, v, dy)
    if not all(torch.equal(some(x), before) for x, before in zip((q, k, v, dy), given)):
        raise ValueError("it changes q, k, v or dy in place, and generation caches k and v: let it change copies")
    if got[0].dtype != q.dtype:
        raise ValueError(f"it returns {got[0].dtype} for q, k and v in {q.dtype}")
    documents = case.documents[first:] if case.packed else None
    want = reference(*given[:3], given[3] if case.backward else None, documents, case.window)
    largest, typical = ({"y": size(want[:1]), "d": size(want[1:])} for size in (_largest, _rms))
    found, rms = {}, []  # one divisor for y, and one for the three gradients together ("dq"[0] is "d")
    for name, g, w in zip(("y", "dq", "dk", "dv"), got, want):
        error = (_double(some(g)) - w).abs()
        fraction = error / w.abs().amax(-1, keepdim=True).clamp(min=FLOOR * largest[name[0]])
        found[name] = _finite(fraction.max())
        rms.append(_finite(_rms([error]) / typical[name[0]]))
    return found | {"rms": max(rms)}


def dropped_wrongly(attend: Attend, case: Case) -> str | None:
    """What is wrong with the dropout of `attend` at the rate of `case`, or None if it is right.

    A first token sees only itself. So its output is 0 if that weight was dropped, and otherwise its value / (1 - p).
    The share of zeros among many first tokens must be p within 5 standard deviations.
    """
    _, nh, _, hs = case.shape
    B = -(-FIRST_TOKENS // nh)
    first = replace(case, shape=(B, nh, 2, hs), keys=None, backward=False)
    q = torch.zeros(first.shape, device=case.device, dtype=case.dtype)
    k = v = torch.ones(B, case.kv_heads or nh, 2, hs, device=case.device, dtype=case.dtype)
    torch.manual_seed(0)
    y = _double(first.run(attend, q, k, v, q)[0][:, :, 0])  # (B, nh, hs)
    p, kept = case.dropout, y != 0
    share, deviation = 1 - kept.double().mean().item(), (p * (1 - p) / (B * nh)) ** 0.5
    if abs(share - p) > 5 * deviation:
        return f"its dropout_p={p:g} drops {share:.3f} of the weights"
    if not torch.allclose(y[kept], torch.full_like(y[kept], 1 / (1 - p)), rtol=TOLERANCE[case.dtype]):
        return f"with dropout_p={p:g} it does not divide what is left by {1 - p:g}"
    return None


def _largest(tensors):
    return max((x.abs().max() for x in tensors), default=None)


def _rms(tensors):
    return max((x.square().mean().sqrt() for x in tensors), default=None)


def _finite(error):
    return error.nan_to_num(nan=torch.inf).item()


def checks(attend: Attend, case: Case) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (where, errors) of each comparison that `attend` must pass before it trains or is timed.

    First all heads of two sequences at ODD_LENGTHS (of keys, if `case` has more keys than queries) with a shorter
    window, then scores beyond 60, and last the shape of `case`: its last two heads of keys, or one if T is beyond 4096.
    """
    _, nh, T, hs = case.shape
    short = replace(case, window=case.window and min(case.window, ODD_WINDOW))

    def of(length):
        queries, keys = (min(T, length), length) if case.keys else (length, None)
        return replace(short, shape=(2, nh, queries, hs), keys=keys)

    for length in ODD_LENGTHS:
        yield f"at {length} tokens", compare(attend, of(length))
    large = compare(attend, of(ODD_LENGTHS[0]), of(ODD_LENGTHS[0]).inputs_of_large_scores())
    # dq and dk are differences of numbers that are large and nearly equal there
    yield "on large scores", {name: error for name, error in large.items() if name in ("y", "dv")}
    nkv = case.kv_heads or nh
    heads = min(nkv, 2 if T <= 4096 else 1)
    yield f"on {heads} of {nkv} heads", compare(attend, case, heads=heads)


def shortened(case: Case, B: int | None = None) -> Case:
    """`case` with at most MOST_COMPARED tokens and, if B is given, at most B sequences, for a quick comparison."""
    sequences, nh, T, hs = case.shape
    return replace(case, shape=(min(sequences, B or sequences), nh, min(T, MOST_COMPARED), hs))


def largest(found: dict[str, float]) -> float:
    """The largest error of `compare`, without the root mean square, whose divisor differs."""
    return max(error for name, error in found.items() if name != "rms")


def passes(found: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether every error of `compare` is within the tolerance for `dtype`."""
    return all(error <= (RMS_TOLERANCE if name == "rms" else TOLERANCE)[dtype] for name, error in found.items())
