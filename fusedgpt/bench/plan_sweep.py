"""bench.py plan --sweep=True: 8 to 1024 GPUs for four models, and where communication overtakes computation.

A step has the same number of tokens on any number of GPUs. With more GPUs, each computes less, but sends as much as
before.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator

from fusedgpt import settings
from fusedgpt.bench import drawing, plan, report
from fusedgpt.estimates.run import Run
from fusedgpt.machine.gpus import GPUS
from model import GPTConfig

GPT2 = GPTConfig(vocab_size=50257, vocab_multiple=64, bias=False)
# {name: (model, tokens of a step)}. GPT-3 (arXiv:2005.14165, table 2.1) takes 0.5, 1 and 2M tokens for the first three
# sizes, Llama 2 (arXiv:2307.09288) 4M. Ours are powers of two, so that these numbers of GPUs can share them
MODELS = {
    "124M": (GPT2, 2**19),
    "XL": (dataclasses.replace(GPT2, n_layer=48, n_head=25, n_embd=1600), 2**20),
    "7B": (dataclasses.replace(GPT2, n_layer=34, n_head=32, n_embd=4096), 2**21),
    "70B": (dataclasses.replace(GPT2, n_layer=86, n_head=64, n_embd=8192), 2**22),
}
USED = ("results", "gpu", "interconnect", "sweep")
UNUSED = {f.name for kind in (settings.Settings, plan.Settings) for f in dataclasses.fields(kind)} - set(USED)
UNUSED = dict.fromkeys(UNUSED, "--sweep=True has models and runs of its own")
NUMBERS = [2**n for n in range(3, 11)]
BATCHES = [2**n for n in range(10)]
# ways to share the work, and how they are drawn; hybrid: fsdp within groups of whole nodes
SHARING = {"ddp": ("o", "#000000", "-"), "fsdp": ("s", "#D55E00", "--"), "hybrid": ("^", "#0072B2", "-.")}
HYBRID = "hybrid: fsdp within groups of whole nodes, each of which holds the whole model."


def answer(s, command: str, say: Callable[[str], None]) -> list[pathlib.Path]:
    """Compute the sweep of the settings `s`, say its crossings, write it to `results`/plan; returns the paths."""
    rows = sweep(s.gpu, s.interconnect)
    said = crossings(rows)
    for line in said:
        say(line)
    words = f"{plan.SHARED} {HYBRID} Nodes are connected by {plan.network(s.interconnect)}."
    text = [f"{finding(rows)}.", "", words, "", *said, "", *table(rows)]
    return plan.write(s.results, "sweep", command, text, figures(rows, s.gpu, s.interconnect))


def sweep(gpu: str, interconnect: str) -> list[dict]:
    """For each model, number of GPUs and way to share the work: the fastest row that fits, or a row "does not fit"."""
    rows = []
    for (model, (config, tokens)), gpus, sharing in itertools.product(MODELS.items(), NUMBERS, SHARING):
        sequences = tokens // config.block_size
        if gpus <= sequences and (sharing != "hybrid" or gpus > GPUS[gpu].per_node):
            found = fastest(config, sequences, gpus, sharing, gpu, interconnect) or {"status": "does not fit"}
            rows.append({"model": model, "sharing": sharing} | found | {"gpus": gpus})
    return rows


def fastest(config: GPTConfig, sequences: int, gpus: int, sharing: str, gpu: str, interconnect: str) -> dict | None:
    """The row of the fastest way to make a step of `sequences`; None if no way fits.

    It tries micro-batches of up to 512, recompute=none and block, and in hybrid groups of 1, 2, 4 … nodes.
    """
    per_node, parallel = GPUS[gpu].per_node, "ddp" if sharing == "ddp" else "fsdp"
    groups = [per_node * 2**n for n in range(gpus.bit_length()) if per_node * 2**n < gpus]
    sizes = groups if sharing == "hybrid" else [None]
    batches = [batch for batch in BATCHES if sequences % (batch * gpus) == 0]
    rows = []
    for batch, shard_size, recompute in itertools.product(batches, sizes, ("none", "block")):
        how = dict(parallel=parallel, shard_size=shard_size, recompute=recompute, gpus=gpus)
        rows.append(plan.compute(config, Run(batch, sequences // batch, **how), gpu, interconnect))
    fitting = [row for row in rows if row["status"] == "computed"]
    return min(fitting, key=_slowness, default=None)


def _slowness(row):
    """(seconds to four digits, seconds of computation): of two equally fast rows, the one that computes less wins."""
    return float(f"{row['seconds']['total']:.3e}"), row["seconds"]["computation"]


def ratio(row: dict) -> float:
    """Seconds of communication for each second of computation, as if the two never overlapped."""
    return row["seconds"]["communication"] / row["seconds"]["computation"]


def crossings(rows: list[dict]) -> list[str]:
    """For each model and way to share it: from how many GPUs on it fits, and communication overtakes computation."""
    cells = []
    for model, sharing in itertools.product(MODELS, SHARING):
        fits = _fitting(rows, model, sharing)
        if not fits:
            cells.append([model, sharing, "on none", ""])
            continue
        over = [f"from {row['gpus']} GPUs on" for row in fits if ratio(row) > 1]
        over.append(f"not up to {fits[-1]['gpus']}")
        cells.append([model, sharing, f"from {fits[0]['gpus']} GPUs on", over[0]])
    return report.markdown(["model", "parallel", "fits", "communication overtakes computation"], cells)


def finding(rows: list[dict]) -> str:
    """From how many GPUs on communication takes longer than computation in each model, however the work is shared."""
    said = {"not": []}
    for model in MODELS:
        least = {}
        for row in (row for sharing in SHARING for row in _fitting(rows, model, sharing)):
            least[row["gpus"]] = min(ratio(row), least.get(row["gpus"], float("inf")))
        over = [f"from {gpus} GPUs on" for gpus, times in sorted(least.items()) if times > 1]
        said.setdefault([*over, "not"][0], []).append(model)
    parts = [f"{when} in {' and '.join(said[when])}" for when in sorted(said, key=len, reverse=True) if said[when]]
    return f"However the work is shared, communication overtakes computation {', '.join(parts)}"


def _fitting(rows, model, sharing):
    return [row for row in rows if (row["model"], row["sharing"], row["status"]) == (model, sharing, "computed")]


def table(rows: list[dict]) -> list[str]:
    """A line for each row."""
    names = ["model", "GPUs", "parallel", "micro-batches", "recompute", "GB a GPU", "ms a step"]
    names += ["communication ÷ computation", "tokens/s", "MFU", "Chinchilla's tokens"]
    cells = []
    for row in rows:
        if row["status"] != "computed":
            cells.append([row["model"], row["gpus"], row["sharing"], row["status"], *[""] * 7])
            continue
        how = [row["model"], row["gpus"], row["parallel"], f"{row['micro_steps']} x {row['batch_size']}"]
        took = [plan.in_gb(row["memory"]), plan.in_ms(row["seconds"])]
        rest = [f"{ratio(row):.2f}", f"{row['tokens_per_s']:,.0f}", f"{100 * row['mfu']:.0f} %"]
        rest.append(plan.duration(row["days"]))
        cells.append([*how, row["recompute"], *took, *rest])
    return report.markdown(names, cells)


def figures(rows: list[dict], gpu: str, interconnect: str) -> Iterator[tuple]:
    """sweep.png: a panel for each model, with communication as a multiple of computation over the number of GPUs."""
    figure, grid = drawing.new(4.0, nrows=2, ncols=2, sharex=True, sharey=True)
    for axes, (model, (_, tokens)) in zip(grid.flat, MODELS.items()):
        nowhere = []
        for sharing, (mark, color, line) in SHARING.items():
            fits = _fitting(rows, model, sharing)
            if not fits:
                nowhere.append(sharing)
            style = dict(marker=mark, color=color, linestyle=line, markersize=4.5, linewidth=1.3, label=sharing)
            axes.plot([row["gpus"] for row in fits], list(map(ratio, fits)), **style)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"{model}, {tokens / 2**20:g}M tokens a step")
        if nowhere:
            at = dict(transform=axes.transAxes, fontsize=7.5, va="top")
            axes.text(0.03, 0.93, f"{', '.join(nowhere)}: does not fit", **at)
    drawing.doubling("x", *grid.flat, ticks=NUMBERS)
    grid[0, 0].set_yscale("log")
    grid[0, 0].yaxis.set_major_formatter("{x:g}")
    for axes in grid[-1]:
        axes.set_xlabel("GPUs")
        axes.tick_params(axis="x", labelsize=7)
    figure.supylabel("communication ÷ computation", fontsize=8.5)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    subject = f"Above the line communication takes longer. {gpu}, {GPUS[gpu].per_node} to a node, nodes connected by"
    subject += f" {plan.network(interconnect)}. {plan.SHARED} {HYBRID} Each point is the fastest micro-batch, recompute"
    subject += " and group that fits."
    yield "sweep", finding(rows), subject, figure
