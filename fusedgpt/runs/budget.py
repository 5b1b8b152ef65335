"""A run of so many minutes: what it takes, by a few of its own steps and a part of an evaluation."""

import bisect
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusedgpt.errors import UserError
from fusedgpt.parallel.distributed import local
from fusedgpt.runs.progress import Cost
from fusedgpt.runs.resume import SETTLED
from fusedgpt.settings import Settings

# time steps, and then evaluations, for this share of the minutes: a few steps would tell the load of a moment
SHARE = 0.03
LONGEST_S = 20.0  # and no longer than this
MOST_ITERATIONS = 10**9


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
    left = 60 * s.minutes - (time.perf_counter() - began)
    n = run.ranks.broadcast(max(1, most_iterations(left, cost, s)))  # each rank has timed its own steps
    run.s = dataclasses.replace(s, **dict.fromkeys(SETTLED, n))
    run.record["settings"] |= dict.fromkeys(SETTLED, n)
    run.logger.say(f"minutes={s.minutes:g}: {cost.parts(0, run.s)}; max_iters={n}")


def most_iterations(seconds: float, cost: Cost, s: Settings) -> int:
    """How many iterations of a new run, with its evaluations and samples, fit into `seconds`; 0 if none does."""

    def takes(iterations):
        return cost.seconds(0, dataclasses.replace(s, max_iters=iterations))

    return max(0, bisect.bisect_right(range(MOST_ITERATIONS + 1), seconds, key=takes) - 1)


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
    """The Cost of a run, by as many steps as take `seconds`, and a part of an evaluation as long."""
    step_ms = _step_ms(run, step, seconds)
    evaluation_s, began = _evaluation_s(run, seconds), time.perf_counter()
    with contextlib.suppress(UserError):  # a few steps may be enough to diverge, and then there is no sample
        run.draw()
    return Cost.of(step_ms, evaluation_s, time.perf_counter() - began)


def _step_ms(run, step, seconds):
    """Milliseconds of each of as many steps as take `seconds`, at least two."""
    state = run.state

    def make(steps):
        for _ in range(steps):
            state.clock.start()
            step()
            state.clock.stop()
            state.iteration += 1
        return state.clock.read()

    first = make(2)
    more = run.ranks.broadcast(round(1e3 * seconds / first[-1]))
    return first + make(more)  # all ranks make the same steps, because they wait for each other


def _evaluation_s(run, seconds):
    """Seconds of an evaluation, by a part of it: one batch of each split, or as many as take `seconds`."""
    batches, windows = run.loader.evaluation_batches, run.s.eval_iters * run.s.batch_size

    def per_batch(windows):
        began = time.perf_counter()
        run.losses(windows)
        return (time.perf_counter() - began) / max(1, batches(windows))

    each = per_batch(run.s.batch_size)
    more = run.ranks.broadcast(int(seconds / each / 2))  # batches of each split
    if more > 1:
        each = per_batch(min(more * run.s.batch_size * run.ranks.world, windows or math.inf))
    return each * batches(windows)
