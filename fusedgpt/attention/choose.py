"""Which attention kernels this machine permits, and which of them is fastest.

A named kernel runs, or the program ends with the reason; nothing falls back in silence.
"""

import contextlib
import inspect
import math
import statistics
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch

from fusedgpt.attention import flash_impl, parity
from fusedgpt.attention.case import Attend, Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.attention.table import KERNELS, SINGLE_KERNELS, is_own
from fusedgpt.errors import UserError, first_line, out_of_memory
from fusedgpt.machine import timing
from fusedgpt.machine.device import autocast, dtype_name, tf32

CUTOFFS = (4, 2, 1.5)  # round i times only kernels that take at most CUTOFFS[i] times as long as the fastest
MOST_COMPARED = 2048  # tokens of the longest comparison with float64: the scores of two heads then take 0.3 GB
# a trial on a CPU: milliseconds and least calls in a round; scores of all heads together. Short calls and many: some of
# them are not disturbed, even beside other programs
QUICK_MS, LEAST_CALLS, QUICK_SCORES = 40, 4, 2**19


def choose(name: str, *cases: Case, before: str | None = None, compiled: bool = False) -> tuple[str, dict]:
    """The kernel that the setting `name` means for `cases`, and for 'auto' the trial of each kernel.

    'auto' takes the kernel that is fastest on the first case, among those that can run all cases. before: the kernel of
    the run that is resumed; 'auto' keeps it if it still runs. compiled: whether the model will be compiled. Raises
    UserError, with the reason and what would run instead, if the named kernel cannot run here.
    """
    if name == "auto":
        kept = before and not _refusal_of_any(before, cases, compiled)
        return (before, {}) if kept else fastest(*cases, compiled=compiled)
    for case in cases:
        require(name, case, compiled)
    return name, {}


def require(name: str, case: Case, compiled: bool = False) -> None:
    """Raise UserError, with the reason and what would run instead, unless the kernel `name` can run `case` here.

    Its results must also agree with float64, or it would silently train another model. A kernel of ours is compared on
    one head; a user's own must pass parity.checks.
    """
    if reason := refusal(name, case, compiled) or _wrong(name, case, compiled):
        others = [other for other in KERNELS if other != name and not refusal(other, case, compiled)]
        doing = "train" if case.backward else "run"
        raise UserError(
            f"attention='{name}' cannot {doing} on {case.device.type} in {dtype_name(case.dtype)}"
            f" with dropout {case.dropout:g}: {reason}. Here --attention can be {', '.join(others)} or auto."
        )


@tf32(allowed=False)  # TF32 would round float32 in every kernel
def _wrong(name, case, compiled):
    """Why the kernel `name` does not compute causal attention with `case`'s dropout, or None if it does."""
    try:
        for where, errors in _comparisons(name, case, compiled):
            if not parity.passes(errors, case.dtype):
                what = "attention within documents" if case.packed else "causal attention"
                what += f" in a window of {case.window}" if case.window else ""
                return (
                    f"it is not {what}: {where} its errors against float64 are {errors}. A change of the function,"
                    " such as a window, belongs to the model (Dimensions), which saves it with the weights"
                )
        if is_own(name) and case.dropout and not _drops(name, case):
            return "it ignores dropout_p: two runs with different random numbers give the same result"
    except torch.AcceleratorError:
        raise
    except Exception as error:  # a user's own kernel may raise anything at a shape for which it was not written
        given = f" (k and v have {case.kv_heads} heads, q has {case.shape[1]})" if case.grouped else ""
        return f"it fails in the comparison with float64: {reasons((), error)}{given}"
    return None


def _comparisons(name, case, compiled):
    """(where, errors) of the comparisons with float64: one head for a kernel of ours, all checks for a user's own."""
    attend, whole = as_run(name, case), _shortened(_two_sequences(case))
    if not is_own(name):
        yield "on one head", parity.compare(attend, whole.of_heads(1, 1))
        return
    yield from parity.checks(attend, whole)
    if case.shape[2] > MOST_COMPARED:  # a window could be longer
        last = case.of_heads(1, 1)
        last = replace(last, shape=(1, last.shape[1], 64, case.shape[3]), keys=case.shape[2], backward=False)
        yield f"for the last 64 of {case.shape[2]} tokens", parity.compare(as_run(name, last), last)
    if compiled:
        torch.compiler.reset()
        yield "compiled", parity.compare(torch.compile(attend, dynamic=False), whole, heads=2)


