"""The largest micro-batch of each attention kernel, and what training at it is worth: figure 3 of PyTorch's article.

A GPU really runs out of memory. On a CPU the process may hold `memory_gb` and no more (RLIMIT_DATA), so that an
allocation fails there too. Every trial is train.py in a process of its own. When a trial ends, a line is added to
rows.jsonl, so that an interrupted row makes no trial twice:

    {"kind": "trial", "attention": "flash", "batch_size": 28, "memory": …, "fits": true, "peak_memory": …, "ms": …}

"memory" is what the run could hold, in bytes. A trial has a "reason" if something other than memory ended it.
"""

import contextlib
import dataclasses
import gc
import json
import math
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from fusedgpt.attention.case import Case
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.bench import check, child, drawing, options, report
from fusedgpt.bench.disturbance import comparable
from fusedgpt.bench.proof import prove_kernel
from fusedgpt.bench.rows import OutOfTime, time_is_up, trace_path
from fusedgpt.data import dataset
from fusedgpt.errors import UserError, first_line
from fusedgpt.estimates.run import hidden
from fusedgpt.home import ROOT
from fusedgpt.machine import memory
from fusedgpt.machine.device import autocast, resolve_compile, resolve_dtype
from fusedgpt.machine.files import read_jsonl
from model import GPT, GPTConfig

TRIAL_STEPS = 3  # AdamW allocates its state in the first step; from the second on, memory holds everything
EVALUATIONS = 12  # evaluations in a run of train_seconds
ARTICLE = {"manual": 24, "flash": 39}  # the largest batch in the article's figure 3, on 8 A100 of 80 GB

TRAINS = True
UNUSED = {**child.UNUSED, "attention": "each row sets it"}
GROUP = ()


@dataclasses.dataclass
class Settings(options.Trained):
    memory_gb: float = 1.0  # GiB that a run may hold on a CPU, beyond PyTorch itself
    train_seconds: float | None = None  # seconds of training at the largest batch; None: --steps steps


def defaults(gpu: bool) -> dict:
    """GPT-2 124M in all of a GPU's memory; four small layers in 1 GiB on a CPU."""
    if gpu:
        return child.DEFAULTS | dict(compile=True, eval_iters=100)
    small = dict(vocab_size=None, block_size=512, eval_iters=12, batch_size=4)
    return child.DEFAULTS | child.ON_A_CPU | small


def plan(s: Settings, device: torch.device) -> list[dict]:
    """One row per kernel. Raises UserError on a device whose memory limit is unknown."""
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"max_batch knows no limit of memory on {device.type}: set --device=cpu")
    return [{"attention": name} for name in SINGLE_KERNELS]


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """A kernel's row: the estimate, the trials, the largest batch, the times at it, and the curve of a timed run.

    Raises OutOfTime before a run for which s.max_seconds leaves no time; the trials so far are in rows.jsonl.
    """
    s, dtype = dataclasses.replace(s, **spec), resolve_dtype(s.dtype, device)
    for case in Case.of_layers(s, 1, device, dtype, dropout=s.dropout):  # with a window and without, if layers differ
        row = prove_kernel(s.attention, case)
    data, resident = child.held_by_pytorch() if device.type == "cpu" else (0, 0)
    fixed, each = estimate(s, device, dtype)
    free = _free(s, device)
    guess = max(0, (free - fixed) // each)
    at = f"{fixed / 2**30:.2f} GiB + {each / 2**30:.4f} GiB a sequence"
    print(f"{s.attention}: estimated {at}, so {guess} fit into {free / 2**30:.1f} GiB")

    def train(batch_size, trace=None, seconds=None, **changes):
        if time_is_up(s.max_seconds):
            raise OutOfTime
        changed = child.settings(dataclasses.replace(s, batch_size=batch_size, **changes), Settings)
        limit = data + free if device.type == "cpu" else None
        return child.run(changed | {"max_seconds": seconds}, folder / "runs" / s.attention, limit, trace)

    earlier, trials = _earlier_trials(folder / "rows.jsonl", spec, free), []

    def fits(batch_size):
        """Whether a micro-batch of `batch_size` sequences trains here; each trial is measured once and written down."""
        trial = earlier.get(batch_size)
        if not trial:
            trial = _trial(train, batch_size, _free(s, device))
            with open(folder / "rows.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": "trial", **spec, **trial}) + "\n")
        trials.append(trial)
        outcome = "fits" if trial["fits"] else f"does not fit: {trial.get('reason', 'out of memory')}"
        print(f"  batch {batch_size} {outcome}")
        return trial["fits"]

    found = largest(fits, next(iter(earlier), guess))  # a search that continues starts where it started
    row |= {"trials": trials, "memory": free, "held_by_pytorch": resident}
    row["estimate"] = {"fixed": fixed, "each": each, "largest": guess}
    for size in range(found, 0, -1):  # a longer run may need a little more memory than its trial
        with contextlib.suppress(MemoryError):
            record, metrics = train(size, trace_path(folder, spec), s.train_seconds, **_timed(s, size, trials))
            return row | {"largest": size, "curve": curve(metrics)} | child.measured(record, metrics)
    if reason := _other_limit(trials, 0):
        raise RuntimeError(f"not even one sequence runs: {reason}")
    raise MemoryError("not even one sequence fits")


