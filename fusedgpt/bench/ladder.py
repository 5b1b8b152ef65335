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
from fusedgpt.errors import UserError
from fusedgpt.machine.device import resolve_dtype, tf32

BASELINE, PADDED = "manual", "flash + padded vocabulary"
EFFICIENT_PADDED = "efficient + padded vocabulary"  # if flash is refused (NVIDIA below compute capability 8.0)
FLOAT32, TF32 = "manual, float32, eager", "manual, TF32, eager"
UNPADDED, GRAPHED = "flash, no padding", f"{PADDED}, CUDA graphs"
# ms per batch on 8 A100, as the article gives them
ARTICLE = {"manual": 143, "math": 134, "efficient": 119, "flash": 113, PADDED: 87}
ARTICLE_FASTER = {"math": 6.71, "efficient": 20.16, "flash": 26.54, PADDED: 64.37}  # per cent, as it prints them

NEWER = ("cudnn", "flash3", "flash4", "flex", "auto")  # kernels that are not in the article

# what each rung sets; otherwise dtype and compile come from the settings
RUNGS = {
    FLOAT32: {"attention": "manual", "vocab_multiple": 1, "dtype": "float32", "compile": False},
    TF32: {"attention": "manual", "vocab_multiple": 1, "dtype": "float32", "compile": False},
    "manual, eager": {"attention": "manual", "vocab_multiple": 1, "compile": False},
    **{name: {"attention": name, "vocab_multiple": 1} for name in ("manual", "math", "efficient", "flash", "masked")},
    UNPADDED: {"attention": "flash", "vocab_multiple": 1},
    PADDED: {"attention": "flash", "vocab_multiple": 64},
    **{f"{name} + padded vocabulary": {"attention": name, "vocab_multiple": 64} for name in ("efficient", *NEWER)},
    GRAPHED: {"attention": "flash", "vocab_multiple": 64},
    f"{PADDED}, eager": {"attention": "flash", "vocab_multiple": 64, "compile": False},
}
# PyTorch's environment variables for every rung: no TF32, no CUDA graphs, and a compiler that may pad. VARIABLES has
# the changes of some rungs. In a product with 50257 ids the compiler may pad the ids (SHAPE), and the memory between
# rows of logits (COMPREHENSIVE)
USUAL = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "TORCHINDUCTOR_CUDAGRAPHS": "0"}
USUAL |= {"TORCHINDUCTOR_SHAPE_PADDING": "1", "TORCHINDUCTOR_COMPREHENSIVE_PADDING": "1"}
VARIABLES = {
    TF32: {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "HIPBLASLT_ALLOW_TF32": "1"},  # the second is ROCm's
    UNPADDED: {"TORCHINDUCTOR_SHAPE_PADDING": "0", "TORCHINDUCTOR_COMPREHENSIVE_PADDING": "0"},
    GRAPHED: {"TORCHINDUCTOR_CUDAGRAPHS": "1"},
}
# the report compares each of these rungs with the one before
CLIMB = [BASELINE, "math", "efficient", "flash", PADDED, "auto + padded vocabulary"]
# what the report adds to the sentence with a ratio over this rung
WHAT_IT_IS = {
    TF32: ", which multiplies as nanoGPT does in float32",
    UNPADDED: ", which is what our padding gains if the compiler pads nothing",
}
AGAIN = "manual, again"  # the baseline's second measurement, in rows of versions without rounds
GROUP = ("round",)

TRAINS = True
UNUSED = {
    **child.UNUSED,
    "attention": options.EACH_ROW_NAMES_IT,
    "vocab_multiple": "each rung of the ladder sets it",
    "eval_iters": "a rung makes --steps steps and no evaluation",
}


@dataclasses.dataclass
class Settings(options.Trained):
    rounds: int = 3  # times that each rung is measured


def defaults(gpu: bool) -> dict:
    """GPT-2 124M at 12 x 1024 on a GPU; four small layers on a CPU."""
    return child.DEFAULTS | {"compile": True} | ({"steps": 55} if gpu else child.ON_A_CPU)