def still_runs(name: str, *cases: Case, compiled: bool = False) -> bool:
    """Whether 'auto' may take the kernel `name` without a trial: it is permitted in all cases and passes parity."""
    if name not in SINGLE_KERNELS:
        return False
    trial = _trial(name, cases, compiled)
    if compiled:
        trial.compile()
    return trial.passes()


def _drops(name, case):
    probe = replace(case.of_heads(1, 1), backward=False)
    attend, inputs = as_run(name, case), probe.inputs()
    torch.manual_seed(0)
    (first,) = probe.run(attend, *inputs)
    (second,) = probe.run(attend, *inputs)
    return not torch.equal(first, second)


def _refusal_of_any(name, cases, compiled):
    return next(filter(None, (refusal(name, case, compiled) for case in cases)), None)


def refusal(name: str, case: Case, compiled: bool = False) -> str | None:
    """Why the kernel `name` cannot run `case` here, in a model that is `compiled` or not; None if it can.

    The kernel is run once, on one head of one sequence, under the profiler. If deterministic algorithms are required,
    it runs twice and the gradients must agree to the bit.
    """
    if name == "flex" and case.device.type == "cpu" and case.packed:
        return "on a CPU PyTorch cannot compile FlexAttention within documents for lengths that vary"  # 2.13
    level = torch.backends.cpu.get_cpu_capability()
    if name == "flex" and case.device.type == "cpu" and case.backward:
        return "PyTorch has no backward of FlexAttention on a CPU"
    if name == "flex" and case.device.type == "cpu" and compiled:
        return "FlexAttention cannot run inside a compiled model on a CPU"
    if name == "flex" and case.device.type == "cpu" and case.shape[-1] in (8, 16) and level == "AVX2":
        return "PyTorch computes it wrongly for heads of 8 and 16 on a CPU with AVX2 only"  # 8, 24, 40, … keys; 2.13
    if name == "flex" and case.dropout > 0:
        return "FlexAttention has no dropout"
    if name in KERNELS and KERNELS[name].gpu_only and case.device.type == "cpu":
        return "PyTorch has it on GPUs only"
    if name in ("flash", "flash3", "flash4") and case.window and case.device.type == "cuda":
        return "SDPA has no argument for a window, and on a GPU its flash kernel takes no mask that could stand for it"
    if is_own(name) and case.packed and not _takes(name, "documents"):
        return "it must take an argument `documents` for mask=document: the document of each key, (B, Tk)"
    if is_own(name) and case.window and not _takes(name, "window"):
        return "it must take an argument `window` for a model with a window: the number of keys that a query sees"
    probe = case.of_heads(1, 1)
    attend, inputs, results = as_run(name, probe), probe.inputs(), []

    def step():
        torch.manual_seed(0)
        results.append(probe.run(attend, *inputs))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            receipt = observe(step)
            if torch.are_deterministic_algorithms_enabled():
                step()
        except torch.AcceleratorError:  # the GPU itself has crashed, so nothing else would run on it
            raise
        except Exception as error:  # a kernel, its compiler and its package each raise types of their own
            reason = flash_impl.explained(name, error, reasons(caught, error))
            if case.grouped and "to have the same num_heads" in reason:  # `efficient` in PyTorch 2.13
                reason = f"SDPA's {name} kernel takes no heads of queries that share keys and values (n_kv_head)"
            only_forward = case.backward and not refusal(name, replace(case, backward=False))
            return f"it runs forward, but not backward: {reason}" if only_forward else reason
    if len(results) == 2 and not all(torch.equal(a, b) for a, b in zip(*results)):
        return "it is not deterministic: two runs gave different gradients"
    return contradiction(name, receipt, case)


def _takes(name, mask):
    try:
        inspect.signature(ATTENTION[name]).bind("q", "k", "v", "dropout_p", **{mask: None})
    except TypeError:
        return False
    return True


def as_run(name: str, case: Case) -> Attend:
    """The attention function `name` as the scripts call it: training under autocast, generation without."""

    def attend(*inputs, **masks):
        with autocast(case.device, case.dtype) if case.backward else contextlib.nullcontext():
            return ATTENTION[name](*inputs, **masks)

    return attend


