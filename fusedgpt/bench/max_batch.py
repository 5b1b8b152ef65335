"""The largest micro-batch of each attention kernel, and what training at it is worth: figure 3 of PyTorch's article.

A GPU really runs out of memory; on a CPU the process may hold `memory_gb` and no more (RLIMIT_DATA), so that an
allocation fails there too. Every trial is train.py in a process of its own.
"""

import contextlib
import dataclasses
import gc
import math
import pathlib
from collections.abc import Callable, Iterator

import torch

from fusedgpt import memory
from fusedgpt.attention import KERNELS
from fusedgpt.bench import drawing, report, settings, training
from fusedgpt.bench.disturbance import comparable
from fusedgpt.bench.proof import prove_kernel
from fusedgpt.bench.rows import trace_path
from fusedgpt.case import Case
from fusedgpt.device import autocast, resolve_dtype
from fusedgpt.errors import UserError
from model import GPT, GPTConfig

TRIAL_STEPS = 3  # AdamW allocates its state in the first step, so that the second holds everything
EVALUATIONS = 12  # in a timed run

TRAINS = True
UNUSED = {**training.UNUSED, "attention": "each row sets it"}


@dataclasses.dataclass
class Settings(settings.Trained):
    memory_gb: float = 1.0  # on a CPU, GiB that a run may hold beyond PyTorch itself


def defaults(gpu: bool) -> dict:
    """GPT-2 124M in all of a GPU's memory; four small layers in 1 GiB on a CPU."""
    if gpu:
        return training.DEFAULTS | dict(compile=True, eval_iters=100)
    small = dict(vocab_size=None, block_size=512, eval_iters=12, batch_size=4)
    return training.DEFAULTS | training.ON_A_CPU | small


