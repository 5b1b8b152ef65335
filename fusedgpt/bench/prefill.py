"""Time to the first token at batch 1: eager attention against the flash kernel, and transformers against our own GPT.

All are on the same weights. The timed call is `generate` of one token, as in AMD's article "Accelerating Large Language
Models with Flash Attention on AMD GPUs" (4 warm-up runs, 256 timed ones). The models are in causal_models.py.

B = 1, T prompt tokens, V vocabulary.
"""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterator
from typing import Literal

import torch

from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.bench import causal_models, check, drawing, options, report
from fusedgpt.bench.causal_models import OURS
from fusedgpt.bench.disturbance import comparable, speedup
from fusedgpt.bench.proof import ParityError, counting_faults, refusals, verdict
from fusedgpt.bench.rows import trace_path
from fusedgpt.errors import UserError, out_of_memory
from fusedgpt.machine import memory, timing
from fusedgpt.machine.device import dtype_name, resolve_dtype
from fusedgpt.machine.profiler import busy_ms, profile

TRAINS = False
UNUSED = {}
GROUP = ("model", "T")
PEAK = "peak memory"  # a column for rows of GPUs
# largest difference from the last logits of eager attention, as a share of the largest logit
ALLOWED = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclasses.dataclass
class Settings(options.Timed):
    lengths: str = "512,1024,2048"  # numbers of prompt tokens, as first-last-step or one by one
    # mistral-7b, llama-3-8b, phi-2, gpt2, gpt2-medium, gpt2-large, gpt2-xl; mistral-small, llama-small, phi-small; or
    # local folders and names of the Hugging Face hub
    models: str = "mistral-7b,llama-3-8b,phi-2,gpt2-xl"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of the weights and of all products
    seed: int = 1337  # seed of the random weights and of the prompt


def defaults(gpu: bool) -> dict:
    """The articles' models on a GPU; stand-ins on a CPU."""
    return {} if gpu else {"models": "mistral-small,llama-small,phi-small,gpt2", "repeats": 20}


def plan(s: Settings, device: torch.device) -> list[dict]:
    """The rows in order: {'model', 'attention', 'T'}. Raises UserError if --lengths cannot be read."""
    package = ["flash_attention_2"] if importlib.util.find_spec("flash_attn") else []
    ours = [OURS + "flash"]
    return [
        {"model": name, "attention": attention, "T": T}
        for name in map(str.strip, s.models.split(","))
        for T in options.lengths(s.lengths)
        for attention in (
            *("eager", "flash"),
            *(package if name not in causal_models.GPT2 else []),
            *(ours if causal_models.has_both(name) else []),
        )
    ]


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """What was measured for a row of `plan`: times in ms, a GPU's peak bytes, the receipt, and errors as shares.

    Times are how long a user waits, Python included. 'device_busy_ms' is how long the GPU is busy in one more call;
    None on a CPU. Raises UserError if the attention cannot run here or another kernel ran, ParityError if it differs
    from float64 or the logits differ from those of eager attention, and out-of-memory errors.
    """
    attention, T, dtype = spec["attention"], spec["T"], resolve_dtype(s.dtype, device)
    subject = causal_models.load(spec["model"], attention, s.seed, device, dtype)
    if subject.max_length < T:
        raise UserError(f"{T} tokens are more than the {subject.max_length} that {spec['model']} attends to")
    generator = torch.Generator().manual_seed(s.seed)
    idx = torch.randint(subject.model.config.vocab_size, (1, T), generator=generator).to(device)
    kernel = attention.removeprefix(OURS)
    subject.use(kernel)
    seen, case = [], subject.case(idx)
    with refusals():
        errors = subject.compare(idx)
        trace = trace_path(folder, spec) if s.profile else None
        receipt = observe(lambda: seen.append(_last_logits(subject, idx)), trace, case=case)
    if reason := _contradiction(kernel, receipt, case):
        raise UserError(reason)
    passed = verdict(errors, dtype, f"of {attention} attention as the model calls it, 2 heads")
    last, positions = seen[0]
    eager = causal_models.load(spec["model"], "eager", s.seed, device, dtype)  # transformers' for ours too
    difference = _difference(last, eager, idx)
    if difference is not None and not difference <= ALLOWED[dtype]:
        raise ParityError(f"its logits differ from eager's by {difference:.1e}, allowed {ALLOWED[dtype]:.0e}")
    subject.use(kernel)  # _difference has switched the model to eager
    memory.reset_peak_memory(device)
    generate, faults = counting_faults(lambda: subject.generate(idx))
    samples_ms = timing.samples(generate, device, s.repeats, s.warmup)
    times, parameters = timing.summary(samples_ms), sum(p.numel() for p in subject.model.parameters())
    body = parameters - sum({id(w): w.numel() for w in subject.embeddings}.values())
    # a process on a CPU keeps what earlier rows and the comparisons freed, so its peak is not this row's
    peak = {"peak_memory": memory.peak_memory(device)} if device.type == "cuda" else {}
    return {
        "parameters": parameters,
        "dtype": dtype_name(dtype),
        "logits": "last position" if positions == 1 else "all positions",
        "samples_ms": samples_ms,
        **times,
        "page_faults": faults(),  # of the median call
        "tflops": 2 * body * T / (times["median_ms"] * 1e9),  # 2 FLOPs a weight and token, without embedding and output
        **peak,
        "kernel": receipt,
        "errors": errors,
        "parity": passed,
        "logits_differ": difference,
        "device_busy_ms": busy_ms(profile(lambda: subject.generate(idx))) if device.type == "cuda" else None,
    }