def reasons(caught: Iterable[warnings.WarningMessage], error: Exception) -> str:
    """Why a kernel raised `error`, in one phrase. PyTorch explains its refusals in warnings, which were `caught`."""
    if not any(sign in str(error) for sign in ("No available kernel", "No viable backend")):
        caught = ()  # another kind of error: the warnings are about something else
    said = dict.fromkeys(str(w.message).split(" (Triggered internally")[0].rstrip(". ") for w in caught)
    found = [r for r in said if "not used because" not in r and "runtime disabled" not in r]
    return "; ".join(found) or first_line(error) or type(error).__name__  # never empty, which would mean permitted


def fastest(*cases: Case, compiled: bool = False) -> tuple[str, dict[str, dict]]:
    """The fastest kernel for the first case, and the trial of each kernel: its time, or why it has none.

    A kernel must be permitted in all cases. On a CPU kernels take turns call by call, so that other load on the machine
    hits all of them. The least time of each counts, because load only adds time, unless it holds up most calls: then
    the median on one thread. A kernel that is far behind drops out. The fastest must pass parity, or the next one is
    tried. If the model will be `compiled`, the kernel alone is compiled for parity; on a GPU it is also timed compiled
    (on a CPU compiling takes seconds). Raises UserError if none is left.
    """
    trials = [_trial(name, cases, compiled) for name in SINGLE_KERNELS]
    case = trials[0].case
    _take_turns(trials) if case.device.type == "cpu" else _take_turns_on_a_gpu(trials, compiled)
    for trial in sorted((trial for trial in trials if trial.ms), key=lambda trial: trial.least_ms):
        if compiled and not trial.compiled:
            trial.compile()
        if trial.passes():
            return trial.name, {trial.name: trial.record() for trial in trials}
    refused = "; ".join(f"{trial.name}: {trial.refused}" for trial in trials)
    advice = ". Lower --batch_size" if case.backward else ""
    raise UserError(f"attention='auto' found no kernel that can run here: {refused}{advice}")


def _trial(name, cases, compiled):
    compared = _two_sequences(cases[0]) if cases[0].device.type == "cpu" else cases[0]  # all heads
    return _Trial(name, _quick(cases[0], torch.get_num_threads()), compared, _refusal_of_any(name, cases, compiled))


def _take_turns(trials):
    """Time kernels on a CPU, a call of each at a time; after each of CUTOFFS, without those that are far behind.

    First on one thread, which hardly notices other programs. If these hold up the calls on all threads, the times on
    one thread count.
    """
    alone = _on_one_thread(trials)
    for trial in trials:
        trial.take(alone[trial.name])
    inputs, (ahead, ms) = trials[0].case.inputs(), _ahead(trials, CUTOFFS[0])
    quickest = min(ahead, key=lambda trial: trial.least_ms, default=None)
    for trial in ahead:
        trial.ms = []
    before = timing.usage()
    _turns(ahead, ms, inputs)
    for cutoff in CUTOFFS[1:]:
        _turns(*_ahead(ahead, cutoff), inputs)
    if quickest and quickest.ms and timing.held_up(before, quickest.ms, alone[quickest.name].least_ms):
        for trial in trials:
            trial.take(alone[trial.name])


def _on_one_thread(trials):
    """{name: the same trial with fewer heads, timed on one thread}."""
    alone = [_Trial(trial.name, _quick(trial.case, threads=2), trial.compared, trial.refused) for trial in trials]
    inputs = alone[0].case.inputs()
    with timing.on_one_thread():
        for trial in alone:
            trial.time(count=2, warmup=1, inputs=inputs)
        _turns(*_ahead(alone, CUTOFFS[1]), inputs)
    for trial in alone:
        trial.ms, trial.timed = [statistics.median(trial.ms)] if trial.ms else [], "calls on one thread, their median"
    return {trial.name: trial for trial in alone}


def _turns(trials, ms, inputs):
    """Time a call of each of `trials` at a time, of which the fastest takes so many `ms`, in a round."""
    for _ in range(min(10, LEAST_CALLS + int(QUICK_MS / ms))):
        for trial in trials:
            trial.time(count=1, warmup=0, inputs=inputs)


