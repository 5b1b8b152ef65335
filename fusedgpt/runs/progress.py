"""What a run reports: itself before it starts, and its steps once they are read from the device."""

import dataclasses
import datetime
import math
import statistics
import textwrap
from collections.abc import Callable
from typing import Any

from fusedgpt.attention import functions
from fusedgpt.errors import UserError
from fusedgpt.machine import flops, memory
from fusedgpt.machine.device import cuda_graphs, dtype_name, multiplies_tf32
from fusedgpt.machine.environment import environment
from fusedgpt.parallel import distributed
from fusedgpt.runs.logger import Logger
from fusedgpt.runs.run_folder import Checkpoints
from fusedgpt.settings import Settings
from fusedgpt.terminal import in_words
from fusedgpt.training import tuning
from fusedgpt.training.optimizer import learning_rate

LONGEST_SILENCE_S = 2.0  # on a CPU, a slow run updates its bar about this often
STEPS_OF_AN_ESTIMATE = 6  # steps after which the run says how long it will take
RECENT = 100  # steps that tell how long a step takes; of fewer, the later half
HIGH_END = 0.05  # a learning rate that ends further than this share of its peak above min_lr is said


def settings_lines(s: Settings) -> list[str]:
    """The settings that differ from their defaults, in lines of about 110 characters."""
    changed = {n: v for n, v in dataclasses.asdict(s).items() if v != getattr(Settings, n)}
    texts = [f"{n}={v!r}" if isinstance(v, str) and v.split() != [v] else f"{n}={v}" for n, v in changed.items()]
    lines = textwrap.wrap(", ".join(texts) or "none", 110, break_long_words=False, break_on_hyphens=False)
    return ["settings other than the defaults:", *(f"  {line}" for line in lines)]


def schedule_lines(s: Settings) -> list[str]:
    """What a new run is told about its schedule: that it ends within the warm-up, or at a high learning rate."""
    n, end = s.max_iters, learning_rate(s.max_iters, s)
    if not s.decay_lr or s.eval_only or not n:
        return []
    goes_on = s.schedule != "constant" and n < s.lr_decay_iters
    if n <= s.warmup_iters:
        return [
            f"warmup_iters={s.warmup_iters} is not below max_iters={n}: the learning rate rises to"
            f" {100 * n / (s.warmup_iters + 1):.0f} % of its peak, and never falls. Give fewer, such as"
            f" --warmup_iters={n // 10}, and --lr_decay_iters={n}"
        ]
    if goes_on and end - s.min_lr > HIGH_END * s.learning_rate:
        return [
            f"the learning rate ends at {100 * end / s.learning_rate:.0f} % of its peak, because the schedule is for"
            f" {s.lr_decay_iters} iterations: --lr_decay_iters={n} ends it with the run"
        ]
    return []


def run_record(s: Settings, model: Any, device, ranks: distributed.Ranks, chosen: tuning.Settled, **seen) -> dict:
    """The content of run.json: resolved settings, model, machine, and the kernels `chosen` and `seen` to run."""
    peak, peak_source = flops.peak_flops(device, chosen.dtype)
    return {
        "settings": dataclasses.asdict(s),
        "model": dataclasses.asdict(model.config),
        "device": str(device),
        "dtype": dtype_name(chosen.dtype),
        "tf32": multiplies_tf32(device),
        "dtype_trials": chosen.dtype_trials,
        "compile": chosen.compiled,
        "cuda_graphs": cuda_graphs(device),
        "attention": chosen.attention,
        "attention_trials": chosen.attention_trials,
        "attention_sha256": functions.digest(chosen.attention),  # of a user's own file
        "timed": chosen.timed,
        **seen,
        "world_size": ranks.world,
        "launch": distributed.launch(),
        "date": f"{datetime.date.today()}",
        "tokens_per_step": s.gradient_accumulation_steps * s.batch_size * s.block_size,
        "parameters": model.get_num_params(non_embedding=False),
        "parameters_in_products": model.get_num_params(),
        "padded_vocab_size": model.config.padded_vocab_size,
        "mfu": {
            "counts": "6 N + 12 L nh hs T a token; T: the window, in layers that have one",
            "flops_per_token": model.config.flops_per_token,
            "peak_flops": peak,
            "peak_source": peak_source,
        },
        "environment": environment(device),
    }


def is_reported(done: int, s: Settings, silent_s: float) -> bool:
    """Whether to report after `done` steps, because a line is due or because what comes next needs the results.

    silent_s: seconds since the last report on a single CPU process, where a report waits for nothing; otherwise 0.
    """
    needed = (done % s.check_interval, done % s.eval_interval, done % (s.sample_interval or done + 1))
    return silent_s > LONGEST_SILENCE_S or (done - 1) % s.log_interval == 0 or 0 in needed or done == s.max_iters


