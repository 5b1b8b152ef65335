"""Which attention kernel a setting means here, and for `auto` which one is fastest."""

import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.attention.permitted import as_run, reasons, refusal, require
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.errors import UserError, out_of_memory
from fusedgpt.machine import timing, turns

SECONDS, TURN = 0.2, 0.002  # of a race of kernels on a CPU, and of a turn in it
SAMPLES = 10  # of a kernel on a GPU in a turn
QUICK_SCORES = 2**19  # of all heads together, in a race on a CPU


def choose(name: str, *cases: Case, before: str | None = None, compiled: bool = False) -> tuple[str, dict]:
    """The kernel that the setting `name` means for `cases`, and for 'auto' the trial of each kernel.

    before: the kernel of the run that is resumed; 'auto' keeps it if it still runs. compiled: whether the model will be
    compiled. Raises UserError, with the reason and what would run instead, if the named kernel cannot run here.
    """
    if name == "auto":
        if before and not refusal(before, *cases, compiled=compiled):
            return before, {}
        return fastest(*cases, compiled=compiled)
    for case in cases:
        require(name, case, compiled)
    return name, {}


def still_runs(name: str, *cases: Case, compiled: bool = False) -> bool:
    """Whether 'auto' may take the kernel `name` without a trial: it is permitted in all cases and passes parity."""
    return name in SINGLE_KERNELS and _Trial(name, cases, compiled).passes()


def fastest(*cases: Case, compiled: bool = False) -> tuple[str, dict[str, dict]]:
    """The fastest kernel for the first case, and the trial of each kernel: its time, or why it has none.

    A kernel must be permitted in all cases. Kernels take turns (machine/turns.py). The fastest must pass parity, in the
    other cases on one head, or the next one is tried. If the model will be `compiled`, the kernel alone is compiled for
    parity; on a GPU it is also timed compiled (on a CPU compiling takes seconds). Raises UserError if none is left.
    """
    trials = {name: _Trial(name, cases, compiled) for name in SINGLE_KERNELS}
    case = cases[0]
    if case.device.type == "cpu":
        case = _quick(case, torch.get_num_threads())
    order, near = _raced(trials, case)
    if compiled and case.device.type == "cuda":
        for name in near:
            trials[name].compile()
        order = [*_raced({name: trials[name] for name in near}, case)[0], *(name for name in order if name not in near)]
    for name in order:
        if trials[name].passes():
            return name, {name: trial.record() for name, trial in trials.items()}
    refused = "; ".join(f"{name}: {trial.refused}" for name, trial in trials.items())
    advice = ". Lower --batch_size" if case.backward else ""
    raise UserError(f"attention='auto' found no kernel that can run here: {refused}{advice}")


def _raced(trials, case):
    """(the names of `trials` from the fastest on, without those that are refused; those that are not far behind)."""
    inputs, seconds = None, 0.0
    if case.device.type == "cpu":
        inputs, seconds = case.inputs(), SECONDS  # on a GPU the inputs would take memory from the kernels
    contenders = {name: trial.turn(case, inputs) for name, trial in trials.items() if not trial.refused}
    laps = turns.race(contenders, case.device, seconds, TURN)  # raises if all fail
    for name, error in laps.failed.items():
        trials[name].refused = _why(error)
    for name in laps.by_speed():
        trials[name].ms = laps.of(name)
    return laps.by_speed(), [*laps.turns]


def _why(error):
    """Why a kernel cannot run, from what it raised."""
    if out_of_memory(error):
        return "out of memory at this shape"
    return f"{reasons((), error)} at this shape"


def _quick(case, threads):
    """`case` with just enough heads to tell which kernel is fastest on a CPU. On a GPU a trial shows that all fit."""
    B, nh, T, _ = case.shape
    enough = max(QUICK_SCORES // T**2, 2 * threads)  # every thread has some heads
    kv_heads = case.kv_heads or nh
    return case.of_heads(min(B, -(-enough // nh)), min(kv_heads, -(-enough * kv_heads // nh)))


class _Trial:
    """One kernel: its times in milliseconds, its errors, and why it was `refused`, if it was."""

    def __init__(self, name, cases, to_be_compiled):
        self.name, self.case, self.others, self.to_be_compiled = name, cases[0], cases[1:], to_be_compiled
        self.refused = refusal(name, *cases, compiled=to_be_compiled)
        self.attend, self.compiled, self.ms, self.timed, self.errors = as_run(name, self.case), False, [], "", None

    def compile(self):
        torch.compiler.reset()  # PyTorch counts recompilations over all kernels together
        self.attend, self.compiled = torch.compile(as_run(self.name, self.case), dynamic=False), True

    def turn(self, case, inputs):
        """Its turn in a race on `case`. On a GPU its inputs and graph are freed after each."""
        made = []

        def take(seconds):
            if made:
                return made[0](seconds)
            own = inputs or case.inputs()
            found, self.timed = timing.of_a_kernel(lambda: case.run(self.attend, *own), case.device)
            if case.device.type == "cuda":
                return found.make(SAMPLES)
            made.append(found)
            return found(seconds)

        return take

    def passes(self):
        """Whether it is permitted, passes parity and, if compiled, still runs the kernel that was asked for."""
        if self.refused:
            return False
        if self.to_be_compiled and not self.compiled:
            self.compile()
        try:
            for where, errors, dtype in self._checks():
                self.errors = errors
                if not parity.passes(errors, dtype):
                    self.refused = f"it fails parity with float64 {where}: {errors}"
                    return False
            if self.compiled:  # the compiler may have replaced it
                inputs = self.case.inputs()
                self.refused = contradiction(self.name, observe(lambda: self.case.run(self.attend, *inputs)), self.case)
        except torch.AcceleratorError:  # the GPU has crashed, for every other kernel too
            raise
        except Exception as error:
            self.refused = _why(error)
        return not self.refused

    def _checks(self):
        """Yield (where, errors, dtype) of each comparison, last that of the case itself."""
        for case in self.others:
            each = parity.shortened(case, B=2).of_heads(1, 1)  # as for a kernel that is named
            yield f"on {each}", parity.compare(as_run(self.name, each), each), each.dtype
        sequences = 2 if self.case.device.type == "cpu" else None
        for where, errors in parity.checks(as_run(self.name, self.case), parity.shortened(self.case, sequences)):
            yield where, errors, self.case.dtype
        if self.compiled:  # only at the compiled shape: every other shape would take seconds to compile
            yield "compiled", parity.compare(self.attend, parity.shortened(self.case), heads=2), self.case.dtype

    def record(self):
        """For run.json: why it was refused, its times, and its errors if it was compared."""
        record = {"refused": self.refused}
        if self.ms and not self.refused:
            record |= {"timed": self.timed} | timing.summary(self.ms)
        if self.errors:
            record["errors"] = self.errors
        return record
