"""What training would take on GPUs that are not here: memory, time, and what bounds the speed. Computed, not measured.

The formulas are in fusedgpt/estimates/, their assumptions and errors in results/plan/README.md. Unlike the
kinds of benchmark, plan has no rows.jsonl: the same command computes the same in a second.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from fusedgpt import dimensions, settings
from fusedgpt.attention.table import scores_held
from fusedgpt.bench import drawing, report
from fusedgpt.dimensions import RECOMPUTE
from fusedgpt.errors import UserError
from fusedgpt.estimates import rates, step
from fusedgpt.estimates.memory import Memory
from fusedgpt.estimates.run import Run
from fusedgpt.estimates.step import Step
from fusedgpt.machine.files import atomic
from fusedgpt.machine.gpus import GPUS, NETWORKS
from fusedgpt.parallel.distributed import Ranks
from model import GPTConfig

SHARED = "ddp: each GPU holds the whole model; fsdp: all GPUs, or those of a group, hold a share of it each."
CHINCHILLA = 20  # tokens per parameter with the lowest loss for a compute budget (arXiv:2203.15556)
MOST_GPUS = 2**16  # a suggestion names at most so many
# the parts of Memory and of Step, with names for a report
MEMORY = {field.name: field.name for field in dataclasses.fields(Memory)}
TIME = {"products": "products", "attention": "attention", "traffic": "memory traffic", "optimizer": "optimizer"}
TIME |= {"rest": "not counted", "exposed": "waiting for communication"}

TRAINS = True
DEFAULTS = {"vocab_size": 50257}
RUN_FIELDS = [field.name for field in dataclasses.fields(Run)]
USED = {"init_from", "loss", *dimensions.NAMES, *RUN_FIELDS}
UNUSED = {f.name: "a plan does not depend on it" for f in dataclasses.fields(settings.Settings) if f.name not in USED}
UNUSED |= dict.fromkeys(("dtype", "compile"), "a plan is for compiled steps in 16 bits")
UNUSED["mask"] = "a plan counts attention over the whole window"


@dataclasses.dataclass
class Settings:
    results: str = "out-bench"  # folder for results; the report and figures go to its subfolder plan
    gpu: Literal[*GPUS] = "H100"  # model of the GPUs
    gpus: int = 8  # GPUs in all
    # network between nodes: InfiniBand of 400 (ndr) or 200 Gbit/s (hdr) per GPU, or 100 Gbit/s per node (ethernet)
    interconnect: Literal[*NETWORKS] = "ndr"
    sweep: bool = False  # instead of one run, compute models of 124M to 70B on 8 to 1024 of these GPUs


def answer(s, command: str, say: Callable[[str], None]) -> list[pathlib.Path]:
    """Compute what the run with settings `s` takes, say it, and write it to `results`/plan; returns the paths.

    Raises UserError if `s` does not define the model, if the GPUs cannot share the work as `s` says, or if they have
    too little memory; the message then names the nearest settings that fit.
    """
    config, run = config_of(s), run_of(s)
    refuse(config, run, s.gpu)
    rows = alternatives(config, run, s.gpu, s.interconnect)
    said = in_words(config, rows[0], s.gpu)
    for line in said:
        say(line)
    text = [*(f"- {line}" for line in said), "", *table(rows)]
    return write(s.results, "plan", command, text, figures(config, rows, s.gpu))


def config_of(s) -> GPTConfig:
    """The model that the settings describe. Raises UserError if they leave it to weights or data."""
    if s.init_from not in ("scratch", "auto"):
        raise UserError(
            f"init_from={s.init_from}: a plan reads no weights; give --init_from=scratch, with their --n_layer,"
            " --n_head and --n_embd"
        )
    if s.vocab_size is None:
        raise UserError("vocab_size=None: a plan reads no data; give its number of ids, such as --vocab_size=50257")
    config = GPTConfig.of(s, loss=s.loss)
    dimensions.require_known(config, "bench.py plan (fusedgpt/estimates/)", dimensions.FAMILIES)
    return config


def run_of(s) -> Run:
    """The run that the settings describe. Raises UserError if its GPUs cannot share the work that way."""
    if s.gpus < 1:
        raise UserError(f"gpus={s.gpus} must be 1 or more")
    Ranks(world=s.gpus).micro_steps(s.gradient_accumulation_steps)
    if s.shard_size and s.gpus % s.shard_size:
        raise UserError(f"shard_size={s.shard_size} must divide gpus={s.gpus}, or be None, to share among all")
    return Run.of(s, dtype="bfloat16", compile=True)


def refuse(config: GPTConfig, run: Run, gpu: str) -> None:
    """Raise UserError if `run` does not fit; the message names the nearest settings that do."""
    needed, room = Memory.of(config, run).total, GPUS[gpu].memory
    if needed <= room:
        return
    what = f"{config.num_params:,} parameters with micro-batches of {run.batch_size} x {config.block_size} tokens take"
    what += f" {needed / 1e9:,.1f} GB of each GPU, and {gpu} has {room / 1e9:g}"
    other = nearest(config, run, room)
    if other is None:
        advice = "take a smaller model or --block_size, or another --gpu"
        raise UserError(f"{what}: {max(MOST_GPUS, run.gpus)} of them are not enough; {advice}")
    names = [name for name in RUN_FIELDS if getattr(other, name) != getattr(run, name)]
    raise UserError(f"{what}: what fits is {' '.join(f'--{name}={getattr(other, name)}' for name in names)}")


def nearest(config: GPTConfig, run: Run, room: float) -> Run | None:
    """The nearest run that fits, or None: smaller micro-batches, recomputation, fsdp, more GPUs, tried in this order.

    A step keeps its number of sequences, or gets one per GPU if it has fewer. room: a GPU's memory in bytes.
    """
    sequences = run.batch_size * run.gradient_accumulation_steps
    gpus = [run.gpus, *(run.gpus * 2**n for n in range(1, MOST_GPUS.bit_length()) if run.gpus * 2**n <= MOST_GPUS)]
    sharing = [("ddp", None), ("fsdp", None)] if run.parallel == "ddp" else [("fsdp", run.shard_size), ("fsdp", None)]
    more = RECOMPUTE[RECOMPUTE.index(run.recompute) + 1 :]
    again = [run.recompute, *(name for name in more if name in saving(run))]
    of_a_sequence = config.block_size * config.padded_vocab_size * run.itemsize / config.chunks  # bytes of logits
    batches = range(min(run.batch_size, int(room / of_a_sequence)), 0, -1)
    for n, (parallel, shard_size), recompute, batch in itertools.product(gpus, sharing, again, batches):
        if sequences % (batch * n) and (batch > 1 or sequences > n):
            continue
        changes = dict(gpus=n, parallel=parallel, shard_size=shard_size, recompute=recompute, batch_size=batch)
        other = dataclasses.replace(run, **changes, gradient_accumulation_steps=max(sequences // batch, n))
        if Memory.of(config, other).total <= room:
            return other
    return None


def saving(run: Run) -> list[str]:
    """The values of recompute to try: "attention" saves next to nothing if the kernel is fused."""
    fused = scores_held(run.attention) == "none"
    return [name for name in RECOMPUTE if name != "attention" or not fused]


def compute(config: GPTConfig, run: Run, gpu: str, interconnect: str) -> dict:
    """The row of `run`: its memory and time, computed."""
    machine = rates.Machine.of(GPUS[gpu], NETWORKS[interconnect])
    memory, time = Memory.of(config, run), Step.of(config, run, machine)
    tokens_per_s = run.gpus * run.micro_steps * run.batch_size * config.block_size / time.total
    return {
        "parallel": "ddp" if run.shards == 1 else f"fsdp{f' in groups of {run.shards}' * (run.shards < run.gpus)}",
        "gpus": run.gpus,
        "recompute": run.recompute,
        "batch_size": run.batch_size,
        "micro_steps": run.micro_steps,
        "status": "computed" if memory.total <= GPUS[gpu].memory else "does not fit",
        "memory": dataclasses.asdict(memory) | {"total": memory.total, "range": memory.range},
        "seconds": dataclasses.asdict(time)
        | {"computation": time.computation, "total": time.total, "range": time.range},
        "tokens_per_s": tokens_per_s,
        "mfu": step.flops_per_token(config) * tokens_per_s / (run.gpus * machine.peak),
        "bound": time.bound,
        "days": CHINCHILLA * config.num_params / tokens_per_s / 86400,
    }


def alternatives(config: GPTConfig, run: Run, gpu: str, interconnect: str) -> list[dict]:
    """The row of `run`, and rows of the same step with other values of parallel, shard_size and recompute."""
    per_node = GPUS[gpu].per_node
    sharing = [("ddp", None), ("fsdp", None)] + [("fsdp", per_node)] * (run.gpus % per_node == 0)
    runs = [run]
    for (parallel, shard_size), recompute in itertools.product(sharing, saving(run)):
        runs.append(dataclasses.replace(run, parallel=parallel, shard_size=shard_size, recompute=recompute))
    rows = [compute(config, each, gpu, interconnect) for each in runs]
    return [row for n, row in enumerate(rows) if row not in rows[:n]]


def in_words(config: GPTConfig, row: dict, gpu: str) -> list[str]:
    """A row in words, a few lines."""
    memory, seconds, tokens = row["memory"], row["seconds"], CHINCHILLA * config.num_params
    low, high = (share * row["days"] for share in step.RANGE)
    fastest, slowest = (row["tokens_per_s"] / share for share in step.RANGE)
    room = GPUS[gpu].memory / 1e9
    doubt = "; it may not fit" * (memory["range"][1] / 1e9 > room)
    parts = ", ".join(f"{name} {memory[name] / 1e9:.2f}" for name in MEMORY if memory[name])
    times = ", ".join(f"{label} {rounded(1e3 * seconds[name])}" for name, label in TIME.items() if seconds[name])
    times += f" of {rounded(1e3 * seconds['communication'])}" if seconds["exposed"] else ""
    how = f"{row['gpus']} x {gpu}, {row['parallel']}, recompute={row['recompute']}"
    return [
        f"computed, not measured: {config.num_params:,} parameters on {how}, {batches(config, row)};"
        f" a vocabulary of {config.padded_vocab_size:,}",
        f"memory: {in_gb(memory)} of {room:g} GB of each GPU{doubt}: {parts}",
        f"step: {in_ms(seconds)} ms: {times}",
        f"speed: {row['tokens_per_s']:,.0f} ({rounded(slowest)} to {rounded(fastest)}) tokens/s,"
        f" MFU {100 * row['mfu']:.0f} %, bound by {row['bound']}",
        f"training: {CHINCHILLA} tokens a parameter, {rounded(tokens / 1e9)} billion, take {duration(row['days'])}"
        f" ({duration(low)} to {duration(high)})",
    ]


def in_gb(memory: dict) -> str:
    """'20.1 (17.5 to 22.8)': memory of a row in GB, and its expected range."""
    low, high = memory["range"]
    return f"{memory['total'] / 1e9:.1f} ({low / 1e9:.1f} to {high / 1e9:.1f})"


def in_ms(seconds: dict) -> str:
    """'142.7 (107 to 214)': time of a row's step in ms, and its expected range."""
    low, high = (1e3 * end for end in seconds["range"])
    return f"{rounded(1e3 * seconds['total'], 4)} ({rounded(low)} to {rounded(high)})"