def plan(s: Settings, device: torch.device) -> list[dict]:
    """One row per kernel. Raises UserError on a device whose memory has no limit that it knows."""
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"max_batch knows no limit of memory on {device.type}: set --device=cpu")
    return [{"attention": name} for name in KERNELS]


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """A kernel's row: the estimate, the largest batch and each trial, times at it, and the curve of a timed run."""
    s, dtype = dataclasses.replace(s, **spec), resolve_dtype(s.dtype, device)
    row = prove_kernel(s.attention, Case.of_model(s, 1, device, dtype, dropout=s.dropout))
    room = _room(s, device)
    fixed, each = estimate(s, device, dtype)
    guess = max(0, (room["memory"] - fixed) // each)
    at = f"{fixed / 2**30:.2f} GiB + {each / 2**30:.4f} GiB a sequence"
    print(f"{s.attention}: estimated {at}, so {guess} fit into {room['memory'] / 2**30:.1f} GiB", flush=True)

    def train(batch_size, trace=None, **changes):
        changed = training.settings(dataclasses.replace(s, batch_size=batch_size, **changes), Settings)
        return training.run(changed, folder / "runs" / s.attention, room["limit"], trace)

    trials = []

    def fits(batch_size):
        trials.append({"batch_size": batch_size, "fits": False})
        with contextlib.suppress(MemoryError):
            _, metrics = train(batch_size, steps=TRIAL_STEPS, max_seconds=None, eval_iters=1, profile=False)
            last = [m for m in metrics if m["kind"] == "train"][-1]
            trials[-1] |= {"fits": True, "peak_memory": last["peak_memory"], "ms": last["ms"]}
        print(f"  batch {batch_size} {'fits' if trials[-1]['fits'] else 'does not fit'}", flush=True)
        return trials[-1]["fits"]

    found = largest(fits, guess)
    row |= {"trials": trials, "memory": room["memory"], "held_by_pytorch": room["held_by_pytorch"]}
    row["estimate"] = {"fixed": fixed, "each": each, "largest": guess}
    for size in range(found, 0, -1):  # a longer run may need a little more than a trial did
        with contextlib.suppress(MemoryError):
            record, metrics = train(size, trace_path(folder, spec), **_timed(s, size, trials))
            return row | {"largest": size, "curve": curve(metrics)} | training.measured(record, metrics)
    raise MemoryError("not even one sequence fits")


def _room(s, device):
    """What a run may hold, in bytes, and the limit for its process: on a CPU that counts what PyTorch holds too."""
    if device.type == "cpu":
        data, resident = training.held_by_pytorch()
        memory = int(s.memory_gb * 2**30)
        return {"memory": memory, "held_by_pytorch": resident, "limit": data + memory}
    gc.collect()
    torch.cuda.empty_cache()
    return {"memory": torch.cuda.mem_get_info(device)[0], "held_by_pytorch": 0, "limit": None}


def _timed(s, size, trials):
    """What the run at the largest batch sets: if max_seconds is set, it lasts as long and has EVALUATIONS."""
    if not s.max_seconds:
        return {"eval_iters": 1}
    ms = next(trial["ms"] for trial in trials if trial["fits"] and trial["batch_size"] >= size)
    return {
        "steps": 10**9,
        "schedule": "constant",  # a cosine needs the number of steps, which a time limit leaves open
        "always_save_checkpoint": False,
        "eval_interval": max(1, int(1e3 * s.max_seconds / ms / EVALUATIONS)),
        "eval_iters": math.ceil(s.eval_iters * s.batch_size / size),  # about as many windows for every kernel
    }


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest n with fits(n), or 0: by doubling or halving from `guess`, then by bisection."""
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


def estimate(s: Settings, device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a training step: (fixed, for each sequence), from two small eager ones, of 2 and 4 sequences."""
    dimensions = {name: getattr(s, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")}
    vocabulary = {"vocab_size": s.vocab_size or 256, "vocab_multiple": s.vocab_multiple}
    with torch.device(device):
        model = GPT(GPTConfig(attention=s.attention, **dimensions, **vocabulary))

    def step(sequences):
        ids = torch.zeros(sequences, s.block_size, dtype=torch.long, device=device)
        with autocast(device, dtype):
            _, loss = model(ids, ids)
        loss.backward()
        model.zero_grad(set_to_none=True)

    # peak(n) = fixed + n each, so that each = (peak(4) - peak(2)) / 2 and fixed = 2 peak(2) - peak(4)
    two, four = (memory.peak_bytes(lambda n=n: step(n), device) for n in (2, 4))  # gradients are among them
    weights_and_moments = 12 * model.get_num_params(non_embedding=False)  # float32: the weights and AdamW's two means
    return weights_and_moments + 2 * two - four, (four - two) // 2


def curve(metrics: list[dict]) -> list[list[float]]:
    """[[seconds of training steps, validation loss], …] of a run's metrics."""
    seconds, points = 0.0, []
    for m in metrics:
        if m["kind"] == "train":
            seconds += m["ms"] / 1e3
        else:
            points.append([seconds, m["val_loss"]])
    return points


def table(rows: list[dict]) -> list[str]:
    """A line per kernel, and how memory and MFU are counted."""
    measured = [row for row in rows if "largest" in row]
    names = ["attention", "largest batch", "by the estimate", "eager estimate at the largest", "measured peak"]
    names += ["ms per step there", "tokens/s", "MFU", "validation loss"]
    peaks = report.best_peaks(measured)
    text = report.markdown(names, [_cells(row, peaks) for row in rows])
    if measured:
        room = f"{measured[0]['memory'] / report.GIB:.1f} GiB for a run, beside what PyTorch itself holds."
        text += ["", f"Memory: {room} {report.mfu_convention(measured)}"]
        text += ["Seconds are those of training steps, without evaluations and compilation."]
    return text


def _cells(row, peaks):
    if "largest" not in row:
        return [row["attention"], row["status"], *[""] * 7]
    guess = row["estimate"]["fixed"] + row["largest"] * row["estimate"]["each"]
    peak = row["peak_memory"] - row["held_by_pytorch"]
    last = f"{row['curve'][-1][1]:.4f} after {row['curve'][-1][0]:.0f} s" if row.get("curve") else ""
    mfu = row["mfu"] * row["peak_flops"] / peaks[row["ran"]["dtype"]]
    cells = [row["attention"], row["largest"], row["estimate"]["largest"], f"{guess / report.GIB:.2f} GiB"]
    cells += [f"{peak / report.GIB:.2f} GiB", report.spread(row, 0), f"{row['tokens_per_s']:,.0f}"]
    return [*cells, f"{100 * mfu:.1f} %" if comparable(row) else "", last]


def figures(rows: list[dict]) -> Iterator[tuple]:
    """largest.png: the largest batch, measured and estimated; curves.png: validation loss against seconds.

    A curve whose seconds were disturbed is left out.
    """
    if not rows:
        return
    figure, axes = drawing.new(figsize=(5.2, 3.4))
    names = [row["attention"] for row in rows]
    groups = {"measured": [r["largest"] for r in rows], "estimated": [r["estimate"]["largest"] for r in rows]}
    for n, (label, values) in enumerate(groups.items()):
        at = [i + (n - 0.5) * 0.38 for i in range(len(names))]
        axes.bar_label(axes.bar(at, values, 0.38, label=label, **drawing.bar_style(n)), fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel="attention", ylabel="largest micro-batch (sequences)")
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    yield "largest", figure
    curves = [row for row in rows if row.get("curve") and comparable(row)]
    if curves:
        figure, axes = drawing.new(figsize=(5.6, 3.6))
        for row in curves:
            label = f"{row['attention']}, batch {row['largest']}"
            axes.plot(*zip(*row["curve"]), marker=drawing.mark(row["attention"]), markersize=4, label=label)
        axes.set(xlabel="seconds of training", ylabel="validation loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        yield "curves", figure
