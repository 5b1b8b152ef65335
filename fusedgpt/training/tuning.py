"""What `auto` means for a run: attention and dtype, settled by timing this model on this machine, and compile."""

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedgpt.attention import choose
from fusedgpt.attention.case import Case
from fusedgpt.machine import timing, turns
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


def settle(
    s: Any, model: torch.nn.Module, cases: list[Case], batch: tuple[Tensor, Tensor], before: Mapping | None
) -> Settled:
    """Settle attention, dtype and compile of the settings `s` for a model.

    cases: each attention that layers have. batch: a micro-batch (x, y), of which the timing uses a part. before: the
    choices of the run that is resumed ('attention', 'dtype', 'compile'), which stay if they can run here; else None. A
    deterministic run follows rules alone, because timing could choose differently at the next start. Raises UserError
    if a named kernel cannot run here.
    """
    device, may_time = cases[0].device, before is None and not s.deterministic
    may_time = may_time and cases[0].backward and not next(model.parameters()).is_meta
    before = before or {}
    wish = before.get("compile", "auto") if s.compile == "auto" else s.compile
    compiled, why_eager = resolve_compile(wish, device)
    name = "sdpa" if s.attention == "auto" and s.deterministic else s.attention
    dtypes = [resolve_dtype(s.dtype, device)]
    if s.dtype == "auto" and device.type == "cpu" and dtypes[0] != torch.float32:  # small models gain little from it
        dtypes.append(torch.float32)
    if not may_time:
        dtypes = [dtype for dtype in dtypes if dtype_name(dtype) == before.get("dtype")] or dtypes[:1]

    def kernel(dtype):
        of_dtype = [replace(case, dtype=dtype) for case in cases]
        return choose.choose(name, *of_dtype, before=before.get("attention"), compiled=compiled)

    picks, dtype_trials = {dtype: kernel(dtype) for dtype in dtypes}, {}
    if len(dtypes) > 1:
        dtype_trials = _step_ms(model, batch, {dtype: name for dtype, (name, _) in picks.items()})
        dtypes = [DTYPES[next(iter(dtype_trials))]]
    return Settled(*picks[dtypes[0]], dtypes[0], dtype_trials, compiled, why_eager)


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
    laps = turns.race(contenders, SECONDS)
    return {dtype_name(dtype): statistics.median(laps.of(dtype)) for dtype in laps.by_speed()}
