"""Attention alone over a range of lengths, and training end to end: where one kernel overtakes another.

After AMD's article "Accelerating LLMs with Flash Attention on AMD GPUs": causal attention, batch 1, 256 to 4096 tokens
by 64, written out against fused. Kernels take turns at each length, so that drift of the machine meets them all.
"""

import dataclasses
import functools

import torch

from parts import kernels, machine, parity
from parts.attention import ATTENTION
from parts.bench import child
from parts.bench.rows import numbers, proof, refusals, slug, tflops, timed
from parts.errors import UserError

KERNELS = [name for name in ATTENTION if name != "sdpa"]  # it is one of the others
COMPILED_AT = [256, 512, 1024, 2048, 4096, 8192, 16384]  # flex compiles anew for each length: at these only


def plan(s, device):
    """Training, at powers of two; then attention alone at every length, heads x head size, direction and kernel."""
    try:
        shapes = [tuple(map(int, word.split("x"))) for word in s.heads.split(",")]
        if any(len(shape) != 2 or min(shape) < 1 for shape in shapes):
            raise ValueError
    except ValueError:
        raise UserError(f"heads={s.heads!r} must be like 32x128,12x64 (heads x head size)") from None
    lengths = numbers(s.lengths)
    alone = [
        {"part": "attention", "heads": word, "pass": way, "T": T, "attention": name}
        for word in s.heads.split(",")
        for way in ("forward", "forward + backward")
        for T in lengths
        for name in KERNELS
        if name != "flex" or T in COMPILED_AT
    ]
    whole = [
        {"part": "training", "T": T, "attention": name}
        for T in lengths
        if T & (T - 1) == 0 and T <= 4096
        for name in KERNELS
    ]
    return whole + alone


def measure(spec, s, device, folder):
    """A row: parity with float64, then times, with TFLOP/s and the memory above what was held before."""
    if spec["attention"] == "flex":
        torch.compiler.reset()  # PyTorch counts recompilations over a whole process, and ends at the eighth
    if spec["part"] == "training":
        return _training(spec, s, device, folder)
    nh, hs = map(int, spec["heads"].split("x"))
    T, name, backward = spec["T"], spec["attention"], spec["pass"] != "forward"
    shape, dtype = (1, nh, T, hs), machine.dtype(s.dtype, device)
    attend = ATTENTION[name]
    if reason := _refusal(name, hs, device, dtype, backward):
        raise UserError(reason)
    q, k, v, dy = _inputs(shape, device, dtype, backward)

    def step():
        y = attend(q, k, v)
        if backward:
            torch.autograd.grad(y, (q, k, v), dy)

    trace = folder / "traces" / f"{slug(' '.join(map(str, spec.values())))}.json"
    with refusals():
        row = proof(attend, shape, device, dtype, backward) | timed(step, s, device, trace)
    if reason := kernels.contradiction(name, row["kernel"], device, backward):
        raise UserError(reason)
    return row | {"dtype": str(dtype).removeprefix("torch."), "tflops": tflops(shape, backward, row)}


_inputs = functools.lru_cache(maxsize=1)(parity.inputs)  # kernels take turns with them; drawing them takes longer


@functools.lru_cache
def _refusal(name, hs, device, dtype, backward):
    # once, not at each of many lengths: a kernel that takes this one but not another raises there
    return kernels.refusal(name, (1, 1, 256, hs), device, dtype, backward=backward)


def _training(spec, s, device, folder):
    s = dataclasses.replace(s, block_size=spec["T"], attention=spec["attention"], dtype="auto")
    shape, dtype = (s.batch_size, s.n_head, s.block_size, s.n_embd // s.n_head), machine.dtype(s.dtype, device)
    if reason := kernels.refusal(s.attention, shape, device, dtype, s.dropout):
        raise UserError(reason)
    row = proof(kernels.as_run(s.attention, device, dtype, True), shape, device, dtype)
    return row | child.timing(*child.train(s.of_train(), folder / "runs" / slug(f"{spec['attention']} {spec['T']}")))


def crossovers(rows):
    """Where a kernel overtakes another: {(slower before, faster from there on): T}, among rows of one part.

    T is the first length from which on it stays faster at every longer one that was measured; None: at every length.
    """
    times = {}
    for row in rows:
        if row["status"] == "measured":
            times.setdefault(row["attention"], {})[row["T"]] = row["median_ms"]
    found = {}
    for a in times:
        for b in times:
            common = sorted(times[a].keys() & times[b].keys())
            ahead = [times[b][T] < times[a][T] for T in common]
            if a == b or len(common) < 2 or not ahead[-1]:
                continue
            first = len(ahead) - next((n for n, yes in enumerate(reversed(ahead)) if not yes), len(ahead))
            found[a, b] = common[first] if first else None
    return found
