"""The ladder of PyTorch's article: the same training, rung by rung, each rung changing one thing.

"Accelerating Large Language Models with Accelerated Transformers" climbs from hand-written attention to flash on a
padded vocabulary; this project adds the rungs after that. Each rung is train.py in a process of its own. The rungs are
climbed in rounds, and per cent are taken within a round: a machine that slows down does so for all rungs.
"""

import dataclasses
import itertools
import math
import pathlib
import statistics
from collections.abc import Iterator

import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.bench import check, child, drawing, options, report, rounds
from fusedgpt.bench.disturbance import comparable, speedup
from fusedgpt.bench.proof import prove_kernel
from fusedgpt.bench.rows import slug, trace_path
from fusedgpt.machine.device import resolve_dtype

BASELINE, PADDED = "manual", "flash + padded vocabulary"
# ms per batch on 8 A100, as the article gives them
ARTICLE = {"manual": 143, "math": 134, "efficient": 119, "flash": 113, PADDED: 87}
ARTICLE_FASTER = {"math": 6.71, "efficient": 20.16, "flash": 26.54, PADDED: 64.37}  # per cent, as it prints them

NEWER = ("cudnn", "flash3", "flash4", "flex", "auto")  # kernels that the article does not have

# what each rung sets; dtype and compile come from the settings if a rung does not set them
RUNGS = {
    "manual, float32, eager": {"attention": "manual", "vocab_multiple": 1, "dtype": "float32", "compile": False},
    "manual, eager": {"attention": "manual", "vocab_multiple": 1, "compile": False},
    **{name: {"attention": name, "vocab_multiple": 1} for name in ("manual", "math", "efficient", "flash", "masked")},
    PADDED: {"attention": "flash", "vocab_multiple": 64},
    **{f"{name} + padded vocabulary": {"attention": name, "vocab_multiple": 64} for name in NEWER},
    f"{PADDED}, eager": {"attention": "flash", "vocab_multiple": 64, "compile": False},
}
CLIMB = [BASELINE, "math", "efficient", "flash", PADDED, "auto + padded vocabulary"]  # each with the one before
AGAIN = "manual, again"  # the baseline's second measurement, in rows from before there were rounds
GROUP = ("round",)

TRAINS = True
UNUSED = {
    **child.UNUSED,
    "attention": options.EACH_ROW_NAMES_IT,
    "vocab_multiple": "each rung of the ladder sets it",
    "eval_iters": "a rung only makes --steps steps",
}


@dataclasses.dataclass
class Settings(options.Trained):
    rounds: int = 3  # times that each rung is measured


def defaults(gpu: bool) -> dict:
    """GPT-2 124M at 12 x 1024 on a GPU; four small layers on a CPU."""
    return child.DEFAULTS | {"compile": True} | ({"steps": 55} if gpu else child.ON_A_CPU)


def plan(s: Settings, device: torch.device) -> list[dict]:
    """The rungs, from the bottom up, round after round; a kernel of the user's own is the last."""
    names = (*RUNGS, *options.own_kernel(s.attention))
    if s.rounds == 1:  # as in rows from before there were rounds
        return [{"rung": name} for name in names]
    return [{"rung": name, "round": n} for n, name in itertools.product(range(1, s.rounds + 1), names)]


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """A rung's row: first its kernel's parity with float64, then the steps of train.py."""
    own = {"attention": spec["rung"], "vocab_multiple": 64}
    s = dataclasses.replace(s, **RUNGS.get(spec["rung"], own))
    case = Case.of_model(s, s.batch_size, device, resolve_dtype(s.dtype, device), dropout=s.dropout)
    proven = prove_kernel(s.attention, case) if s.attention != "auto" else {}
    out_dir = folder / "runs" / slug(spec["rung"])
    record, metrics = child.run(child.settings(s, Settings), out_dir, trace=trace_path(folder, spec))
    if record["attention_trials"]:  # auto compared the fastest with float64, and the next if it failed
        proven = {"errors": record["attention_trials"][record["attention"]]["errors"], "parity": "passed, by auto"}
    return proven | child.measured(record, metrics)