def _free(s, device):
    """Bytes that a run may hold now; on a CPU, those beyond PyTorch itself."""
    if device.type == "cpu":
        return int(s.memory_gb * 2**30)
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _earlier_trials(path, spec, free):
    """{batch size: trial} for the trials of the row `spec` in rows.jsonl that still count.

    A trial counts if as much memory was free, to one per cent (machines of one kind differ by less). It also counts if
    its row was disturbed: only times suffer from that. A trial that failed for another reason is made again.
    """
    lines = read_jsonl(path) if path.exists() else []
    trials = [line for line in lines if line["kind"] == "trial" and spec.items() <= line.items()]
    count = [t for t in trials if "reason" not in t and abs(t["memory"] - free) <= 0.01 * free]
    return {t["batch_size"]: {key: t[key] for key in t if key not in ("kind", *spec)} for t in count}


def _trial(train, batch_size, free):
    """Whether a few steps at `batch_size` fit into the `free` memory; a trial that fails otherwise does not fit."""
    trial = {"batch_size": batch_size, "memory": free, "fits": False}
    try:
        _, metrics = train(batch_size, steps=TRIAL_STEPS, eval_iters=1, profile=False)
    except MemoryError:
        return trial
    except RuntimeError as error:  # such as a kernel that counts elements in 32 bits
        return trial | {"reason": first_line(error)}
    last = [m for m in metrics if m["kind"] == "train"][-1]
    return trial | {"fits": True, "peak_memory": last["peak_memory"], "ms": last["ms"]}


def _other_limit(trials, found):
    """Why one sequence more than `found` failed, if the reason was not memory."""
    return next((t["reason"] for t in trials if t["batch_size"] == found + 1 and "reason" in t), None)