def plan(s: Settings, device: torch.device) -> list[dict]:
    """The rungs from the bottom up, round after round; a kernel of the user's own is last."""
    specs = [{"rung": name, **options.family(vars(s))} for name in (*RUNGS, *options.own_kernel(s.attention))]
    if s.rounds == 1:  # as in rows from before there were rounds
        return specs
    return [{**spec, "round": n} for n, spec in itertools.product(range(1, s.rounds + 1), specs)]


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """A rung's row: the parity of its kernel with float64, then the steps of train.py."""
    rung = spec["rung"]
    s = dataclasses.replace(s, **RUNGS.get(rung, {"attention": rung, "vocab_multiple": 64}))
    if reason := _refusal(rung, s, device):
        raise UserError(reason)
    cases = Case.of_layers(s, s.batch_size, device, resolve_dtype(s.dtype, device), dropout=s.dropout)
    with tf32(allowed=rung == TF32):
        exact_as = torch.float16 if rung == TF32 else None  # TF32 has as many bits
        proven = prove_kernel(s.attention, *cases, exact_as=exact_as) if s.attention != "auto" else {}
    out_dir, trace, variables = folder / "runs" / slug(rung), trace_path(folder, spec), USUAL | VARIABLES.get(rung, {})
    record, metrics = child.run(child.settings(s, Settings), out_dir, trace=trace, variables=variables)
    if record["tf32"] != (rung == TF32):
        raise UserError(f"TF32 was {'on' if record['tf32'] else 'off'} in this run, against the setting of the rung")
    if record["cuda_graphs"] != (rung == GRAPHED):
        raise UserError(f"PyTorch {'replayed' if record['cuda_graphs'] else 'made no'} CUDA graphs in this run")
    if record["attention_trials"]:  # auto took the fastest kernel that passed parity
        proven = {"errors": record["attention_trials"][record["attention"]]["errors"], "parity": "passed, by auto"}
    return proven | child.measured(record, metrics)


def _refusal(rung, s, device):
    """Why a rung with the settings `s` would show nothing here, or None if it would."""
    if rung == TF32 and not (device.type == "cuda" and torch.cuda.is_tf32_supported()):
        return "only GPUs multiply in TF32: NVIDIA's from compute capability 8.0 on, AMD's from gfx94 on"
    if rung == UNPADDED and not (device.type == "cuda" and s.compile):
        return "only a compiled model on a GPU is padded by PyTorch"
    if rung == GRAPHED and not (device.type == "cuda" and s.compile):
        return "only a compiled model on a GPU is replayed as CUDA graphs"
    return None


def pooled(rows: list[dict]) -> dict[str, dict]:
    """{rung: one row for all its rounds}, in the order of RUNGS, with a user's own kernel last (rounds.pooled).

    Rows from before there were rounds have the baseline twice; each rung is then compared with both.
    """
    found = rounds.pooled(rows, by="rung")
    again = found.pop(AGAIN, None)
    if comparable(again) and comparable(found.get(BASELINE)):
        found[BASELINE]["again_ms"] = again["median_ms"]
    own = [name for name in found if name not in RUNGS]
    return {name: found[name] for name in (*RUNGS, *own) if name in found}


def faster_than(base: dict | None, row: dict) -> tuple[float, float, float] | None:
    """By how many per cent a pooled row is faster than `base`: the mean, least and greatest of its rounds; or None.

    They are counted as in the article: `baseline / rung - 1`.
    """
    found = speedup(row, base)
    if row is base or found is None:
        return None
    return tuple(100 * (times - 1) for times in found)


def table(rows: list[dict]) -> list[str]:
    """A line for each rung that was measured or that the article has, with the article's figures, and notes."""
    rungs = pooled(rows)
    shown = [row for row in rungs.values() if row["status"] != "refused" or row["rung"] in ARTICLE]
    names = ["rung", "ms per step, median (p10-p90)", "median of each round"]
    names += ["beside manual, mean (range) of the rounds", "the article, 8 x A100, 12 x 1024 tokens"]
    names += ["tokens/s", "MFU", "peak memory", "final loss", "kernel seen forward / backward (as it ran)"]
    lines = report.markdown(names, [_cells(row, rungs) for row in shown])
    last = rounds.calls(rows) or _not_told_apart(rungs)  # ratios across calls may differ by more than rounds show
    return [*lines, "", *(f"- {note}" for note in [*notes(rungs), *last])]


