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
        if before and not refusal(before, *cases):
            return before, {}
        return fastest(*cases, compiled=compiled)
    for case in cases:
        require(name, case, compiled)
    return name, {}


def fastest(*cases: Case, compiled: bool = False) -> tuple[str, dict[str, dict]]:
    """The fastest kernel for the first case, and the trial of each kernel: its time, or why it has none.

    A kernel must be permitted in all cases. Kernels take turns (machine/turns.py). The fastest must pass parity, in the
    other cases on one head, or the next one is tried. If the model will be `compiled`, the kernel alone is compiled for
    parity; on a GPU it is also timed compiled (on a CPU compiling takes seconds). Raises UserError if none is left.
    """
    trials = {name: {"refused": refusal(name, *cases)} for name in SINGLE_KERNELS}
    attends = {name: as_run(name, cases[0]) for name, trial in trials.items() if not trial["refused"]}
    laps, made = _raced(trials, attends, cases[0]), {}
    order = laps.by_speed()
    if compiled and cases[0].device.type == "cuda":
        made = {name: _compiled(name, cases[0]) for name in laps.turns}  # those that are not far behind
        order = [*_raced(trials, made, cases[0]).by_speed(), *(name for name in order if name not in made)]
    for name in order:
        if compiled and name not in made:
            made[name] = _compiled(name, cases[0])
        if why := _fault(name, cases, made.get(name), trials[name]):
            trials[name] = {"refused": why}
        else:
            return name, trials
    refused = "; ".join(f"{name}: {trial['refused']}" for name, trial in trials.items())
    advice = ". Lower --batch_size" if cases[0].backward else ""
    raise UserError(f"attention='auto' found no kernel that can run here: {refused}{advice}")


def _raced(trials, attends, case):
    """The laps of `attends`, {name: function}. Adds the times to `trials`, or why one failed; raises if all fail."""
    inputs, seconds = None, 0.0
    if case.device.type == "cpu":
        case, seconds = _quick(case, torch.get_num_threads()), SECONDS
        inputs = case.inputs()  # on a GPU these would take memory from the kernels
    laps = turns.race({name: _turn(attend, case, inputs) for name, attend in attends.items()}, seconds, TURN)
    for name, error in laps.failed.items():
        trials[name] = {"refused": _why(error)}
    for name in laps.by_speed():
        trials[name] |= timing.summary(laps.of(name))
    return laps


def _turn(attend, case, inputs):
    """The turn of a kernel in a race on `case`. On a GPU its inputs and graph are freed after each."""
    made = []

    def take(seconds):
        if made:
            return made[0](seconds)
        own = inputs or case.inputs()
        found, _ = timing.of_a_kernel(lambda: case.run(attend, *own), case.device)
        if case.device.type == "cuda":
            return found.make(SAMPLES)
        made.append(found)
        return found(seconds)

    return take


def _compiled(name, case):
    torch.compiler.reset()  # PyTorch counts recompilations over all kernels together
    return torch.compile(as_run(name, case), dynamic=False)


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


def _fault(name, cases, compiled, trial):
    """Why the kernel `name` fails parity or, `compiled`, runs another kernel; None if it may be taken.

    Adds the errors of the last comparison to `trial`.
    """
    try:
        for where, errors, dtype in _comparisons(name, cases, compiled):
            trial["errors"] = errors
            if not parity.passes(errors, dtype):
                return f"it fails parity with float64 {where}: {errors}"
        if compiled:  # the compiler may have replaced it
            inputs = cases[0].inputs()
            return contradiction(name, observe(lambda: cases[0].run(compiled, *inputs)), cases[0])
    except torch.AcceleratorError:  # the GPU has crashed, for every other kernel too
        raise
    except Exception as error:
        return _why(error)
    return None


def _comparisons(name, cases, compiled):
    """Yield (where, errors, dtype) of each comparison, last that of the first case."""
    case, *others = cases
    for each in others:
        each = parity.shortened(each, B=2).of_heads(1, 1)  # as for a kernel that is named
        yield f"on {each}", parity.compare(as_run(name, each), each), each.dtype
    sequences = 2 if case.device.type == "cpu" else None
    for where, errors in parity.checks(as_run(name, case), parity.shortened(case, sequences)):
        yield where, errors, case.dtype
    if compiled:  # only at the compiled shape: every other shape would take seconds to compile
        yield "compiled", parity.compare(compiled, parity.shortened(case), heads=2), case.dtype
