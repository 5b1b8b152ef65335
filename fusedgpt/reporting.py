"""What a run says: about itself before it starts, and about its steps once they are read from the device."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from fusedgpt import distributed, flops, memory, tuning
from fusedgpt.device import dtype_name
from fusedgpt.environment import environment
from fusedgpt.errors import UserError
from fusedgpt.logger import Logger
from fusedgpt.optimizer import learning_rate
from fusedgpt.saver import Saver
from fusedgpt.settings import Settings


def run_record(s: Settings, model: Any, device, ranks: distributed.Ranks, chosen: tuning.Settled, **seen) -> dict:
    """What run.json says: settings as resolved, the model, the machine, and what was `chosen` and `seen` to run."""
    peak, peak_source = flops.peak_flops(device, chosen.dtype)
    return {
        "settings": dataclasses.asdict(s),
        "model": dataclasses.asdict(model.config),
        "device": str(device),
        "dtype": dtype_name(chosen.dtype),
        "dtype_trials": chosen.dtype_trials,
        "compile": chosen.compiled,
        "attention": chosen.attention,
        "attention_trials": chosen.attention_trials,
        **seen,
        "world_size": ranks.world,
        "launch": distributed.launch(),
        "tokens_per_step": s.gradient_accumulation_steps * s.batch_size * s.block_size,
        "parameters": model.get_num_params(non_embedding=False),
        "parameters_without_positions": model.get_num_params(),
        "padded_vocab_size": model.config.padded_vocab_size,
        "mfu": {
            "counts": "6 N + 12 L C T a token",
            "flops_per_token": model.flops_per_token(),
            "peak_flops": peak,
            "peak_source": peak_source,
        },
        "environment": environment(device),
    }


def is_reported(done: int, s: Settings) -> bool:
    """Whether to report once `done` steps are done: after one that has a line, and before what needs the results."""
    needed = (done % s.check_interval, done % s.eval_interval, done - s.max_iters)
    return (done - 1) % s.log_interval == 0 or 0 in needed


def report(
    state: Any, s: Settings, record: dict, logger: Logger, saver: Saver, explain: Callable | None
) -> tuple[bool, bool]:
    """Log the steps since the last report. Nothing else in the loop waits for the device.

    state: train.py's TrainState. Returns whether the time is up, and whether a signal ends the run, as any rank saw it.
    explain: nonfinite.explain as (iteration, steps done since) -> a sentence; None, if not all ranks are there for it.
    Raises UserError after more than max_bad_steps steps in a row without a finite gradient.
    """
    times = state.clock.read()
    rows = torch.stack(state.unread).tolist() if state.unread else []
    state.unread.clear()
    state.step_ms += times
    first = state.iteration - len(rows)
    peak, mfu = memory.peak_memory(state.clock.device), record["mfu"]
    for it, ms, (loss_sum, norm, *_) in zip(range(first, state.iteration), times, rows):
        tokens_per_s = 1e3 * record["tokens_per_step"] / ms
        metrics = {
            "iter": it,
            "loss": loss_sum / s.gradient_accumulation_steps,
            "lr": learning_rate(it, s),
            "grad_norm": norm / record["world_size"],  # the same on all ranks, unless it is bad on one
            "ms": ms,
            "tokens_per_s": tokens_per_s,
            "mfu": mfu["flops_per_token"] * tokens_per_s / (mfu["peak_flops"] * record["world_size"]),
            "peak_memory": peak,
        }
        logger.iteration(metrics, to_console=it % s.log_interval == 0)
        _count_bad_step(state, metrics, s, saver, explain, logger.say)
    return any(row[2] for row in rows), any(row[3] for row in rows)


def _count_bad_step(state, metrics, s, saver, explain, say):
    it, state.loss = metrics["iter"], metrics["loss"]
    state.bad_steps = 0 if math.isfinite(metrics["grad_norm"]) else state.bad_steps + 1
    if state.bad_steps:
        say(f"iter {it}: loss {state.loss}, gradient norm {metrics['grad_norm']}: step skipped, weights kept")
    if state.bad_steps == 1 and explain:
        say(f"iter {it}: {explain(it, state.iteration - 1 - it)}")
    if state.bad_steps > s.max_bad_steps:
        advice = saver.last_good()
        raise UserError(
            f"{state.bad_steps} steps in a row had no finite gradient, the last at iteration {it}: {advice}"
        )
