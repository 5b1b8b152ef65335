"""What `auto` means for a run: attention and dtype, settled by timing this model on this machine, and compile.

What was timed is remembered (fusedgpt/machine/choices.py), so that a command that is given again computes the same.
"""

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedgpt.attention import choose
from fusedgpt.attention.case import Case
from fusedgpt.machine import choices, timing, turns
from fusedgpt.machine.device import DTYPES, autocast, dtype_name, resolve_compile, resolve_dtype

ENOUGH_FLOPS = 5e10  # a forward and backward of this size tell which dtype is faster
LEAST_TOKENS = 64  # on fewer, a step of a large model would mostly cast its weights
SECONDS = 0.3  # of a race of dtypes


@dataclass(frozen=True)
class Settled:
    """What a run computes with, and why."""

    attention: str
    attention_trials: dict[str, dict]  # trials of auto; see choose.fastest
    dtype: torch.dtype
    dtype_trials: dict[str, float]  # ms of a forward and backward by dtype, if it was timed
    compiled: bool
    why_eager: str  # empty if there is no reason to give
    timed: str = ""  # when: now, or remembered from then; empty if nothing was timed
    notes: tuple[str, ...] = ()  # what was wrong with the file of remembered choices


def settle(
    s: Any, model: torch.nn.Module, cases: list[Case], batch: tuple[Tensor, Tensor], before: Mapping | None
) -> Settled:
    """Settle attention, dtype and compile of the settings `s` for a model.

    cases: each attention that layers have. batch: a micro-batch (x, y), of which the timing uses a part. before: the
    choices of the run that is resumed ('attention', 'dtype', 'compile'), which stay if they can run here; else None. A
    deterministic run follows rules alone, because timing could choose differently at the next start. Raises UserError
    if a named kernel cannot run here.
    """
    device = cases[0].device
    may_time = cases[0].backward and not next(model.parameters()).is_meta
    dtypes = _dtypes(s.dtype, device, may_time)
    if before is not None or s.deterministic or not (s.attention == "auto" or len(dtypes) > 1):
        return _by_rules(s, cases, before or {})
    return _by_timing(s, model, cases, batch, dtypes)


def _by_rules(s, cases, before):
    device = cases[0].device
    wish = before.get("compile", "auto") if s.compile == "auto" else s.compile
    compiled, why_eager = resolve_compile(wish, device)
    dtypes = _dtypes(s.dtype, device, may_time=True)
    dtype = next((d for d in dtypes if dtype_name(d) == before.get("dtype")), dtypes[0])
    name = "sdpa" if s.attention == "auto" and s.deterministic else s.attention
    attention, trials = choose.choose(name, *_in(dtype, cases), before=before.get("attention"), compiled=compiled)
    return Settled(attention, trials, dtype, {}, compiled, why_eager)


def _in(dtype, cases):
    return [replace(case, dtype=dtype) for case in cases]


def _dtypes(setting, device, may_time):
    """The dtypes to choose from. float32 may win on a CPU that has bfloat16: small models gain little from it."""
    first = resolve_dtype(setting, device)
    if setting == "auto" and device.type == "cpu" and first != torch.float32 and may_time:
        return [first, torch.float32]
    return [first]


def _by_timing(s, model, cases, batch, dtypes):
    """What `auto` leaves open in a new run, timed now or remembered."""
    compiled, why_eager = resolve_compile(s.compile, cases[0].device)
    memory = choices.Choices(again=s.choose == "again")
    config = replace(model.config, attention="sdpa")  # what it is set to now does not matter
    # a model that ranks share has no weights yet, and so no dtype that was timed
    case = {"for": "kernel and dtype", "steps": len(dtypes) > 1, "model": str(config), "batch": [*batch[0].shape]}
    case |= {"cases": [*map(str, cases)], "asked": [s.attention, s.dtype, s.compile]}
    case |= choices.machine(cases[0].device)
    found = memory.recall(case)
    if found and _can_run(s.attention, found, cases, compiled):
        when = f"remembered from {found['when']}"
    else:
        found, when = _timed(s.attention, model, cases, batch, dtypes, compiled), "timed now"
        memory.remember(case, found)
    settled = found["attention"], found["attention_trials"], DTYPES[found["dtype"]], found["dtype_trials"]
    return Settled(*settled, compiled, why_eager, when, tuple(memory.notes))


def _timed(attention, model, cases, batch, dtypes, compiled):
    """The attention and the dtype that are fastest, and their trials."""
    picks = {dtype: choose.choose(attention, *_in(dtype, cases), compiled=compiled) for dtype in dtypes}
    dtype, trials = dtypes[0], {}
    if len(dtypes) > 1:
        trials = _step_ms(model, batch, {each: name for each, (name, _) in picks.items()})
        dtype = DTYPES[next(iter(trials))]
    return dict(zip(("attention", "attention_trials"), picks[dtype]), dtype=dtype_name(dtype), dtype_trials=trials)


def _can_run(attention, past, cases, compiled):
    cases = _in(DTYPES[past["dtype"]], cases)
    if attention == "auto":
        return choose.still_runs(past["attention"], *cases, compiled=compiled)
    choose.choose(attention, *cases, compiled=compiled)  # raises if the kernel cannot run
    return True


def _step_ms(model, batch, attention):
    """Milliseconds of a forward and backward on a part of `batch`, in each dtype of {dtype: kernel}."""
    (B, T), device = batch[0].shape, batch[0].device
    tokens = max(LEAST_TOKENS, int(ENOUGH_FLOPS / model.config.flops_per_token))
    b, t = min(B, max(1, tokens // T)), min(T, tokens)
    x, y = (part[:b, :t] for part in batch)

    def step(dtype):
        model.use_attention(attention[dtype])
        with autocast(device, dtype):
            _, loss = model(x, y, logits=False)
        loss.backward()
        model.zero_grad(set_to_none=True)

    contenders = {dtype: timing.Steps(functools.partial(step, dtype), device, warmup=0) for dtype in attention}
    laps = turns.race(contenders, device, SECONDS)
    return {dtype_name(dtype): statistics.median(laps.of(dtype)) for dtype in laps.by_speed()}