def _last_logits(subject, idx):
    """Run the timed call once; returns the last logits (V,) and the number of positions that had logits."""
    seen = []
    hook = subject.output.register_forward_hook(lambda module, args, y: seen.append((y[0, -1].float(), y.size(1))))
    try:
        subject.generate(idx)
    finally:
        hook.remove()
    return seen[0]


def _difference(got, subject, idx):
    """Largest difference from eager's last logits, as a share of the largest; None if eager runs out of memory."""
    try:
        subject.use("eager")
        want, _ = _last_logits(subject, idx)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None
    return ((got - want).abs().max() / want.abs().max()).item()


def _contradiction(attention, receipt, case):
    if attention == "flash_attention_2":  # this package's kernels are not PyTorch's operators
        foreign = receipt["forward"] == ["unfused"] and receipt["ops"]
        return None if foreign else f"{attention} was asked for, but the profiler saw {receipt['forward'][0]}"
    return contradiction(causal_models.OUR_NAMES.get(attention, attention), receipt, case)


def table(rows: list[dict]) -> list[str]:
    """A line for each model, length and attention, and how our own GPT stands beside transformers."""
    eager = {(row["model"], row["T"]): row for row in rows if row["attention"] == "eager"}
    names = ["model", "tokens", "attention", "ms to the first token, median (p10-p90)", "device busy, ms"]
    names += ["times as fast as eager", "TFLOP/s"]
    if any(row.get("device_busy_ms") is not None for row in rows):  # earlier rows of CPUs have another row's peak
        names.append(PEAK)
    names += ["kernel seen", "logits for", "logits differ from eager's by"]
    lines = report.markdown(names, [_cells(row, eager.get((row["model"], row["T"])), names) for row in rows])
    counts = "TFLOP/s counts two operations a weight and token, without the embedding and the output layer."
    whose = f"`{OURS}flash` is our own GPT with the weights of the rows above it, which are transformers'."
    whose = [whose, *(f"{said}." for said in beside_ours(rows))] if any(map(_is_ours, rows)) else []
    return [*lines, "", counts, *whose, *report.page_faults(rows)]


def _is_ours(row):
    return row["attention"].startswith(OURS)


def _beside_best(rows):
    """(our row, the fastest of transformers) for each model and length; None if one of these was disturbed.

    The disturbed one may be the fastest.
    """
    measured, found = [row for row in rows if row["status"] == "measured" and not _is_ours(row)], []
    for ours in filter(_is_ours, rows):
        same = [row for row in measured if (row["model"], row["T"]) == (ours["model"], ours["T"])]
        best = min(same, key=lambda row: row["median_ms"], default=None)
        found.append((ours, best if all(map(comparable, same)) else None))
    return found


def beside_ours(rows: list[dict]) -> Iterator[str]:
    """A sentence for each length: how our own GPT stands beside the fastest attention of transformers."""
    pairs = _beside_best(rows)
    for T in dict.fromkeys(ours["T"] for ours, _ in pairs):
        if said := report.clause([pair for pair in pairs if pair[0]["T"] == T], "transformers' fastest"):
            yield f"At {T} tokens our GPT {said}"


