"""What `auto` means for a run: attention, dtype and compile, settled by timing this model on this machine.

What was timed is remembered (fusedgpt/machine/choices.py), so that a command that is given again computes the same.
"""

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, distributed

from fusedgpt.attention import choose
from fusedgpt.attention.case import Case
from fusedgpt.errors import UserError
from fusedgpt.machine import choices, timing
from fusedgpt.machine.device import DTYPES, autocast, dtype_name, resolve_compile, resolve_dtype
from fusedgpt.training import compiling

ENOUGH_FLOPS = 2e11  # a forward and backward of this size tell which dtype is faster; a slow CPU takes a second
LEAST_TOKENS = 64  # on fewer, a step of a large model would mostly cast its weights
MORE_TIMINGS = 3  # time each dtype so many times after the first; its fastest time counts
PASSES = 0.6  # share of a run's minutes that its forward and backward passes take at least


@dataclass(frozen=True)
class Settled:
    """What a run computes with, and why."""

    attention: str
    attention_trials: dict[str, dict]  # trials of auto; see choose.fastest
    dtype: torch.dtype
    dtype_trials: dict[str, float]  # ms of a forward and backward by dtype, if it was timed
    compiled: bool
    why_eager: str  # empty if there is no reason to give
    compile_trials: dict[str, Any] = field(default_factory=dict)  # why `auto` compiles or not; see compiling.weigh
    timed: str = ""  # when: now, or remembered from then; empty if nothing was timed
    notes: tuple[str, ...] = ()  # what was wrong with the file of remembered choices


def settle(
    s: Any, model: torch.nn.Module, cases: list[Case], batch: tuple[Tensor, Tensor], calls: int, before: Mapping | None
) -> Settled:
    """Settle attention, dtype and compile of the settings `s` for a model that will make `calls` forward passes.

    cases: each attention that layers have. batch: a micro-batch (x, y); the timing uses a part and changes no weights.
    before: the earlier choices of a resumed run ('attention', 'dtype', 'compile'), which stay if they can run here;
    None for a new run. A deterministic run follows rules alone, because timing could choose differently at the next
    start. Raises UserError if a named kernel cannot run here.
    """
    device = cases[0].device
    may_time = cases[0].backward and not next(model.parameters()).is_meta
    dtypes = _dtypes(s.dtype, device, may_time)
    weighs = may_time and s.compile == "auto" and device.type == "cpu"
    if before is not None or s.deterministic or not (s.attention == "auto" or len(dtypes) > 1 or weighs):
        return _by_rules(s, cases, before or {})
    return _Auto(s, model, cases, batch, dtypes).settled(calls, weighs)


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
    open_ = setting == "auto" and device.type == "cpu" and first != torch.float32 and may_time
    return [first, torch.float32] if open_ else [first]