def pooled(rows: list[dict]) -> dict[str, dict]:
    """{rung: one row for its rounds}, in the order of RUNGS, a user's own kernel last (rounds.pooled).

    Rows from before there were rounds have the baseline twice; each rung is then compared with both.
    """
    found = rounds.pooled(rows, by="rung")
    again = found.pop(AGAIN, None)
    if comparable(again) and comparable(found.get(BASELINE)):
        found[BASELINE]["again_ms"] = again["median_ms"]
    own = [name for name in found if name not in RUNGS]
    return {name: found[name] for name in (*RUNGS, *own) if name in found}


def faster_than(base: dict | None, row: dict) -> tuple[float, float, float] | None:
    """The per cent by which a pooled row is faster than another, with the least and greatest of its rounds; or None.

    As in the article, they are `baseline / rung - 1`.
    """
    found = speedup(row, base)
    if row is base or found is None:
        return None
    return tuple(100 * (times - 1) for times in found)


def table(rows: list[dict]) -> list[str]:
    """A line for each rung, with the article's figures beside ours, and notes."""
    rungs = pooled(rows)
    names = ["rung", "ms per step, median (p10-p90)", "median of each round"]
    names += ["faster than manual, mean (range) of the rounds", "the article, 8 x A100, 12 x 1024 tokens"]
    names += ["tokens/s", "MFU", "peak memory", "final loss", "kernel seen forward / backward (as it ran)"]
    lines = report.markdown(names, [_cells(row, rungs) for row in rungs.values()])
    return [*lines, "", *(f"- {note}" for note in [*notes(rungs), *rounds.calls(rows)])]


def _cells(row, rungs):
    told, more = ARTICLE.get(row["rung"]), ARTICLE_FASTER.get(row["rung"])
    theirs = (f"{told} ms" if told else "") + (f", {more} %" if more else "")
    if row["status"] != "measured":
        return [row["rung"], f"{row['status']}: {row['reason']}", "", "", theirs, *[""] * 5]
    base, ran = rungs.get(BASELINE), row["ran"]
    found = faster_than(base, row)
    ours = f"{found[0]:+.1f} % ({found[1]:+.1f} to {found[2]:+.1f})" if found else ""
    measured = [each for each in rungs.values() if each["status"] == "measured"]
    mfu = row["mfu"] * row["peak_flops"] / report.best_peaks(measured)[ran["dtype"]]
    share = f"{100 * mfu:.1f} %" if comparable(row) else ""
    how = f"{ran['attention']}, {ran['dtype']}, {report.compiled(row)}, {ran['padded_vocab_size']}"
    cells = [row["rung"], report.spread(row), rounds.medians(row), ours, theirs, f"{row['tokens_per_s']:,.0f}", share]
    memory = f"{row['peak_memory'] / report.GIB:.2f} GiB"
    return [*cells, memory, f"{row['final_loss']:.4f}", f"{report.kernel(row)} ({how})"]


def notes(rungs: dict[str, dict]) -> list[str]:
    """What the rungs show together: whether losses agree, parity, conventions, noise. rungs: from `pooled`."""
    measured = {name: row for name, row in rungs.items() if row["status"] == "measured"}
    base = measured.get(BASELINE)
    if not base:
        return []
    losses = [row["final_loss"] for row in measured.values()]
    difference = max(losses) - min(losses)
    agree = all(map(math.isfinite, losses)) and difference < 0.01 * min(losses)
    worst = ", ".join(f"{name}: {parity.largest(row['errors']):.0e}" for name, row in measured.items())
    found = [
        f"Losses after {base['steps']} steps lie within {difference:.4f} of each other:"
        f" {'they agree' if agree else '**they DISAGREE**'}.",
        "Parity with float64 was passed before each time; largest errors, as shares of a row's largest number:"
        f" {worst}.",
        "Per cent are `baseline / rung - 1`, as the article counts, taken within each round.",
        report.mfu_convention(measured.values()),
    ]
    times = speedup(measured.get(PADDED), measured.get("manual, float32, eager"))
    if times:
        found.append(f"`{PADDED}` is {times[0]:.2f} times as fast as `manual, float32, eager`.")
    return found + _not_told_apart(measured)