def batches(config: GPTConfig, row: dict) -> str:
    """'5 micro-batches of 12 x 1024 tokens on each'."""
    what = "micro-batch" if row["micro_steps"] == 1 else "micro-batches"
    return f"{row['micro_steps']} {what} of {row['batch_size']} x {config.block_size} tokens on each"


def rounded(number: float, digits: int = 3) -> str:
    """`number` to that many significant digits, such as 1,250 or 0.531."""
    return f"{float(f'{number:.{digits}g}'):,.12g}"


def duration(days: float) -> str:
    """'10 minutes', '3.2 hours' or '17.4 days'."""
    if days < 1 / 24:
        return f"{1440 * days:.2g} minutes"
    return f"{24 * days:.2g} hours" if days < 1 else f"{days:,.1f} days"


def table(rows: list[dict]) -> list[str]:
    """A line for each row: memory by part, time, speed, and the days that training takes."""
    names = ["parallel", "recompute", "micro-batches", *(f"{part}, GB" for part in MEMORY), "in all, GB"]
    names += ["ms a step", "waiting for communication", "tokens/s", "MFU", "bound by", "Chinchilla's tokens"]
    return report.markdown(names, map(_cells, rows))


def _cells(row):
    memory, seconds = row["memory"], row["seconds"]
    cells = [row["parallel"], row["recompute"], f"{row['micro_steps']} x {row['batch_size']}"]
    cells += [f"{memory[part] / 1e9:.2f}" for part in MEMORY]
    if row["status"] != "computed":
        return [*cells, f"{memory['total'] / 1e9:.1f}: {row['status']}", *[""] * 6]
    cells += [in_gb(memory), in_ms(seconds)]
    cells += [f"{rounded(1e3 * seconds['exposed'])} of {rounded(1e3 * seconds['communication'])} ms"]
    return [*cells, f"{row['tokens_per_s']:,.0f}", f"{100 * row['mfu']:.0f} %", row["bound"], duration(row["days"])]


