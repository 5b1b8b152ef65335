"""What `auto` means for a run: attention, dtype and compile, settled by timing this model on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedgpt.attention import choose
from fusedgpt.attention.case import Case
from fusedgpt.machine import timing
from fusedgpt.machine.device import DTYPES, autocast, dtype_name, resolve_compile, resolve_dtype

ENOUGH_FLOPS = 2e11  # a forward and backward of this size tell which dtype is faster; a slow CPU takes a second
LEAST_TOKENS = 64  # on fewer, a step of a large model would mostly cast its weights
MORE_TIMINGS = 3  # time each dtype so many times after the first; its fastest time counts
# on a CPU compiling takes a minute or two, and then a step takes 6 to 11 % less
COMPILING_PAYS_AFTER = 30 * 60.0  # seconds of training


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
    s: Any, model: torch.nn.Module, cases: list[Case], batch: tuple[Tensor, Tensor], calls: int, before: Mapping | None
) -> Settled:
    """Settle attention, dtype and compile of the settings `s` for a model that will make `calls` forward passes.

    cases: each attention that layers have. batch: a micro-batch (x, y); the timing uses a part and changes no weights.
    before: the earlier choices of a resumed run ('attention', 'dtype', 'compile'), which stay if they can run here;
    None for a new run. A deterministic run follows rules alone, because timing could choose differently at the next
    start. Raises UserError if a named kernel cannot run here.
    """
    case, new, before = cases[0], before is None, before or {}
    device = case.device
    wish = before.get("compile", s.compile) if s.compile == "auto" else s.compile
    compiled, why_eager = resolve_compile(wish, device)
    dtypes = _dtypes(s.dtype, device, before.get("dtype"))
    timed = new and case.backward and not s.deterministic and not next(model.parameters()).is_meta
    if not timed:
        dtypes = dtypes[:1]
    if s.attention == "auto" and not s.deterministic:
        last = before.get("attention")
        picks = {d: choose.choose("auto", *_in(d, cases), before=last, compiled=compiled) for d in dtypes}
    else:
        name = "sdpa" if s.attention == "auto" else s.attention
        picks = {d: choose.choose(name, *_in(d, cases), compiled=compiled) for d in dtypes}
    dtype, trials = dtypes[0], {}
    may_compile = timed and wish == "auto" and device.type == "cpu"
    if len(dtypes) > 1 or may_compile:
        ms, share = _step_ms(model, batch, {d: attention for d, (attention, _) in picks.items()})
        dtype, trials = min(ms, key=ms.get), {dtype_name(d): each for d, each in ms.items()}
        seconds = 60 * s.minutes if s.minutes else calls * ms[dtype] / 1e3 / share
        seconds = min(seconds, s.max_seconds or float("inf"))
        if may_compile and seconds > COMPILING_PAYS_AFTER:
            compiled, why_eager = resolve_compile(True, device)
            if s.attention == "auto":  # choose again: the kernel must pass parity compiled too
                picks[dtype] = choose.choose("auto", *_in(dtype, cases), compiled=compiled)
        elif may_compile:
            why_eager = f"compiling pays after {COMPILING_PAYS_AFTER / 60:.0f} minutes, and this run takes"
            why_eager += f" about {max(1, round(seconds / 60))}"
    return Settled(*picks[dtype], dtype, trials, compiled, why_eager)


def _in(dtype, cases):
    return [replace(case, dtype=dtype) for case in cases]


def _dtypes(setting, device, before):
    """The dtypes to choose from. float32 may win on a CPU that has bfloat16: small models gain little from it."""
    first = resolve_dtype(setting, device)
    if setting != "auto" or device.type != "cpu" or first == torch.float32:
        return [first]
    return [DTYPES[before]] if before in ("bfloat16", "float32") else [first, torch.float32]


def _step_ms(model, batch, attention):
    """Milliseconds of a forward and backward in each dtype of {dtype: kernel}, and the share of the batch used."""
    (B, T), device = batch[0].shape, batch[0].device
    tokens = max(LEAST_TOKENS, int(ENOUGH_FLOPS / model.flops_per_token()))
    b, t = min(B, max(1, tokens // T)), min(T, tokens)
    x, y = (part[:b, :t] for part in batch)
    ms = {dtype: [] for dtype in attention}

    def sample(dtype, warmup):
        def step():
            with autocast(device, dtype):
                _, loss = model(x, y, logits=False)
            loss.backward()
            model.zero_grad(set_to_none=True)

        model.use_attention(attention[dtype])
        ms[dtype] += timing.samples(step, device, count=1, warmup=warmup)

    for warmup in (1, *[0] * MORE_TIMINGS):  # dtypes take turns, so that other load hits them all
        for dtype in attention:
            sample(dtype, warmup)
    return {dtype: min(each) for dtype, each in ms.items()}, b * t / (B * T)