def _take_turns_on_a_gpu(trials, compiled):
    """Time kernels on a GPU, as they are, and then, compiled if the model will be, those that are not far behind."""
    for trial in trials:
        trial.time(count=1, warmup=1)
    for trial in _ahead(trials, CUTOFFS[0])[0]:
        if compiled:
            trial.compile()
            trial.ms.clear()
        trial.time(count=10, warmup=1)


def _ahead(trials, cutoff):
    """The kernels that take at most `cutoff` times as long as the fastest, and its time in milliseconds."""
    fastest_ms = min((trial.least_ms for trial in trials if trial.ms), default=math.inf)
    return [trial for trial in trials if trial.ms and trial.least_ms <= cutoff * fastest_ms], fastest_ms


def _quick(case, threads):
    """`case`; on a CPU, with just enough heads to tell which kernel is fastest. A trial on a GPU shows that all fit."""
    if case.device.type != "cpu":
        return case
    B, nh, T, _ = case.shape
    enough = max(QUICK_SCORES // T**2, 2 * threads)  # every thread has some heads
    kv_heads = case.kv_heads or nh
    return case.of_heads(min(B, -(-enough // nh)), min(kv_heads, -(-enough * kv_heads // nh)))


def _two_sequences(case):
    return replace(case, shape=(min(case.shape[0], 2), *case.shape[1:]))


def _shortened(case):
    return replace(case, shape=(*case.shape[:2], min(case.shape[2], MOST_COMPARED), case.shape[3]))


class _Trial:
    """One kernel: its times on `case`, its errors on `compared`, and why it was `refused`, if it was."""

    def __init__(self, name, case, compared, refused):
        self.name, self.case, self.compared, self.refused = name, case, compared, refused
        self.attend, self.compiled, self.ms, self.timed, self.errors = as_run(name, case), False, [], "", None

    def compile(self):
        torch.compiler.reset()  # PyTorch counts recompilations over all kernels together
        self.attend, self.compiled = torch.compile(as_run(self.name, self.case), dynamic=False), True

    def take(self, other):
        """Take over the times of the trial `other`, or why it was refused."""
        self.ms, self.timed, self.refused = other.ms.copy(), other.timed, other.refused

    def time(self, count, warmup, inputs=None):
        """Add `count` samples, unless the kernel is refused. inputs: of `case`, if several kernels share them."""

        def samples(step):
            if self.case.device.type == "cpu":
                ms, self.timed = timing.own_samples(step, self.case.device, count, warmup), "calls"
            else:
                ms, self.timed = timing.device_samples(step, self.case.device, count, warmup)
            self.ms += ms

        self._try(samples, inputs)

    @property
    def least_ms(self):
        return min(self.ms)

    def passes(self):
        """Whether it passes parity and, if compiled, still runs the kernel that was asked for."""

        def compare(step):
            for where, errors in self._checks():
                self.errors = errors
                if not parity.passes(self.errors, self.case.dtype):
                    self.refused = f"it fails parity with float64 {where}: {self.errors}"
                    return
            if self.compiled:  # the compiler may have replaced it
                self.refused = contradiction(self.name, observe(step), self.case)

        self._try(compare)
        return not self.refused

    def _checks(self):
        yield from parity.checks(as_run(self.name, self.case), _shortened(self.compared))
        if self.compiled:  # only at the compiled shape: every other shape would take seconds to compile
            yield "compiled", parity.compare(self.attend, _shortened(self.case), heads=2)

    def record(self):
        """For run.json: why it was refused, its times, and its errors if it was compared."""
        record = {"refused": self.refused}
        if self.ms and not self.refused:
            record |= {"timed": self.timed, "least_ms": self.least_ms} | timing.summary(self.ms)
        return record | ({"errors": self.errors} if self.errors else {})

    def _try(self, do, inputs=None):
        if self.refused:
            return
        try:
            inputs = inputs or self.case.inputs()
            do(lambda: self.case.run(self.attend, *inputs))
        except torch.AcceleratorError:  # the GPU has crashed, for every other kernel too
            raise
        except Exception as error:
            full = out_of_memory(error)
            self.refused = f"{'out of memory' if full else reasons((), error)} at this shape"