def _timed(s, size, trials):
    """The settings of the run at the largest batch; if it lasts train_seconds, it has EVALUATIONS evaluations."""
    if not s.train_seconds:
        return {"eval_iters": 1}
    ms = next(trial["ms"] for trial in trials if trial["fits"] and trial["batch_size"] >= size)
    return {
        "steps": 10**9,
        "schedule": "constant",  # a cosine needs the number of steps, which is open under a time limit
        "always_save_checkpoint": False,
        "eval_interval": max(1, int(1e3 * s.train_seconds / ms / EVALUATIONS)),
        "eval_iters": math.ceil(s.eval_iters * s.batch_size / size),  # about as many windows for every kernel
    }


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest n with fits(n), or 0. From `guess`, steps double until they enclose it; then bisection finds it.

    If fits changes only once, the result fits, and a trial showed that one more does not.
    """
    n, step = max(1, guess), max(1, guess // 24)  # the estimate is a few per cent off
    if fits(n):
        low, high = n, n + step
        while fits(high):
            step *= 2
            low, high = high, high + step
    else:
        low, high = max(0, n - step), n
        while low and not fits(low):
            step *= 2
            low, high = max(0, low - step), low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def estimate(s: Settings, device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """(fixed, for each sequence): bytes of a training step, from two small steps of 2 and 4 sequences.

    The small steps are compiled if the run will be. Raises FileNotFoundError if the data, which may say how many ids
    the model has, cannot be read.
    """
    same = dict(attention=s.attention, loss=s.loss, recompute=s.recompute, document_start=0 if s.packed else None)
    with torch.device(device):
        model = GPT(GPTConfig.of(s, vocab_size=s.vocab_size or _ids(s.dataset), **same))
    if resolve_compile(s.compile, device)[0]:
        torch.compiler.reset()  # graphs of another kernel hold memory, and PyTorch counts recompilations
        model.compile(dynamic=False)

    def step(sequences):
        ids = torch.zeros(sequences, s.block_size, dtype=torch.long, device=device)
        with autocast(device, dtype):
            _, loss = model(ids, ids, logits=False)
        loss.backward()
        model.zero_grad(set_to_none=True)

    def peak(sequences):
        step(sequences)  # the first call compiles, and the memory for that is not the step's
        return memory.peak_bytes(lambda: step(sequences), device)  # with the gradients

    # peak(n) = fixed + n each; so each = (peak(4) - peak(2)) / 2 and fixed = 2 peak(2) - peak(4)
    two, four = peak(2), peak(4)
    weights_and_means = 12 * model.get_num_params(non_embedding=False)  # float32: the weights and AdamW's two means
    if s.optimizer == "muon":
        weights_and_means -= 4 * hidden(model.config)  # Muon has one
    return weights_and_means + 2 * two - four, (four - two) // 2


def _ids(name):
    """The number of ids in the data set `name`."""
    try:
        return dataset.read_meta(dataset.find_folder(ROOT, name))["vocab_size"]
    except UserError as error:  # a row would be refused for good, but the data may be prepared later
        raise FileNotFoundError(str(error)) from error


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
    """A line for each kernel, and how memory and MFU are counted."""
    measured = [row for row in rows if "largest" in row]
    names = ["attention", "largest batch", "the article, 8 x A100 80 GB, 1024 tokens"]
    names += ["by the estimate", "estimate at the largest", "measured peak"]
    names += ["ms per step there, median (p10-p90)", "tokens/s", "MFU"]
    peaks = report.best_peaks(measured)
    curves = [row for row in measured if row.get("curve") and comparable(row)]
    until = common_end(curves) if len(curves) > 1 else None
    names += ["validation loss at the end"] + ([f"and after {until:.0f} s"] if until else [])
    text = report.markdown(names, [_cells(row, peaks, until) for row in rows])
    if measured:
        room = f"{measured[0]['memory'] / report.GIB:.1f} GiB for a run, beside what PyTorch itself holds."
        text += ["", f"Memory: {room} {report.mfu_convention(measured)}"]
        text += [_held(measured), "Seconds are those of training steps, without evaluations and compilation."]
        if until:
            made = ", ".join(f"{row['attention']} made about {_steps(row, until)}" for row in curves)
            text += [f"Compare losses after the same time, {until:.0f} s: between two evaluations on a straight line."]
            text += [f"Until then {made}, at the same learning rate."]
            apart = f"before the first step losses differ by {_by_windows(curves):.4f}"
            text += [f"Each run evaluates other windows: {apart}, and a difference no larger than that shows nothing."]
        text += ["The article's best validation loss is lower with flash after an hour of training, each at its batch."]
        limits = [(row["attention"], row["largest"], _other_limit(row["trials"], row["largest"])) for row in measured]
        other = "Something other than memory ended a batch of"
        text += [f"{other} {n + 1} with `{name}`: {why}." for name, n, why in limits if why]
    return text


def _cells(row, peaks, until):
    if "largest" not in row:
        return [row["attention"], row["status"], ARTICLE.get(row["attention"], ""), *[""] * (8 if until else 7)]
    last = f"{row['curve'][-1][1]:.4f} after {row['curve'][-1][0]:.0f} s" if row.get("curve") else ""
    mfu = row["mfu"] * row["peak_flops"] / peaks[report.precision(row)]
    theirs = ARTICLE.get(row["attention"], "")
    cells = [
        row["attention"],
        row["largest"],
        theirs,
        row["estimate"]["largest"],
        f"{_estimated(row) / report.GIB:.2f} GiB",
    ]
    cells += [f"{_peak(row) / report.GIB:.2f} GiB", report.spread(row, 0), f"{row['tokens_per_s']:,.0f}"]
    cells += [f"{100 * mfu:.1f} %" if comparable(row) else "", last]
    if until:
        cells += [f"{loss_at(row['curve'], until):.4f}" if row.get("curve") and comparable(row) else ""]
    return cells


def claims(rows: list[dict]) -> list[check.Claim]:
    """Each kernel's largest batch and tokens/s as multiples of manual's, and what is refused."""
    measured = {row["attention"]: row for row in rows if row["status"] == "measured"}
    manual, found = measured.get("manual"), []
    for name, row in measured.items():
        if manual and row is not manual:
            larger = row["largest"] / manual["largest"]
            found.append(check.Claim(f"{name}: largest batch over manual's", [manual, row], larger, timed=False))
            for claim in check.ratio(f"{name}: tokens/s there over manual's", row, manual):
                changes = {part: getattr(claim, part) * larger for part in ("value", "low", "high")}
                found.append(dataclasses.replace(claim, speed=False, **changes))
    return found + check.refusals(rows)


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """largest.png: the largest batch, measured and estimated; curves.png: validation loss against seconds.

    A curve is left out if its times were disturbed.
    """
    left_out, rows = drawing.left_out(rows), [row for row in rows if row["status"] == "measured"]
    if not rows:
        return
    figure, axes = drawing.new(2.4)
    names = [row["attention"] for row in rows]
    groups = {"measured": [r["largest"] for r in rows], "estimated": [r["estimate"]["largest"] for r in rows]}
    for n, (label, values) in enumerate(groups.items()):
        at = [i + (n - 0.5) * 0.38 for i in range(len(names))]
        axes.bar_label(axes.bar(at, values, 0.38, label=label, **drawing.bar_style(n)), fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel="attention", ylabel="largest micro-batch (sequences)")
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.15)
    axes.legend(frameon=False, loc="upper left")
    room = f"{rows[0]['memory'] / report.GIB:.3g} GiB beside what PyTorch itself holds"
    dtypes = ", ".join(dict.fromkeys(row["ran"]["dtype"] for row in rows))
    model = child.subject(s | {"batch_size": "n"}) + f" ({dtypes})"
    yield "largest", finding(rows), f"In {room}: {model}. {_held(rows)}{left_out}", figure
    curves = [row for row in rows if row.get("curve") and comparable(row)]
    if curves:
        made = ", ".join(f"{row['attention']} about {_steps(row, common_end(curves))}" for row in curves)
        subject = f"Each kernel at its largest batch in {room}, one run each: {model}. Until then: {made}"
        if len(curves) > 1:
            subject += f". Because windows differ, losses before the first step do, by {_by_windows(curves):.2g}"
        yield "curves", finding_of_curves(curves), subject, _curves(curves)


def finding(rows: list[dict]) -> str:
    """The largest batch of each kernel, and how far off the estimate is."""
    said = ", ".join(f"{row['attention']} {row['largest']}" for row in rows)
    high = [row["estimate"]["largest"] / row["largest"] for row in rows]
    return f"Sequences that fit: {said}; the estimate says {report.span(high)} times as many"


def _held(rows):
    """Why other batches fit than the estimate says: what a process held at the largest batch beside its tensors."""
    held = [_peak(row) / _estimated(row) for row in rows]
    more = " (the process keeps freed memory on a CPU, and libraries hold some)" * any(
        r["held_by_pytorch"] for r in rows
    )
    return f"The estimate counts tensors; a run held {report.span(held)} times as much at its largest batch{more}."


def _estimated(row):
    """The estimate of a run's bytes at the largest batch."""
    return row["estimate"]["fixed"] + row["largest"] * row["estimate"]["each"]


