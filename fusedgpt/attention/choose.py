"""Which attention kernel a setting means here, and for `auto` which one is fastest."""

import torch

from fusedgpt.attention.case import Case
from fusedgpt.attention.permitted import as_run, refusal, require, why, wrong
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.errors import UserError
from fusedgpt.machine import timing, turns

SECONDS = 0.2  # of a race of kernels on a CPU
SAMPLES = 2  # of a kernel in a turn
QUICK_SCORES = 2**19  # of all heads together, in a race on a CPU


def choose(name: str, *cases: Case, before: str | None = None, compiled: bool = False) -> tuple[str, dict]:
    """The kernel that the setting `name` means for `cases`, and the trial of each kernel that 'auto' timed.

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

    A kernel must be permitted in all cases. Kernels take turns (machine/turns.py). The fastest must pass parity in all
    cases, and in the first one compiled too if the model will be `compiled`, or the next one is tried. Raises UserError
    if none is left.
    """
    trials = {name: {"refused": refusal(name, *cases)} for name in SINGLE_KERNELS}
    for name in _raced(trials, cases[0]):
        faults = (wrong(name, case, compiled and case is cases[0], trials[name]) for case in reversed(cases))
        fault = next(filter(None, faults), None)
        if not fault:
            return name, trials
        trials[name] = {"refused": fault}
    refused = "; ".join(f"{name}: {trial['refused']}" for name, trial in trials.items())
    advice = ". Lower --batch_size" if cases[0].backward else ""
    raise UserError(f"attention='auto' found no kernel that can run here: {refused}{advice}")


def _raced(trials, case):
    """The names of those not refused, from the fastest on. Adds the times to `trials`, or why one failed."""
    seconds = 0.0
    if case.device.type == "cpu":
        case, seconds = _quick(case, torch.get_num_threads()), SECONDS
    names = [name for name, trial in trials.items() if not trial["refused"]]
    laps = turns.race({name: _turn(as_run(name, case), case) for name in names}, seconds)
    for name, error in laps.failed.items():
        trials[name] = {"refused": why(error)}
    for name in laps.by_speed():
        trials[name] |= timing.summary(laps.of(name))
    return laps.by_speed()


def _turn(attend, case):
    """The turn of a kernel in a race on `case`. Its inputs and its graph are freed after each, for those of others."""

    def take(seconds):
        inputs = case.inputs()
        steps, _ = timing.of_a_kernel(lambda: case.run(attend, *inputs), case.device)
        return steps.make(SAMPLES)

    return take


def _quick(case, threads):
    """`case` with just enough heads to tell which kernel is fastest on a CPU. On a GPU a trial shows that all fit."""
    B, nh, T, _ = case.shape
    enough = max(QUICK_SCORES // T**2, 2 * threads)  # every thread has some heads
    kv_heads = case.kv_heads or nh
    return case.of_heads(min(B, -(-enough // nh)), min(kv_heads, -(-enough * kv_heads // nh)))
