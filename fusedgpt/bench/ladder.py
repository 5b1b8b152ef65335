"""The ladder of PyTorch's article: the same training, rung by rung, each rung changing one thing.

"Accelerating Large Language Models with Accelerated Transformers" climbs from hand-written attention to flash on a
padded vocabulary; the rungs after that are this project's. Each rung is train.py in a process of its own.
"""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Iterator

import torch

from fusedgpt.attention import ATTENTION
from fusedgpt.bench import check, drawing, report, settings, training
from fusedgpt.bench.disturbance import comparable
from fusedgpt.bench.proof import prove_kernel
from fusedgpt.bench.rows import slug, trace_path
from fusedgpt.case import Case
from fusedgpt.device import resolve_dtype

BASELINE, PADDED = "manual", "flash + padded vocabulary"
# ms per batch on 8 A100, as the article gives them
ARTICLE = {"manual": 143, "math": 134, "efficient": 119, "flash": 113, PADDED: 87}
ARTICLE_FASTER = {"math": 6.71, "efficient": 20.16, "flash": 26.54, PADDED: 64.37}  # per cent, as it prints them

# what each rung sets; if it does not say dtype or compile, those are the settings'
RUNGS = {
    "manual, float32, eager": {"attention": "manual", "vocab_multiple": 1, "dtype": "float32", "compile": False},
    "manual, eager": {"attention": "manual", "vocab_multiple": 1, "compile": False},
    **{name: {"attention": name, "vocab_multiple": 1} for name in ("manual", "math", "efficient", "flash", "masked")},
    PADDED: {"attention": "flash", "vocab_multiple": 64},
    **{
        f"{n} + padded vocabulary": {"attention": n, "vocab_multiple": 64}
        for n in ("cudnn", "flash3", "flash4", "flex", "auto")
    },
    f"{PADDED}, eager": {"attention": "flash", "vocab_multiple": 64, "compile": False},
    "manual, again": {"attention": "manual", "vocab_multiple": 1},  # shows how much the machine itself drifts
}

TRAINS = True
UNUSED = {
    **training.UNUSED,
    **dict.fromkeys(("attention", "vocab_multiple"), "each rung of the ladder sets it"),
    "eval_iters": "a rung only makes --steps steps",
}


@dataclasses.dataclass
class Settings(settings.Trained):
    pass


def defaults(gpu: bool) -> dict:
    """GPT-2 124M at 12 x 1024 on a GPU; four small layers on a CPU."""
    return training.DEFAULTS | {"compile": True} | ({"steps": 105} if gpu else training.ON_A_CPU)


def plan(s: Settings, device: torch.device) -> list[dict]:
    """The rungs, from the ground up."""
    return [{"rung": name} for name in RUNGS]


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """A rung's row: first parity of its kernel with float64, then the steps of train.py."""
    s = dataclasses.replace(s, **RUNGS[spec["rung"]])
    case = Case.of_model(s, s.batch_size, device, resolve_dtype(s.dtype, device), dropout=s.dropout)
    proven = prove_kernel(s.attention, case) if s.attention in ATTENTION else {}
    out_dir = folder / "runs" / slug(spec["rung"])
    record, metrics = training.run(training.settings(s, Settings), out_dir, trace=trace_path(folder, spec))
    if record["attention_trials"]:  # auto compared every kernel that it tried
        proven = {"errors": record["attention_trials"][record["attention"]]["errors"], "parity": "passed, by auto"}
    return proven | training.measured(record, metrics)


def faster(baseline_ms: float, ms: float) -> float:
    """By how many per cent, as the article counts: `baseline / rung - 1`."""
    return 100 * (baseline_ms / ms - 1)


def table(rows: list[dict]) -> list[str]:
    """A line per rung, with the article's figures beside ours, and notes."""
    measured = {row["rung"]: row for row in rows if row["status"] == "measured"}
    names = [
        "rung",
        "ms per step, median (p10-p90)",
        "faster than manual",
        "the article, 8 x A100, 12 x 1024 tokens",
        "tokens/s",
        "MFU",
    ]
    names += ["peak memory", "final loss", "kernel seen forward / backward (as it ran)"]
    lines = report.markdown(names, [_cells(row, measured) for row in rows])
    return [*lines, "", *(f"- {note}" for note in notes(measured))]