def _cells(row, eager, names):
    if row["status"] != "measured":
        return [row["model"], row["T"], row["attention"], row["status"], *[""] * (len(names) - 4)]
    times = report.ratio(row, eager)
    difference = f"{row['logits_differ']:.1e}" if row.get("logits_differ") is not None else ""
    busy = f"{row['device_busy_ms']:.1f}" if row.get("device_busy_ms") is not None else ""
    who = ", ours" if row["model"] in causal_models.GPT2 else ""
    cells = [f"{row['model']} ({_size(row)}{who})", row["T"], row["attention"], report.spread(row), busy, times]
    cells.append(f"{row['tflops']:.3g}")
    if PEAK in names:
        cells.append(f"{row['peak_memory'] / report.GIB:.2f} GiB")
    return [*cells, "+".join(row["kernel"]["forward"]), row["logits"], difference]


def claims(rows: list[dict]) -> list[check.Claim]:
    """Each attention's speed over eager, our GPT's over transformers' fastest attention; refusals."""
    eager = {(row["model"], row["T"]): row for row in rows if row["attention"] == "eager"}
    found = []
    for row in rows:
        name = f"{row['model']}, T = {row['T']}, {row['attention']}: speed over eager"
        found += check.ratio(name, row, eager.get((row["model"], row["T"])))
    for ours, best in _beside_best(rows):
        name = f"{ours['model']}, T = {ours['T']}, our GPT: speed over transformers' fastest"
        found += check.ratio(name, ours, best)
    return found + check.refusals(rows)


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """prefill.png: a panel for each model, a line for each attention, and at each length its speedup over eager."""
    left_out, rows = drawing.left_out(rows), [row for row in rows if row["status"] == "measured"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        return
    down = -(-len(models) // 2)
    shape = dict(nrows=down, ncols=min(2, len(models)), squeeze=False, sharex=True, sharey=True)
    figure, grid = drawing.new(2.1 * down, **shape)
    for axes, model in zip(grid.flat, models):
        group = [row for row in rows if row["model"] == model]
        eager = {row["T"]: row for row in group if row["attention"] == "eager"}
        for kind in dict.fromkeys(row["attention"] for row in group):
            line = sorted((row for row in group if row["attention"] == kind), key=lambda row: row["T"])
            calm = [(row["T"], row["median_ms"], row["p10_ms"], row["p90_ms"]) for row in line if comparable(row)]
            if calm:
                drawing.line(axes, kind, calm)
            for row in line if kind == "flash" else []:
                found = report.beside(row, base := eager.get(row["T"]))
                if found:
                    said = {"fast": f"{found.times:.3g}×", "long": f"{found.times:.3g}× as long", "same": "="}
                    below = row["T"], min(row["median_ms"], base["median_ms"])
                    style = dict(textcoords="offset points", ha="center", fontsize=7.5, color=drawing.color(kind))
                    axes.annotate(said[found.word], below, (0, -13), **style)
        axes.set_title(f"{model} ({_size(group[0])})")
        axes.margins(x=0.32, y=0.25)
    drawing.doubling("x", *grid.flat, ticks=sorted({row["T"] for row in rows}))
    drawing.doubling("y", *grid.flat)
    for axes in grid[-1]:
        axes.set_xlabel("tokens of the prompt")
    figure.supylabel("ms to the first token: median, p10 to p90", fontsize="medium")
    if grid[0, 0].lines:  # there is none if every time was disturbed
        grid[0, 0].legend(frameon=False, labelcolor="linecolor")
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    subject = f"One prompt (batch 1), random weights in {dtypes}. ×: how many times as fast as eager; =: no difference"
    subject += f" beyond the noise.{left_out}"
    yield "prefill", finding(rows), subject, figure


def finding(rows: list[dict]) -> str:
    """How flash stands beside eager over all models, at the longest length with a ratio; and where it gains most."""
    eager = {(row["model"], row["T"]): row for row in rows if row["attention"] == "eager"}
    pairs = [(row, eager.get((row["model"], row["T"]))) for row in rows if row["attention"] == "flash"]
    longest = max((row["T"] for row, base in pairs if speedup(row, base)), default=None)
    if longest is None:
        return "Time to the first token: no ratio of flash to eager"
    pairs = [pair for pair in pairs if pair[0]["T"] == longest and speedup(*pair)]
    most = max(pairs, key=lambda pair: speedup(*pair)[0])
    where = f", most in {most[0]['model']}" if len(pairs) > 1 and report.beside(*most).word == "fast" else ""
    ours = [said for said in beside_ours(rows) if said.startswith(f"At {longest} tokens ")]
    ours = "".join(f"; {said.removeprefix(f'At {longest} tokens ')}" for said in ours)
    return f"At {longest} tokens flash {report.clause(pairs, 'eager')}{where}{ours}"


def _size(row):
    n = row["parameters"]
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.0f} M"
