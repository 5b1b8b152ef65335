"""A run of so many minutes: how long it is, by a few of its own steps, and shorter if steps become much slower."""

import bisect
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusedgpt.errors import UserError
from fusedgpt.machine import timing
from fusedgpt.parallel.distributed import local
from fusedgpt.runs.progress import Cost
from fusedgpt.runs.resume import SETTLED
from fusedgpt.settings import Settings

# time steps for this share of the minutes: a few steps would tell the load of a moment
SHARE = 0.03
LONGEST_S = 20.0  # and no longer than this
EVALUATED = 4  # batches of each split that tell how long an evaluation takes
MOST_ITERATIONS = 10**9
TOO_LONG = 1.5  # a run that would take so many times the rest of its minutes is shortened


def settle(run: Any, step: Callable, began: float) -> None:
    """Set max_iters and lr_decay_iters of a new run so that it takes the setting `minutes`, and say them.

    The run makes a few steps and a part of an evaluation, which it then undoes. The numbers go to run.s and run.record:
    the same settings with them and without `minutes` make the same run. run: a Run of fusedgpt/runs/run.py. step: makes
    one step. began: time.perf_counter() at the run's start.
    """
    s = run.s
    if not s.minutes or s.init_from == "resume" or s.eval_only:
        return
    run.logger.status("timing steps and an evaluation")
    with undone(run):
        cost = _measured(run, step, min(SHARE * 60 * s.minutes, LONGEST_S))
    run.due = began + 60 * s.minutes
    n = most_iterations(run.due - time.perf_counter(), cost, s)
    _end_at(run, run.ranks.broadcast(max(1, n)), cost, "")  # each rank has timed its own steps


def shorten(run: Any, cost: Cost) -> None:
    """End a run of so many minutes earlier, if its steps take much longer now than when they were timed.

    The steps that were made must have had the learning rates of the shorter run, so that its numbers make it again. So
    the schedule must be wsd, in whose first half rates do not depend on its end. cost: what steps take now.
    """
    s, done = run.s, run.state.iteration
    if s.schedule == "wsd" and s.decay_lr and run.due < math.inf:
        n = run.ranks.broadcast(max(2 * done, most_iterations(run.due - time.perf_counter(), cost, s, done)))
        if TOO_LONG * (n - done) < s.max_iters - done:
            _end_at(run, n, cost, "steps have become slower: ")
            run.logger.shorten(n)


def _end_at(run, n, cost, why):
    run.s = dataclasses.replace(run.s, **dict.fromkeys(SETTLED, n))
    run.record["settings"] |= dict.fromkeys(SETTLED, n)
    said = f"{why}minutes={run.s.minutes:g}: {cost.parts(run.state.iteration, run.s)}; max_iters={n}"
    never = f", all in the warm-up: lower warmup_iters={run.s.warmup_iters}"
    run.logger.say(said + never * (run.s.decay_lr and n <= run.s.warmup_iters))


def most_iterations(seconds: float, cost: Cost, s: Settings, done: int = 0) -> int:
    """The max_iters with which a run that has made `done` steps ends in `seconds`; `done` if no more fit."""

    def takes(iterations):
        return cost.seconds(done, dataclasses.replace(s, max_iters=iterations))

    return max(done, bisect.bisect_right(range(MOST_ITERATIONS + 1), seconds, lo=done, key=takes) - 1)


@contextlib.contextmanager
def undone(run: Any) -> Iterator[None]:
    """A context whose steps leave no trace: afterwards the weights, optimizer, scaler and batches of a new run are new.

    Weights may be pretrained ones, and ranks may share them, so each rank keeps a copy of its part on the CPU.
    """
    state, device = run.state, run.state.clock.device
    weights = {name: local(w).to("cpu", copy=True) for name, w in state.model.state_dict().items()}
    scaler = state.scaler.state_dict()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for name, w in state.model.state_dict().items():
            local(w).copy_(weights[name])
    state.optimizer.state.clear()
    state.scaler.load_state_dict(scaler)
    state.iteration = 0
    state.batches = run.loader.batches(0, run.micro_steps)
    state.batch = next(state.batches)


def _measured(run, step, seconds):
    """The Cost of a run, by as many steps as take `seconds`, and a few batches of an evaluation."""
    step_ms = _step_ms(run, step, seconds)
    batches, windows = run.loader.evaluation_batches, run.s.eval_iters * run.s.batch_size
    few, began = min(EVALUATED * run.s.batch_size * run.ranks.world, windows or math.inf), time.perf_counter()
    run.losses(few)
    evaluation_s = (time.perf_counter() - began) * batches(windows) / batches(few)
    began = time.perf_counter()
    if run.scorer:
        run.scorer.scores(run.stopped_by)
    scored = time.perf_counter()
    with contextlib.suppress(UserError):  # a few steps may be enough to diverge, and then there is no sample
        run.draw_samples()
    return Cost.of(step_ms, evaluation_s + scored - began, time.perf_counter() - scored)


def _step_ms(run, step, seconds):
    """Milliseconds of each of as many steps as take `seconds`, at least two."""

    def one():
        step()
        run.state.iteration += 1

    steps = timing.Steps(one, run.state.clock.device, warmup=0)
    ms = steps.make(2)
    if more := run.ranks.broadcast(round(1e3 * seconds / ms[-1])):  # ranks make equally many: they wait for each other
        ms += steps.make(more)
    return ms