def _cells(row, rungs):
    told, more = ARTICLE.get(row["rung"]), ARTICLE_FASTER.get(row["rung"])
    theirs = (f"{told} ms" if told else "") + (f", {more} %" if more else "")
    if row["status"] != "measured":
        return [row["rung"], f"{row['status']}: {row['reason']}", "", "", theirs, *[""] * 5]
    base, ran = rungs.get(BASELINE), row["ran"]
    ours, found = "", faster_than(base, row)
    if found and found[0] < 0:
        ours = "{:.2f} times as long ({:.2f} to {:.2f})".format(*speedup(base, row))
    elif found:
        ours = f"{found[0]:+.1f} % ({found[1]:+.1f} to {found[2]:+.1f})"
    measured = [each for each in rungs.values() if each["status"] == "measured"]
    mfu = row["mfu"] * row["peak_flops"] / report.best_peaks(measured)[report.precision(row)]
    share = f"{100 * mfu:.1f} %" if comparable(row) else ""
    how = f"{ran['attention']}, {report.precision(row)}, {report.compiled(row)}, {_ids(row)}"
    cells = [row["rung"], report.spread(row), rounds.medians(row), ours, theirs, f"{row['tokens_per_s']:,.0f}", share]
    memory = f"{row['peak_memory'] / report.GIB:.2f} GiB"
    return [*cells, memory, f"{row['final_loss']:.4f}", f"{report.kernel(row)} ({how})"]


def _ids(row):
    """The number of ids in a rung's logits, and to what the compiler padded them, as the profiler saw it."""
    ids = row["ran"]["padded_vocab_size"]
    more = {n for matrix in row["kernel"].get("logits", []) for n in matrix if n > ids}  # earlier rows lack it
    return f"{ids}, padded by the compiler to {' and '.join(map(str, sorted(more)))}" if more else str(ids)


def _quoted(rungs):
    """(rung, base) of the ratios that are quoted besides those over the baseline, if both are comparable.

    If flash is refused, efficient on a padded vocabulary stands in its place.
    """
    padded = rungs.get(PADDED)
    top = padded if comparable(padded) else rungs.get(EFFICIENT_PADDED)
    pairs = ((top, rungs.get(FLOAT32)), (top, rungs.get(TF32)), (padded, rungs.get(UNPADDED)))
    return [pair for pair in pairs if all(map(comparable, pair))]


def notes(rungs: dict[str, dict]) -> list[str]:
    """What the rungs show together: agreement of losses, parity, conventions. rungs: from `pooled`."""
    measured = {name: row for name, row in rungs.items() if row["status"] == "measured"}
    base = measured.get(BASELINE)
    if not base:
        return []
    losses = [row["final_loss"] for row in measured.values()]
    difference = max(losses) - min(losses)
    agree = all(map(math.isfinite, losses)) and difference < 0.01 * min(losses)
    worst = ", ".join(f"{name}: {parity.largest(row['errors']):.0e}" for name, row in measured.items())
    found = (
        []
        if len(losses) < 2
        else [
            f"Losses after {base['steps']} steps lie within {difference:.4f} of each other:"
            f" {'they agree' if agree else '**they DISAGREE**'}."
        ]
    )
    found += [
        "Parity with float64 was passed before each time; largest errors, as shares of a row's largest number:"
        f" {worst}.",
        "Per cent are `baseline / rung - 1`, as the article counts, taken within each round.",
        report.mfu_convention(measured.values()),
    ]
    for row, other in _quoted(measured):
        what = WHAT_IT_IS.get(other["rung"], "")
        found.append(f"`{row['rung']}` is {speedup(row, other)[0]:.2f} times as fast as `{other['rung']}`{what}.")
    return found


def _noise(rungs):
    """The largest share by which a rung's speed over the baseline differs between rounds; 0 if it cannot be known."""
    base = rungs.get(BASELINE)
    if not comparable(base) or (len(base["rounds"]) < 2 and "again_ms" not in base):
        return 0.0
    found = [speedup(row, base) for row in rungs.values() if row is not base]
    return max((high / low - 1 for _, low, high in filter(None, found)), default=0.0)


def finding(rungs: dict[str, dict]) -> str:
    """What flash gains over manual and with padding, and what all rungs gain over float32; or why that is not known.

    If flash has no ratio, efficient stands in its place, or else the fastest rung. rungs: from `pooled`.
    """
    base, noise = rungs.get(BASELINE), _noise(rungs)
    said = {name: report.beside(row, base, noise) for name, row in rungs.items() if row is not base}
    said = {name: each for name, each in said.items() if each is not None}
    if not said:
        culprit = "flash" if comparable(base) else BASELINE
        return f"No ratio: {culprit} is {report.why_not(rungs.get(culprit))}"
    fastest = min(said, key=lambda name: rungs[name]["median_ms"])
    name = next((name for name in ("flash", "efficient") if name in said), fastest)
    padded = f"{name} + padded vocabulary"
    text = f"{name} {report.clause([(rungs[name], base)], 'hand-written attention', noise)}"
    if padded in said and said[padded].word == said[name].word:
        text += ", padding included" + ("" if said[padded].word == "same" else f" {said[padded].times:.3g}")
    elif padded in said:
        text += f"; padding included, it {report.clause([(rungs[padded], base)], 'that', noise)}"
    top = next((top for top, other in _quoted(rungs) if other["rung"] == FLOAT32), None)
    whole = report.beside(top, rungs.get(FLOAT32), noise)
    return f"{text}; {top['rung']} is {whole} as {FLOAT32}" if whole and whole.word != "same" else text