def _cells(row, measured):
    told, more = ARTICLE.get(row["rung"]), ARTICLE_FASTER.get(row["rung"])
    theirs = (f"{told} ms" if told else "") + (f", {more} %" if more else "")
    if row["status"] != "measured":
        return [row["rung"], f"{row['status']}: {row['reason']}", "", theirs, *[""] * 5]
    base, ran = measured.get(BASELINE), row["ran"]
    ours = f"{faster(base['median_ms'], row['median_ms']):+.2f} %" if comparable(base) and comparable(row) else ""
    mfu = row["mfu"] * row["peak_flops"] / report.best_peaks(measured.values())[ran["dtype"]]
    share = f"{100 * mfu:.1f} %" if comparable(row) else ""
    how = f"{ran['attention']}, {ran['dtype']}, {'compiled' if ran['compile'] else 'eager'}, {ran['padded_vocab_size']}"
    cells = [row["rung"], report.spread(row), ours, theirs, f"{row['tokens_per_s']:,.0f}", share]
    memory = f"{row['peak_memory'] / report.GIB:.2f} GiB"
    return [*cells, memory, f"{row['final_loss']:.4f}", f"{report.kernel(row)} ({how})"]


def notes(measured: dict[str, dict]) -> list[str]:
    """What the rungs show together: whether their losses agree, parity, conventions, drift. `measured`: by rung."""
    base = measured.get(BASELINE)
    if not base:
        return []
    losses = [row["final_loss"] for row in measured.values()]
    difference = max(losses) - min(losses)
    agree = all(map(math.isfinite, losses)) and difference < 0.01 * min(losses)
    worst = ", ".join(f"{name}: {max(row['errors'].values()):.0e}" for name, row in measured.items())
    found = [
        f"Losses after {base['steps']} steps lie within {difference:.4f} of each other:"
        f" {'they agree' if agree else '**they DISAGREE**'}.",
        f"Parity with float64 was passed before each time; largest errors, as shares of a row's"
        f" largest number: {worst}.",
        "Per cent are `baseline / rung - 1`, as the article counts.",
        report.mfu_convention(measured.values()),
    ]
    slowest, best = measured.get("manual, float32, eager"), measured.get(PADDED)
    if comparable(slowest) and comparable(best):
        times = slowest["median_ms"] / best["median_ms"]
        found.append(f"`{PADDED}` is {times:.2f} times as fast as `manual, float32, eager`.")
    again = measured.get("manual, again")
    if comparable(again) and comparable(base):
        drift = again["median_ms"] / base["median_ms"] - 1
        more = f"{abs(drift):.1%} {'more' if drift > 0 else 'less'}"
        found.append(f"The baseline, measured again at the end, took {more} time: smaller differences are noise.")
    return found


def claims(rows: list[dict]) -> list[check.Claim]:
    """How many times as fast as the baseline each rung is, whether it ends at the same loss, and what is refused."""
    base = next((row for row in rows if row["rung"] == BASELINE), None)
    found = []
    for row in rows:
        if row["rung"] != "manual, again":  # it shows the drift of a machine
            found += check.ratio(f"{row['rung']}: speed over {BASELINE}", row, base)
        found += check.same_loss(f"{row['rung']}: last loss beside {BASELINE}", row, base)
    return found + check.refusals(rows)


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """ladder.png: a bar per rung, cut if it is more than twice as long as most; the reason in place of one refused."""
    measured = {row["rung"]: row for row in rows if row["status"] == "measured"}
    if not measured:
        return
    figure, axes = drawing.new(0.31 * len(rows) + 0.6)
    limit = 2 * statistics.median(row["median_ms"] for row in measured.values())
    said = [_said(row, measured.get(BASELINE)) for row in rows]
    drawing.times(axes, [_label(row) for row in rows], rows, said, ["#0072b2"] * len(rows), limit)
    if comparable(measured.get(BASELINE)):
        axes.axvline(measured[BASELINE]["median_ms"], color="0.2", linewidth=0.8, linestyle="--", zorder=0)
    axes.grid(visible=False, axis="y")
    subject = f"Training {training.subject(s)}; in brackets how much faster than {BASELINE} (dashed)"
    yield "ladder", "A training step, rung by rung: each changes one thing", subject, figure


def _label(row):
    """A rung, and what it ran as beyond its name."""
    if "ran" not in row:
        return row["rung"]
    as_it_ran = [row["ran"]["dtype"], "compiled" if row["ran"]["compile"] else "eager"]
    more = [word for word in as_it_ran if word not in row["rung"]]
    return f"{row['rung']}\n({', '.join(more)})" if more else row["rung"]


def _said(row, base):
    """What stands behind a rung's bar."""
    if row["status"] != "measured":
        return f"{row['status']}: {row['reason']}"
    if not (comparable(row) and comparable(base)) or row is base:
        return f"{row['median_ms']:.4g}"
    return f"{row['median_ms']:.4g} ({faster(base['median_ms'], row['median_ms']):+.1f} %)"
