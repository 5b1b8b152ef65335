"""Which attention kernel a setting means here, and for `auto` which one is fastest."""

import math
import statistics

import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.attention.permitted import as_run, reasons, refusal, require
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.errors import UserError, out_of_memory
from fusedgpt.machine import timing

CUTOFFS = (4, 2, 1.5)  # round i times only kernels that take at most CUTOFFS[i] times as long as the fastest
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


def still_runs(name: str, *cases: Case, compiled: bool = False) -> bool:
    """Whether 'auto' may take the kernel `name` without a trial: it is permitted in all cases and passes parity."""
    if name not in SINGLE_KERNELS:
        return False
    trial = _trial(name, cases, compiled)
    if compiled:
        trial.compile()
    return trial.passes()


def _refusal_of_any(name, cases, compiled):
    return next(filter(None, (refusal(name, case, compiled) for case in cases)), None)


def fastest(*cases: Case, compiled: bool = False) -> tuple[str, dict[str, dict]]:
    """The fastest kernel for the first case, and the trial of each kernel: its time, or why it has none.

    A kernel must be permitted in all cases. On a CPU kernels take turns call by call, so that other load on the machine
    hits all of them. The least time of each counts, because load only adds time, unless it holds up most calls: then
    the median on one thread. A kernel that is far behind drops out. The fastest must pass parity, in the other cases on
    one head, or the next one is tried. If the model will be `compiled`, the kernel alone is compiled for parity; on a
    GPU it is also timed compiled (on a CPU compiling takes seconds). Raises UserError if none is left.
    """
    trials = [_trial(name, cases, compiled) for name in SINGLE_KERNELS]
    case = trials[0].case
    trials = _timed_on_a_cpu(trials) if case.device.type == "cpu" else _timed_on_a_gpu(trials, compiled)
    for trial in sorted((trial for trial in trials if trial.ms), key=lambda trial: trial.least_ms):
        if compiled and not trial.compiled:
            trial.compile()
        if trial.passes():
            return trial.name, {trial.name: trial.record() for trial in trials}
    refused = "; ".join(f"{trial.name}: {trial.refused}" for trial in trials)
    advice = ". Lower --batch_size" if case.backward else ""
    raise UserError(f"attention='auto' found no kernel that can run here: {refused}{advice}")


def _trial(name, cases, compiled):
    case = cases[0]
    compared = parity.shortened(case, B=2 if case.device.type == "cpu" else None)  # all heads
    others = [parity.shortened(each, B=2).of_heads(1, 1) for each in cases[1:]]  # as for a kernel that is named
    refused = _refusal_of_any(name, cases, compiled)
    return _Trial(name, _quick(case, torch.get_num_threads()), compared, others, refused)


def _timed_on_a_cpu(trials):
    """The trials that count: on all threads or, of kernels that are far behind there, on one.

    If other programs hold up the calls on all threads, those on one thread count, because they hardly notice.
    """
    alone = _timed_on_one_thread(trials)
    ahead, ms = _ahead(alone.values(), CUTOFFS[0])
    quickest = min(ahead, key=lambda trial: trial.least_ms, default=None)
    likely, inputs = [trial for trial in trials if alone[trial.name] in ahead], trials[0].case.inputs()
    before = timing.usage()
    _turns(likely, ms, inputs)
    for cutoff in CUTOFFS[1:]:
        _turns(*_ahead(likely, cutoff), inputs)
    together = {trial.name: trial.ms for trial in likely if trial.ms}
    if quickest and quickest.name in together and timing.held_up(before, together[quickest.name], quickest.least_ms):
        together = {}
    return [trial if trial.refused or trial.name in together else alone[trial.name] for trial in trials]


def _timed_on_one_thread(trials):
    """{name: the same trial with fewer heads, with one time: the median of calls on one thread}."""
    alone = [_Trial(t.name, _quick(t.case, threads=2), t.compared, t.others, t.refused) for t in trials]
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


def _timed_on_a_gpu(trials, compiled):
    """The trials, timed as they are, and then, compiled if the model will be, those that are not far behind."""
    for trial in trials:
        trial.time(count=1, warmup=1)
    for trial in _ahead(trials, CUTOFFS[0])[0]:
        if compiled:
            trial.compile()
            trial.ms.clear()
        trial.time(count=10, warmup=1)
    return trials


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


class _Trial:
    """One kernel: its times on `case`, its errors on `compared`, and why it was `refused`, if it was.

    It is compared on `others` too: another layer's attention, or that of one query after many keys.
    """

    def __init__(self, name, case, compared, others, refused):
        self.name, self.case, self.compared, self.others, self.refused = name, case, compared, others, refused
        self.attend, self.compiled, self.ms, self.timed, self.errors = as_run(name, case), False, [], "", None

    def compile(self):
        torch.compiler.reset()  # PyTorch counts recompilations over all kernels together
        self.attend, self.compiled = torch.compile(as_run(self.name, self.case), dynamic=False), True

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
            for where, errors, dtype in self._checks():
                self.errors = errors
                if not parity.passes(self.errors, dtype):
                    self.refused = f"it fails parity with float64 {where}: {self.errors}"
                    return
            if self.compiled:  # the compiler may have replaced it
                self.refused = contradiction(self.name, observe(step), self.case)

        self._try(compare)
        return not self.refused

    def _checks(self):
        """Yield (where, errors, dtype) of each comparison, last that of the case itself."""
        for each in self.others:
            yield f"on {each}", parity.compare(as_run(self.name, each), each), each.dtype
        for where, errors in parity.checks(as_run(self.name, self.case), self.compared):
            yield where, errors, self.case.dtype
        if self.compiled:  # only at the compiled shape: every other shape would take seconds to compile
            yield "compiled", parity.compare(self.attend, parity.shortened(self.case), heads=2), self.case.dtype

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