def figures(config: GPTConfig, rows: list[dict], gpu: str) -> Iterator[tuple]:
    """plan.png: for each row, a GPU's memory and a step's time, by part."""
    figure, (left, right) = drawing.new(0.33 * len(rows) + 1.2, ncols=2, sharey=True)
    _bars(left, MEMORY, [row["memory"] for row in rows], 1e9)
    nothing = dict.fromkeys(TIME, 0) | {"total": 0, "range": (0, 0)}
    _bars(right, TIME, [row["seconds"] if row["status"] == "computed" else nothing for row in rows], 1e-3)
    for axes, where in ((left, "outside lower left"), (right, "outside lower right")):
        figure.legend(*axes.get_legend_handles_labels(), loc=where, ncols=2, frameon=False, fontsize=7)
        axes.grid(visible=False, axis="y")
    room = GPUS[gpu].memory / 1e9
    left.axvline(room, color="black", linestyle="--", linewidth=1)
    # bars that do not fit run off the axes, because at full length they would squeeze those that fit
    left.set(xlabel=f"GB of each GPU (dashed: {gpu} has {room:g})", xlim=(0, 1.05 * room))
    again = {name: f",\nrecompute {name}" for name in RECOMPUTE} | {"none": ""}
    left.set_yticks(range(len(rows)), [row["parallel"] + again[row["recompute"]] for row in rows], fontsize=7.5)
    left.invert_yaxis()
    for n, row in enumerate(rows):
        if row["status"] != "computed":
            what = f"{row['status']}: {row['memory']['total'] / 1e9:,.0f} GB"
            right.text(0.02, n, what, va="center", fontsize=7.5, transform=right.get_yaxis_transform())
    right.set(xlabel="ms of a step", xlim=(0, 1.05 * right.dataLim.xmax))
    subject = f"{config.num_params:,} parameters on {rows[0]['gpus']} x {gpu}, {batches(config, rows[0])}."
    subject += " First what was asked for; black lines: the range that measured runs had. " + SHARED
    yield "plan", finding(rows, gpu), subject, figure


