"""Whether a run fits into memory, from formulas, before a new model is built."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fusedgpt import dimensions
from fusedgpt.errors import UserError
from fusedgpt.estimates.training_memory import Load, Memory, least_memory
from fusedgpt.machine import memory
from fusedgpt.machine.device import asks_to_compile, dtype_name, resolve_dtype


def check_run(s: Any, processes: int, say: Callable[[str], None], device: torch.device, config: Any) -> None:
    """Say how much memory it will take to train a model of `config` (a GPTConfig) with the settings `s`.

    Builds nothing. Raises UserError if the model certainly does not fit: by what least_memory counts, so a model that
    passes may still not fit.
    """
    dtype, compiled = resolve_dtype(s.dtype, device), asks_to_compile(s.compile, device)
    run = Load.of(s, dtype=dtype_name(dtype), compile=compiled, gpus=processes, cpu=device.type == "cpu")
    if not s.eval_only:
        who = "the estimate of memory (fusedgpt/estimates/training_memory.py)"
        why = dimensions.unknown(config, who, dimensions.COUNTED)
        say(f"memory: not estimated: {why}" if why else in_words(Memory.of(config, run), processes))
    needed = least_memory(config, s.batch_size, dtype.itemsize, not s.eval_only, s.optimizer == "muon", run.shards)
    there = memory.total_memory(device)
    if needed > there:
        place = {"cuda": str(device)}.get(device.type, "this machine or its container")
        needed, there = (f"{n / 2**30:,.1f} GiB" for n in (needed, there))
        what = f"{config.num_params:,} parameters with the logits of {s.batch_size} x {config.block_size} tokens"
        how = "lower --batch_size, --n_layer, --n_embd, --block_size or --vocab_size"
        raise UserError(f"{what} need {needed} of memory or more, and {place} has {there}: {how}")


def in_words(estimate: Memory, processes: int) -> str:
    """An estimate in one line: the total, and each part of it."""
    shown = {name: round(each / 2**20) for name, each in dataclasses.asdict(estimate).items()}
    parts = ", ".join(f"{name} {each:,}" for name, each in shown.items() if each)
    whose = f" in each of {processes} processes" * (processes > 1)
    return f"memory: about {estimate.total / 2**20:,.0f} MiB of tensors{whose}: {parts}"
