"""What training would take on GPUs that are not here: memory by formulas, time by a share of their peak.

Computed, not measured: the same command says the same in a second. Memory is that of fusedgpt/estimates/memory.py. Time
is the FLOPs of GPT.flops_per_token over the peak of the GPUs' data sheet, times --mfu: take that of a run like yours.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Literal

import torch

from fusedgpt import dimensions, settings
from fusedgpt.attention.table import scores_held
from fusedgpt.bench import report
from fusedgpt.dimensions import RECOMPUTE
from fusedgpt.errors import UserError
from fusedgpt.estimates.memory import Memory
from fusedgpt.estimates.run import Run
from fusedgpt.machine.gpus import GPUS
from fusedgpt.machine.timing import in_words
from fusedgpt.parallel.distributed import Ranks
from model import GPT, GPTConfig

CHINCHILLA = 20  # tokens per parameter with the lowest loss for a compute budget (arXiv:2203.15556)
MOST_GPUS = 2**16  # a suggestion names at most so many
NODE = 8  # GPUs in a group of fsdp that is compared

TRAINS = True
DEFAULTS = {"vocab_size": 50257}
RUN_FIELDS = [field.name for field in dataclasses.fields(Run)]
USED = {"init_from", "loss", *dimensions.NAMES, *RUN_FIELDS}
UNUSED = {f.name: "a plan does not depend on it" for f in dataclasses.fields(settings.Settings) if f.name not in USED}
UNUSED |= dict.fromkeys(("dtype", "compile"), "a plan is for compiled steps in 16 bits")
UNUSED["mask"] = "a plan counts attention over the whole window"


@dataclasses.dataclass
class Settings:
    gpu: Literal[*GPUS] = "H100"  # model of the GPUs
    gpus: int = 8  # GPUs in all
    mfu: float = 0.4  # share of the peak that a run reaches, as train.py prints it; GPT-2 124M on an H200: 0.41


def answer(s, say: Callable[[str], None]) -> None:
    """Say what the run with settings `s` takes, and what other ways to share it or to recompute would.

    Raises UserError if `s` does not define the model, if the GPUs cannot share the work as `s` says, or if they have
    too little memory; the message then names the nearest settings that fit.
    """
    if not 0 < s.mfu <= 1:
        raise UserError(f"mfu={s.mfu:g} must be more than 0, and at most 1")
    config, run = config_of(s), run_of(s)
    refuse(config, run, s.gpu)
    for line in (*said(config, run, s.gpu, s.mfu), "", *table(config, alternatives(run), s.gpu)):
        say(line)


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


def alternatives(run: Run) -> list[Run]:
    """`run`, and runs of the same step with other values of parallel, shard_size and recompute."""
    sharing = [("ddp", None), ("fsdp", None)] + [("fsdp", NODE)] * (run.gpus % NODE == 0 and run.gpus > NODE)
    found = [run]
    for (parallel, shard_size), recompute in itertools.product(sharing, saving(run)):
        found.append(dataclasses.replace(run, parallel=parallel, shard_size=shard_size, recompute=recompute))
    return list({(shared(each), each.recompute): each for each in reversed(found)}.values())[::-1]


def shared(run: Run) -> str:
    """How the GPUs of `run` share the model, in words."""
    return "ddp" if run.shards == 1 else f"fsdp{f' in groups of {run.shards}' * (run.shards < run.gpus)}"


def said(config: GPTConfig, run: Run, gpu: str, mfu: float) -> list[str]:
    """The run, its memory and its time in words, a line each."""
    memory, room = Memory.of(config, run), GPUS[gpu].memory
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in dataclasses.asdict(memory).items() if size)
    batches = f"{run.micro_steps} micro-batch{'es' * (run.micro_steps > 1)} of {run.batch_size} x {config.block_size}"
    with torch.device("meta"):
        flops = GPT(config).flops_per_token()
    rate = mfu * run.gpus * GPUS[gpu].peak / flops
    seconds = run.gpus * run.micro_steps * run.batch_size * config.block_size / rate
    tokens = CHINCHILLA * config.num_params
    return [
        f"computed, not measured: {config.num_params:,} parameters on {run.gpus} x {gpu}, {shared(run)},"
        f" recompute={run.recompute}, {batches} tokens on each; a vocabulary of {config.padded_vocab_size:,}",
        f"memory: {in_gb(memory)} of {room / 1e9:g} GB of each GPU{'; it may not fit' * (memory.range[1] > room)}:"
        f" {parts}",
        f"time at {100 * mfu:g} % of the peak (--mfu): {1e3 * seconds:,.4g} ms a step, {rate:,.0f} tokens/s;"
        f" {CHINCHILLA} tokens a parameter, {tokens / 1e9:,.3g} billion, take {in_words(tokens / rate)}",
    ]


def in_gb(memory: Memory) -> str:
    """'20.1 (17.5 to 22.8)': memory in GB, and its expected range."""
    low, high = memory.range
    return f"{memory.total / 1e9:.1f} ({low / 1e9:.1f} to {high / 1e9:.1f})"


def table(config: GPTConfig, runs: list[Run], gpu: str) -> list[str]:
    """A line for each run: memory by part, and whether it fits."""
    names = [field.name for field in dataclasses.fields(Memory)]
    cells = []
    for run in runs:
        memory = Memory.of(config, run)
        whole = in_gb(memory) if memory.total <= GPUS[gpu].memory else f"{memory.total / 1e9:,.1f}: does not fit"
        cells.append([shared(run), run.recompute, *(f"{getattr(memory, name) / 1e9:.2f}" for name in names), whole])
    return report.markdown(["shared by", "recompute", *(f"{name}, GB" for name in names), "in all, GB"], cells)