def finding(rows: list[dict], gpu: str) -> str:
    """The computed speed of the first row, and the fastest other way to share the work if that is faster."""
    asked, fastest = rows[0], max(rows, key=lambda row: row["tokens_per_s"] * (row["status"] == "computed"))
    text = f"Computed: {asked['gpus']} x {gpu} make {rounded(asked['tokens_per_s'])} tokens/s with {asked['parallel']}"
    text += f", {100 * asked['mfu']:.0f} % of the peak, bound by {asked['bound']}"
    gain = fastest["tokens_per_s"] / asked["tokens_per_s"]
    return text + f"; {fastest['parallel']} {gain:.3g} times that" * (gain >= 1.01)


def network(name: str) -> str:
    """A network in words: 'InfiniBand NDR (ndr), 400 Gbit/s for each GPU'."""
    kind = "Ethernet" if name == "ethernet" else f"InfiniBand {name.upper()} ({name})"
    return f"{kind}, {8 * NETWORKS[name].rate / 1e9:g} Gbit/s for each GPU"


def _bars(axes, parts, rows, unit):
    """A horizontal bar for each of `rows`, with a piece for each part, and a line over its range at the end."""
    left, at = np.zeros(len(rows)), range(len(rows))
    for n, (part, label) in enumerate(parts.items()):
        widths = np.array([row[part] for row in rows]) / unit
        axes.barh(at, widths, left=left, height=0.62, label=label, **drawing.bar_style(n))
        left += widths
    ends, (low, high) = (np.array([row[name] for row in rows]).T / unit for name in ("total", "range"))
    axes.errorbar(ends, at, xerr=[ends - low, high - ends], fmt="none", ecolor="black", lw=1, capsize=2)


def write(results: str, name: str, command: str, text: list[str], drawn: Iterator[tuple]) -> list[pathlib.Path]:
    """Write the report called `name` and its figures to `results`/plan; returns the paths written."""
    folder = pathlib.Path(results) / "plan"
    folder.mkdir(parents=True, exist_ok=True)
    shares = {"what the largest products reach": rates.PRODUCTS, "the peak in attention": rates.FLASH}
    shares |= {"memory's bandwidth": rates.TRAFFIC, "links' bandwidth": rates.LINK}
    reached = ", ".join(f"{100 * share:g} % of {what}" for what, share in shares.items())
    low, high = step.RANGE
    how = f"Computed, not measured. Assumed: {reached}, and {100 * step.REST:g} % more for what is not counted. Steps"
    how += f" that were measured took {low:g} to {high:g} times their estimate (docs/many-gpus.md)"
    paths = drawing.save(drawn, folder, how)
    lines = [f"# {name}", "", f"`{command}`", "", f"{how}.", "", *text, ""]
    lines += drawing.shown(paths)
    with atomic(folder / f"{name}.md", "w") as file:
        file.write("\n".join(lines).rstrip() + "\n")
    return [folder / f"{name}.md", *paths]