class _Auto:
    """What `auto` leaves open in a new run, timed now or remembered."""

    def __init__(self, s, model, cases, batch, dtypes):
        self.s, self.model, self.cases, self.batch, self.dtypes = s, model, cases, batch, dtypes
        self.compiled, self.why_eager = resolve_compile(s.compile, cases[0].device)
        self.memory = choices.Choices(again=s.choose == "again")
        config = replace(model.config, attention="sdpa")  # what it is set to now does not matter
        self.case = {"model": str(config), "batch": [*batch[0].shape], "cases": [*map(str, cases)]}
        self.case |= {"asked": [s.attention, s.dtype, s.compile], **choices.machine(cases[0].device)}

    def settled(self, calls: int, weighs: bool) -> Settled:
        """What a run of `calls` forward passes computes with. weighs: whether to weigh compiling. Raises UserError."""
        found = self._kernel_and_dtype(weighs)
        compiled, why_eager, numbers = self.compiled, self.why_eager, {}
        if weighs:
            numbers = self._compile(found, calls)
            compiled, why_eager = numbers["compile"], numbers["why_eager"]
            found |= {name: numbers[name] for name in ("attention", "attention_trials") if name in numbers}
        when = f"remembered from {found['when']}" if "when" in found else "timed now"
        settled = found["attention"], found["attention_trials"], DTYPES[found["dtype"]], found["dtype_trials"]
        return Settled(*settled, compiled, why_eager, numbers, when, tuple(self.memory.notes))

    def _kernel_and_dtype(self, weighs):
        """Attention and dtype, their trials, and the milliseconds `ms` of an eager forward and backward, if timed."""
        steps = weighs or len(self.dtypes) > 1  # not if ranks share the model, which has no weights yet
        case = {"for": "kernel and dtype", "steps": steps, **self.case}
        if (past := self.memory.recall(case)) and self._can_run(past):
            return past
        picks = {d: choose.choose(self.s.attention, *_in(d, self.cases), compiled=self.compiled) for d in self.dtypes}
        dtype, ms, trials = self.dtypes[0], None, {}
        if steps:
            times, share = _step_ms(self.model, self.batch, {d: attention for d, (attention, _) in picks.items()})
            dtype = min(times, key=times.get)
            ms, trials = times[dtype] / share, {dtype_name(d): each for d, each in times.items()}
        attention, attention_trials = picks[dtype]
        found = {"attention": attention, "attention_trials": attention_trials, "dtype": dtype_name(dtype)}
        found |= {"dtype_trials": trials, "ms": ms}
        self.memory.remember(case, found)
        return found

    def _can_run(self, past):
        cases = _in(DTYPES[past["dtype"]], self.cases)
        if self.s.attention == "auto":
            return choose.still_runs(past["attention"], *cases, compiled=self.compiled)
        choose.choose(self.s.attention, *cases, compiled=self.compiled)  # raises if the kernel cannot run
        return True

    def _compile(self, found, calls):
        """What compiling.decide says; if it compiles, the model has run compiled already."""
        limit = min(60 * self.s.minutes if self.s.minutes else math.inf, self.s.max_seconds or math.inf)
        passes = calls * found["ms"] / 1e3 if not self.s.minutes else math.inf  # minutes set the number of steps
        length = {"calls": calls, "minutes": self.s.minutes, "max_seconds": self.s.max_seconds}
        case = {**self.case, "chosen": [found["attention"], found["dtype"]]}
        how = min(passes, PASSES * limit), len(self.model.transformer.h)
        return compiling.decide(self.memory, case, length, *how, functools.partial(self._attempt, found))

    def _attempt(self, found, compare, before):
        """Compile the model as the run will. Raises UserError if its kernel does not run so."""
        began, device, dtype = time.perf_counter(), self.cases[0].device, DTYPES[found["dtype"]]
        possible, why = resolve_compile(True, device)
        if not possible:
            raise UserError(why)
        named = {each: before[each] for each in ("attention", "attention_trials") if each in before}
        cases, name = _in(dtype, self.cases), named.get("attention", found["attention"])
        if self.s.attention != "auto":
            choose.choose(self.s.attention, *cases, compiled=True)
        elif not choose.still_runs(name, *cases, compiled=True):
            name, trials = choose.choose("auto", *cases, compiled=True)
            named = {"attention": name, "attention_trials": trials}
        if distributed.is_initialized():  # other graphs: DDP and FSDP cut them
            return named
        self.model.use_attention(name)
        checked = time.perf_counter() - began
        x, y = self.batch
        compiled = torch.compile(self.model._call_impl)  # as model.compile() does: the run takes these graphs

        def evaluate():
            self.model.eval()
            try:
                with torch.no_grad(), autocast(device, dtype):
                    compiled(x, y, logits=False)
            finally:
                self.model.train()

        passes = (functools.partial(_forward_backward, self.model, f, x, y, dtype) for f in (self.model, compiled))
        numbers = compiling.measured(*passes, evaluate, compare)
        return {**named, **numbers, "compile_s": numbers["compile_s"] + checked}


def _forward_backward(model, forward, x, y, dtype):
    with autocast(x.device, dtype):
        _, loss = forward(x, y, logits=False)
    loss.backward()
    model.zero_grad(set_to_none=True)


def _step_ms(model, batch, attention):
    """Milliseconds of a forward and backward in each dtype of {dtype: kernel}, and the share of the batch used."""
    (B, T), device = batch[0].shape, batch[0].device
    tokens = max(LEAST_TOKENS, int(ENOUGH_FLOPS / model.flops_per_token()))
    b, t = min(B, max(1, tokens // T)), min(T, tokens)
    x, y = (part[:b, :t] for part in batch)
    ms = {dtype: [] for dtype in attention}

    def sample(dtype, warmup):
        model.use_attention(attention[dtype])
        step = functools.partial(_forward_backward, model, model, x, y, dtype)
        ms[dtype] += timing.own_samples(step, device, count=1, warmup=warmup)

    for warmup in (1, *[0] * MORE_TIMINGS):  # dtypes take turns, so that other load hits them all
        for dtype in attention:
            sample(dtype, warmup)
    return {dtype: min(each) for dtype, each in ms.items()}, b * t / (B * T)
