"""The largest micro-batch of each path, and what training at it is worth: figure 3 of PyTorch's article.

On a GPU memory really runs out; on a CPU the process may hold `memory_gb` and no more (RLIMIT_DATA), so that an
allocation fails there too. Every trial is train.py in a process of its own.
"""

import contextlib
import dataclasses
import gc
import math

import torch

from model import GPT, GPTConfig
from parts import cost, kernels, machine
from parts.attention import ATTENTION
from parts.bench import child
from parts.bench.rows import proof
from parts.errors import UserError

TRIAL_STEPS = 3  # AdamW's state is there from the second on
POINTS = 12  # evaluations in a timed run


def plan(s, device):
    """One row a path."""
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"max_batch knows no limit of memory on {device.type}: set --device=cpu")
    return [{"attention": name} for name in ATTENTION if name != "sdpa"]


def measure(spec, s, device, folder):
    """A path's row: the estimate, the largest batch and each trial, times at it, and the curve of a timed run."""
    s, dtype = dataclasses.replace(s, **spec), machine.dtype(s.dtype, device)
    shape = (1, s.n_head, s.block_size, s.n_embd // s.n_head)
    if reason := kernels.refusal(s.attention, shape, device, dtype, s.dropout):
        raise UserError(reason)
    row = proof(kernels.as_run(s.attention, device, dtype, True), shape, device, dtype)

    # what it should take, and what there is; on a CPU the limit counts what PyTorch itself holds too
    fixed, each = estimate(s, dtype, device)
    if device.type == "cpu":
        data, resident = child.held_by_pytorch()
        memory = int(s.memory_gb * 2**30)
        limit = data + memory
    else:
        gc.collect()  # the estimate's model
        torch.cuda.empty_cache()
        memory, resident, limit = torch.cuda.mem_get_info(device)[0], 0, None
    guess = max(0, (memory - fixed) // each)
    at = f"{fixed / 2**30:.2f} GiB + {each / 2**30:.4f} GiB a sequence"
    print(f"{s.attention}: estimated {at}, so {guess} fit into {memory / 2**30:.1f} GiB", flush=True)

    def train(batch_size, **changes):
        settings = dataclasses.replace(s, batch_size=batch_size, **changes).of_train()
        return child.train(settings, folder / "runs" / s.attention, limit)

    trials = []

    def fits(batch_size):
        trials.append({"batch_size": batch_size, "fits": False})
        with contextlib.suppress(MemoryError):
            _, rows = train(batch_size, max_iters=TRIAL_STEPS, max_seconds=None, eval_iters=1)
            last = [r for r in rows if r["kind"] == "train"][-1]
            trials[-1] |= {"fits": True, "peak_memory": last["peak_memory"], "ms": last["ms"]}
        print(f"  batch {batch_size} {'fits' if trials[-1]['fits'] else 'does not fit'}", flush=True)
        return trials[-1]["fits"]

    found = largest(fits, guess)
    row |= {"trials": trials, "memory": memory, "held_by_pytorch": resident}
    row["estimate"] = {"fixed": fixed, "each": each, "largest": guess}
    for size in range(found, 0, -1):  # a longer run may need a little more than a trial did
        with contextlib.suppress(MemoryError):
            record, rows = train(size, **_timed(s, size, trials))
            return row | {"largest": size, "curve": curve(rows)} | child.timing(record, rows)
    raise MemoryError("not even one sequence fits")


def _timed(s, size, trials):
    """What the run at the largest batch sets: it lasts max_seconds, where that is set, and evaluates POINTS times."""
    if not s.max_seconds:
        return {"eval_iters": 1}
    ms = next(trial["ms"] for trial in trials if trial["fits"] and trial["batch_size"] >= size)
    return {
        "max_iters": 10**9,
        "schedule": "constant",
        "always_save_checkpoint": False,
        "eval_interval": max(1, int(1e3 * s.max_seconds / ms / POINTS)),
        "eval_iters": math.ceil(s.eval_iters * s.batch_size / size),  # as many windows for every path, or a few more
    }


def largest(fits, guess):
    """The largest n with fits(n), by doubling, or halving, from `guess` and then bisection; 0 where 1 does not fit."""
    low, high = 0, max(1, guess)
    while fits(high):
        low, high = high, 2 * high
    if not low:
        while (low := high // 2) and not fits(low):
            high = low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def estimate(s, dtype, device):
    """Bytes of a training step, estimated as (fixed, a sequence more) from two small ones, eager: 2 and 4 sequences."""
    shape = {name: getattr(s, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")}
    vocabulary = {"vocab_size": s.vocab_size or 256, "vocab_multiple": s.vocab_multiple}
    with torch.device(device):
        model = GPT(GPTConfig(attention=s.attention, **shape, **vocabulary))

    def step(sequences):
        ids = torch.zeros(sequences, s.block_size, dtype=torch.long, device=device)
        with machine.autocast(device, dtype):
            _, loss = model(ids, ids)
        loss.backward()
        model.zero_grad(set_to_none=True)

    two, four = (cost.peak_bytes(lambda n=n: step(n), device) for n in (2, 4))  # gradients among them
    weights_and_moments = 12 * model.get_num_params(non_embedding=False)  # in float32, AdamW's two
    return weights_and_moments + 2 * two - four, (four - two) // 2


def curve(rows):
    """[[seconds of training, validation loss], …] of a run's rows."""
    seconds, points = 0.0, []
    for row in rows:
        if row["kind"] == "train":
            seconds += row["ms"] / 1e3
        else:
            points.append([seconds, row["val_loss"]])
    return points