def report(
    state: Any, s: Settings, record: dict, logger: Logger, checkpoints: Checkpoints, explain: Callable | None
) -> tuple[bool, bool]:
    """Log the steps since the last report. A report waits for the device; on CUDA, a step does not.

    state: the run's TrainState. explain: nonfinite.explain as (iteration, steps made since) -> a sentence; None if not
    all ranks take part. Returns whether the time is up on any rank, and whether a signal to any rank ends the run.
    Raises UserError after more than max_bad_steps steps in a row without a finite gradient.
    """
    times = state.clock.read()
    steps, raised = state.results.read()
    state.step_ms += times
    first = state.iteration - len(steps)
    peak, mfu = memory.peak_memory(state.clock.device), record["mfu"]
    for it, ms, results in zip(range(first, state.iteration), times, steps):
        tokens_per_s = 1e3 * record["tokens_per_step"] / ms
        metrics = {
            "iter": it,
            "loss": results["loss"],
            "lr": results["lr"],
            **results,
            "ms": ms,
            "tokens_per_s": tokens_per_s,
            "mfu": mfu["flops_per_token"] * tokens_per_s / (mfu["peak_flops"] * record["world_size"]),
            "peak_memory": peak,
        }
        logger.iteration(metrics, to_console=it % s.log_interval == 0)
        _count_bad_step(state, metrics, s, checkpoints, explain, logger.say)
    timed = steps and len(state.step_ms) >= STEPS_OF_AN_ESTIMATE
    if timed and not state.estimated and state.iteration < s.max_iters:
        state.estimated = True
        logger.say(estimate(state.step_ms, state.iteration, state.evaluation_s, s, state.samples_s))
    return "time is up" in raised, "stopped" in raised


def seconds_left(step_ms: list[float], done: int, evaluation_s: float, samples_s: float, s: Settings) -> float:
    """How long the run still takes after `done` steps, with its evaluations and samples.

    step_ms: milliseconds of the timed steps, in order. evaluation_s, samples_s: seconds of an evaluation and of a round
    of samples, or 0 if there was none yet; they then count nothing.
    """
    evaluations, rounds = (occasions(done, s.max_iters, every) for every in (s.eval_interval, s.sample_interval))
    return (s.max_iters - done) * _step_s(step_ms) + evaluations * evaluation_s + rounds * samples_s


def _step_s(step_ms):
    return statistics.median(step_ms[-min(RECENT, -(-len(step_ms) // 2)) :]) / 1e3  # the first ones are slower


def estimate(step_ms: list[float], done: int, evaluation_s: float, s: Settings, samples_s: float = 0.0) -> str:
    """One line that says how long the run still takes after `done` steps; see `seconds_left`."""
    seconds = seconds_left(step_ms, done, evaluation_s, samples_s, s)
    when = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
    until = f"{when:%a %H:%M}" if seconds < 86400 else f"{when:%a %Y-%m-%d %H:%M}"
    line = f"estimate: {in_words(seconds)}, until {until}: "
    line += parts(_step_s(step_ms), evaluation_s, samples_s, done, s)
    return line + (f"; max_seconds={s.max_seconds:g} may end it before" if s.max_seconds else "")


def parts(step_s: float, evaluation_s: float, samples_s: float, done: int, s: Settings) -> str:
    """What a run makes after `done` steps: '90 steps of 2 s, and 4 evaluations of 60 s'."""
    texts = []
    for what, n, each in (
        ("step", s.max_iters - done, step_s),
        ("evaluation", occasions(done, s.max_iters, s.eval_interval), evaluation_s),
        ("sampling", occasions(done, s.max_iters, s.sample_interval), samples_s),
    ):
        known = f" of {in_words(each)}" if each else ", not timed yet"
        if n:
            texts.append(f"{n:,} {what}{'s' * (n > 1)}{known}")
    return ", and ".join(texts)


def occasions(done: int, last: int, interval: int) -> int:
    """How many evaluations or samples are left after `done` steps of `last`; with `interval` 0, there are none."""
    if not interval:
        return 0
    # the one at `done` is still to come, and at the end there is one in any case
    return last // interval - (done - 1) // interval + (last % interval > 0)


def _count_bad_step(state, metrics, s, checkpoints, explain, say):
    it, state.loss = metrics["iter"], metrics["loss"]
    state.bad_steps = 0 if math.isfinite(metrics["grad_norm"]) else state.bad_steps + 1
    if state.bad_steps:
        say(f"iter {it}: loss {state.loss}, gradient norm {metrics['grad_norm']}: step skipped, weights kept")
    if state.bad_steps == 1 and explain:
        say(f"iter {it}: {explain(it, state.iteration - 1 - it)}")
    if state.bad_steps > s.max_bad_steps:
        advice = checkpoints.recovery_advice()
        raise UserError(
            f"{state.bad_steps} steps in a row had no finite gradient, the last at iteration {it}: {advice}"
        )