def _peak(row):
    """The most bytes that a run held at the largest batch, beside PyTorch itself."""
    return row["peak_memory"] - row["held_by_pytorch"]


def finding_of_curves(rows: list[dict]) -> str:
    """Which kernel has the lowest validation loss after the time that every run lasted, and what the others have."""
    until = common_end(rows)
    losses = {row["attention"]: loss_at(row["curve"], until) for row in rows}
    best, *others = sorted(losses, key=losses.get)
    which = ("a", "the lower", "the lowest")[min(len(others), 2)]
    said = ", ".join([f"{losses[best]:.2f}", *(f"{name} {losses[name]:.2f}" for name in others)])
    if others and losses[others[0]] - losses[best] <= _by_windows(rows):
        return f"After {until:.0f} s of training it is open which kernel has {which} validation loss: {best} {said}"
    return f"After {until:.0f} s of training {best} has {which} validation loss: {said}"


def _by_windows(rows):
    """How far losses lie apart because each run evaluates other windows: as far as those of the untrained model."""
    first = [row["curve"][0][1] for row in rows]
    return max(first) - min(first)


def _steps(row, seconds):
    """'36 steps of 25 sequences (11,816 tokens/s)': the steps of a run in `seconds`, by its median step."""
    steps = 1e3 * seconds / row["median_ms"]
    return f"{steps:.0f} steps of {row['largest']} sequences ({row['tokens_per_s']:,.0f} tokens/s)"