def _not_told_apart(rungs):
    """A sentence that says how well ratios repeat, and which neighbours in the climb lie closer together than that."""
    noise, measured = _noise(rungs), {name: row for name, row in rungs.items() if row["status"] == "measured"}
    if not noise:
        return []
    padded = PADDED if PADDED in measured else EFFICIENT_PADDED
    names = [padded if name == PADDED else name for name in CLIMB]
    climb = [measured[name] for name in names if name in measured]
    close = []
    for lower, upper in itertools.pairwise(climb):
        found = report.beside(upper, lower, noise)
        if found and found.word == "same":
            close.append(f"`{lower['rung']}` and `{upper['rung']}` ({report.ratio(upper, lower)})")
    told = f"Not told apart: {'; '.join(close)}." if close else "All steps of the climb are larger than that."
    return [f"A rung's speed over the baseline differs by up to {100 * noise:.1f} % between measurements. {told}"]


def claims(rows: list[dict]) -> list[check.Claim]:
    """For each rung, its speed over the baseline and whether its last loss is the same; refusals."""
    rungs = pooled(rows)
    base, found = rungs.get(BASELINE), []
    for name, row in rungs.items():
        both = [each for rung in (BASELINE, name) for each in rows if each["rung"] == rung]
        found += _ratio(row, base, rows)
        for claim in check.same_loss(f"{name}: last loss beside {BASELINE}", row, base):
            found.append(dataclasses.replace(claim, rows=[both[0], both[-1]]))
    for row, other in _quoted(rungs):
        found += _ratio(row, other, rows)
    return found + check.refusals(rungs.values())


def _ratio(row, base, rows):
    """A claim about how many times as fast as `base` a pooled row is, on all rows of both; none without a ratio."""
    if base is None:
        return []
    both = [each for rung in (base["rung"], row["rung"]) for each in rows if each["rung"] == rung]
    claims = check.ratio(f"{row['rung']}: speed over {base['rung']}", row, base)
    return [dataclasses.replace(claim, rows=list(filter(comparable, both))) for claim in claims]


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """ladder.png: a bar for each rung, cut at twice the median bar; refused rungs are in the subject."""
    rungs = pooled(rows)
    base, noise = rungs.get(BASELINE), _noise(rungs)
    measured = {_label(row, base): row for row in rungs.values() if row["status"] == "measured"}
    if not measured:
        return
    figure, axes = drawing.new(0.36 * len(measured) + 0.6)
    limit = 2 * statistics.median(row["median_ms"] for row in measured.values())
    said = [report.time(row, base, noise) for row in measured.values()]
    colors = [drawing.color(row["ran"]["attention"]) for row in measured.values()]
    drawing.times(axes, measured, said, colors, limit)
    if comparable(base):
        axes.axvline(base["median_ms"], color="0.2", linewidth=0.8, linestyle="--", zorder=0)
    subject = f"Training {child.subject(s)}"
    if "ran" in (base or {}):
        subject += (
            f", {report.precision(base)}, {report.compiled(base)} unless a rung says otherwise; dashed: {BASELINE}"
        )
    repeat = [f"Ratios repeat within {100 * noise:.1f} %; a smaller one is no difference."] if noise else []
    subject = " ".join([f"{subject}.", *(rounds.calls(rows) or repeat)])
    kernels = [row | {"rung": row["rung"].removesuffix(" + padded vocabulary")} for row in rungs.values()]
    yield "ladder", finding(rungs), subject + drawing.left_out(kernels), figure


def _label(row, base):
    """A rung's name, with what auto took, and with its dtype and whether it was compiled if `base` ran otherwise."""
    usual = (report.precision(base), report.compiled(base)) if "ran" in (base or {}) else ()
    more = [
        word for word in (report.precision(row), report.compiled(row)) if word not in (*usual, *row["rung"].split(", "))
    ]
    more += [f"took {row['ran']['attention']}"] * row["rung"].startswith("auto")
    return f"{row['rung']} ({', '.join(more)})" if more else row["rung"]