def _not_told_apart(measured):
    """A sentence: how well ratios repeat, and which neighbouring rungs of the climb lie closer together than that."""
    found = list(filter(None, (faster_than(measured[BASELINE], row) for row in measured.values())))
    if not found or (len(measured[BASELINE]["rounds"]) < 2 and "again_ms" not in measured[BASELINE]):
        return []
    noise = max((100 + high) / (100 + low) - 1 for _, low, high in found)
    climb = [measured[name] for name in CLIMB if name in measured]
    close = []
    for lower, upper in itertools.pairwise(climb):
        times = speedup(upper, lower)
        if times and (abs(times[0] - 1) <= noise or times[1] <= 1 <= times[2]):
            close.append(f"`{lower['rung']}` and `{upper['rung']}` ({100 * (times[0] - 1):+.1f} %)")
    told = f"Not told apart: {'; '.join(close)}." if close else "All steps of the climb are larger than that."
    return [f"A rung's speed over the baseline differs by up to {100 * noise:.1f} % between measurements. {told}"]


def claims(rows: list[dict]) -> list[check.Claim]:
    """How many times as fast as the baseline each rung is, whether its last loss is the same, and what is refused."""
    rungs = pooled(rows)
    base, found = rungs.get(BASELINE), []
    for name, row in rungs.items():
        both = [each for rung in (BASELINE, name) for each in rows if each["rung"] == rung]
        for claim in check.ratio(f"{name}: speed over {BASELINE}", row, base):
            found.append(dataclasses.replace(claim, rows=list(filter(comparable, both))))
        for claim in check.same_loss(f"{name}: last loss beside {BASELINE}", row, base):
            found.append(dataclasses.replace(claim, rows=[both[0], both[-1]]))
    return found + check.refusals(rungs.values())


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """ladder.png: a bar for each rung, cut at twice the median bar; if it was not measured, the reason instead."""
    rungs = pooled(rows)
    measured = [row for row in rungs.values() if row["status"] == "measured"]
    if not measured:
        return
    figure, axes = drawing.new(0.31 * len(rungs) + 0.6)
    limit = 2 * statistics.median(row["median_ms"] for row in measured)
    base = rungs.get(BASELINE)
    said = [_said(row, base) for row in rungs.values()]
    names, colors = map(_label, rungs.values()), ["#0072b2"] * len(rungs)
    drawing.times(axes, list(names), list(rungs.values()), said, colors, limit)
    if comparable(base):
        axes.axvline(base["median_ms"], color="0.2", linewidth=0.8, linestyle="--", zorder=0)
    axes.grid(visible=False, axis="y")
    repeated = base and (len(base.get("rounds", ())) > 1 or "again_ms" in base)
    spread = "mean and range of the measurements" if repeated else "median, and p10 to p90 of the steps"
    subject = f"Training {child.subject(s)}; in brackets how much faster than {BASELINE} (dashed): {spread}"
    yield "ladder", "A training step, rung by rung: each changes one thing", subject, figure


def _label(row):
    """A rung's name, and what it ran as, if its name does not say that."""
    if "ran" not in row:
        return row["rung"]
    more = [word for word in (row["ran"]["dtype"], report.compiled(row)) if word not in row["rung"]]
    return f"{row['rung']}\n({', '.join(more)})" if more else row["rung"]


def _said(row, base):
    """The text behind a rung's bar."""
    if row["status"] != "measured":
        return f"{row['status']}: {row['reason']}"
    found = faster_than(base, row)
    if not found:
        return f"{row['median_ms']:.4g}"
    return f"{row['median_ms']:.4g} ({found[0]:+.0f} %: {found[1]:+.0f} to {found[2]:+.0f})"