def _curves(rows):
    """Validation loss against seconds, for as long as all runs lasted; the untrained model's loss is only named."""
    figure, axes = drawing.new(2.6)
    until = common_end(rows)
    for row in rows:
        end = loss_at(row["curve"], until)
        points = [(*point, None, None) for point in row["curve"] if point[0] <= until]
        label = f"{row['attention']}, batch {row['largest']}: {end:.3f} after {until:.0f} s"
        evaluations = range(len(points))
        drawing.line(axes, row["attention"], [*points, (until, end, None, None)], label=label, markevery=evaluations)
    if losses := [loss for row in rows for seconds, loss in row["curve"] if 0 < seconds <= until]:
        margin = 0.05 * (max(losses) - min(losses)) + 0.01
        axes.set(xlim=(0, 1.01 * until), ylim=(min(losses) - margin, top := max(losses) + margin))
        if (first := [row["curve"][0][1] for row in rows]) and max(first) > top:
            where = dict(xycoords="axes fraction", fontsize=7.5, bbox=drawing.WHITE)
            axes.annotate(f"↑ above the axis: {report.span(first)} before the first step", (0.02, 0.04), **where)
    axes.set(xlabel="seconds of training steps", ylabel="validation loss (nats per token)")
    axes.legend(frameon=False, labelcolor="linecolor")
    return figure


def common_end(rows: list[dict]) -> float:
    """The seconds that every run of `rows` lasted."""
    return min(row["curve"][-1][0] for row in rows)


def loss_at(curve: list[list[float]], seconds: float) -> float:
    """The validation loss of a curve after `seconds`, interpolated on a line between two evaluations."""
    return float(np.interp(seconds, *zip(*curve)))
