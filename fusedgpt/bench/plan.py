"""What training would take on GPUs that are not here: memory by formulas, time by a share of their peak.

Computed, not measured: the same command says the same in a second. Memory is by fusedgpt/estimates/training_memory.py.
Time is GPTConfig.flops_per_token over the peak of the GPUs' data sheet, times --mfu: take that of a run like yours.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Literal

from fusedgpt import dimensions, settings
from fusedgpt.attention.table import scores_held
from fusedgpt.dimensions import RECOMPUTE, GPTConfig
from fusedgpt.errors import UserError
from fusedgpt.estimates.training_memory import Load, Memory
from fusedgpt.machine.flops import GPUS
from fusedgpt.parallel.distributed import Ranks
from fusedgpt.terminal import in_words

TRAINS = True
DEFAULTS = {"vocab_size": 50257}
RUN_FIELDS = [field.name for field in dataclasses.fields(Load)]
USED = {"init_from", "loss", "max_iters", *dimensions.NAMES, *RUN_FIELDS}
# a plan is for compiled steps in 16 bits, and counts attention over the whole window
UNUSED = [field.name for field in dataclasses.fields(settings.Settings) if field.name not in USED]
UNUSED += ["dtype", "compile", "mask"]


@dataclasses.dataclass
class Settings:
    gpu: Literal[*GPUS] = "H100"  # model of the GPUs
    gpus: int = 8  # GPUs in all
    mfu: float = 0.4  # share of the peak that a run reaches, as train.py prints it; GPT-2 124M on an H200: 0.39


def answer(s, say: Callable[[str], None]) -> None:
    """Say what the run with settings `s` takes.

    Raises UserError if `s` does not define the model, if the GPUs cannot share the work as `s` says, or if they have
    too little memory; the message then names the nearest settings that fit.
    """
    if not 0 < s.mfu <= 1:
        raise UserError(f"mfu={s.mfu:g} must be more than 0, and at most 1")
    config, run = config_of(s), run_of(s)
    refuse(config, run, s.gpu)
    for line in said(config, run, s.gpu, s.mfu, s.max_iters):
        say(line)


def config_of(s) -> GPTConfig:
    """The model that the settings describe. Raises UserError if they leave it to weights or data."""
    if s.init_from not in ("scratch", "auto"):
        how = "give --init_from=scratch, with their --n_layer, --n_head and --n_embd"
        raise UserError(f"init_from={s.init_from}: a plan reads no weights; {how}")
    if s.vocab_size is None:
        raise UserError("vocab_size=None: a plan reads no data; give its number of ids, such as --vocab_size=50257")
    config = GPTConfig.of(s, loss=s.loss)
    dimensions.require_known(config, "bench.py plan (fusedgpt/estimates/)", dimensions.FAMILIES)
    return config


def run_of(s) -> Load:
    """The run that the settings describe. Raises UserError if its GPUs cannot share the work that way."""
    if s.gpus < 1:
        raise UserError(f"gpus={s.gpus} must be 1 or more")
    Ranks(world=s.gpus).micro_steps(s.gradient_accumulation_steps)
    if s.shard_size and s.gpus % s.shard_size:
        raise UserError(f"shard_size={s.shard_size} must divide gpus={s.gpus}, or be None, to share among all")
    return Load.of(s, dtype="bfloat16", compile=True)


def refuse(config: GPTConfig, run: Load, gpu: str) -> None:
    """Raise UserError if `run` does not fit; the message names the nearest settings that do."""
    needed, room = Memory.of(config, run).total, GPUS[gpu].memory
    if needed <= room:
        return
    other, advice = nearest(config, run, room), "nothing fits; take a smaller model or --block_size, or another --gpu"
    if other:
        names = [name for name in RUN_FIELDS if getattr(other, name) != getattr(run, name)]
        advice = f"what fits is {' '.join(f'--{name}={getattr(other, name)}' for name in names)}"
    raise UserError(
        f"{config.num_params:,} parameters with micro-batches of {run.batch_size} x {config.block_size} tokens take"
        f" {needed / 1e9:,.1f} GB of each GPU, and {gpu} has {room / 1e9:g}: {advice}"
    )


def nearest(config: GPTConfig, run: Load, room: float) -> Load | None:
    """The nearest run that fits, or None: smaller micro-batches, recomputation, fsdp, more GPUs, tried in this order.

    A step keeps its number of sequences, or gets one per GPU if it has fewer. room: a GPU's memory in bytes.
    """
    sequences = run.batch_size * run.gradient_accumulation_steps
    gpus = [run.gpus * 2**n for n in range(14)]
    sharing = [(run.parallel, run.shard_size), ("fsdp", None)]
    again = list(RECOMPUTE[RECOMPUTE.index(run.recompute) :])
    if "attention" in again[1:] and scores_held(run.attention) == "none":
        again.remove("attention")  # it saves next to nothing if the kernel is fused
    batches = range(run.batch_size, 0, -1)
    for n, (parallel, shard_size), recompute, batch in itertools.product(gpus, sharing, again, batches):
        if sequences % (batch * n) and (batch > 1 or sequences > n):
            continue
        changes = dict(gpus=n, parallel=parallel, shard_size=shard_size, recompute=recompute, batch_size=batch)
        other = dataclasses.replace(run, **changes, gradient_accumulation_steps=max(sequences // batch, n))
        if Memory.of(config, other).total <= room:
            return other
    return None


def said(config: GPTConfig, run: Load, gpu: str, mfu: float, max_iters: int) -> list[str]:
    """The run, its memory and its time in words, a line each. All of its time is that of its training steps."""
    memory, room = Memory.of(config, run), GPUS[gpu].memory
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in dataclasses.asdict(memory).items() if size)
    rate = mfu * run.gpus * GPUS[gpu].peak / config.flops_per_token
    seconds = run.gpus * run.micro_steps * run.batch_size * config.block_size / rate
    return [
        f"computed, not measured: {config.num_params:,} parameters on {run.gpus} x {gpu}, {run.parallel},"
        f" recompute={run.recompute}, micro-batches of each GPU: {run.micro_steps}, of {run.batch_size} x"
        f" {config.block_size} tokens; a vocabulary of {config.padded_vocab_size:,}",
        f"memory: {memory.total / 1e9:.1f} of {room / 1e9:g} GB of each GPU; a run may take a fifth more: {parts}",
        f"time at {100 * mfu:g} % of the peak (--mfu): {1e3 * seconds:,.4g} ms a step, {rate:,.0f} tokens/s;"
        f" max_iters={max_iters:,}, {max_iters * seconds * rate / 1e9:,.3g} billion tokens, take"
        f" {in_words(max_iters * seconds)}: {max_iters * seconds * run.gpus / 3600:,.4g} GPU-hours",
    ]
