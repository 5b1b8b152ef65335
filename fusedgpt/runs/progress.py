"""What a run says of itself before it starts, when it reports its steps, and how long it will take."""

import dataclasses
import datetime
import math
import statistics
import textwrap
from typing import Any

from fusedgpt.attention import functions
from fusedgpt.machine import flops
from fusedgpt.machine.device import cuda_graphs, dtype_name, multiplies_tf32
from fusedgpt.machine.environment import environment
from fusedgpt.parallel import distributed
from fusedgpt.runs.metrics import OVERFITS, number
from fusedgpt.settings import Settings
from fusedgpt.terminal import in_words
from fusedgpt.training import tuning

STEPS_OF_AN_ESTIMATE = 6  # steps after which the run says how long it will take
RECENT = 100  # the last so many steps, but at most half of all, tell how long a step takes
OFTEN = 10  # a text of fewer tokens than the model has parameters; 20 kB, read 23 times: docs/running.md


def settings_lines(s: Settings) -> list[str]:
    """The settings that differ from their defaults, in lines of about 110 characters."""
    changed = {n: v for n, v in dataclasses.asdict(s).items() if v != getattr(Settings, n)}
    texts = [f"{n}={v!r}" if isinstance(v, str) and v.split() != [v] else f"{n}={v}" for n, v in changed.items()]
    lines = textwrap.wrap(", ".join(texts) or "none", 110, break_long_words=False, break_on_hyphens=False)
    return ["settings other than the defaults:", *(f"  {line}" for line in lines)]


def reading_line(s: Settings, tokens: int, parameters: int) -> str:
    """How often a new run reads its training text, and whether that is too often for a model of so many parameters."""
    times = s.max_iters * s.gradient_accumulation_steps * s.batch_size * s.block_size / tokens
    too_often = ": too often without --dropout=0.2" * (times > OFTEN and tokens < parameters and not s.dropout)
    return f"the training text has {tokens:,} tokens; the run reads it {times:.3g} times{too_often}"


def overfits(evaluations: list[dict], last: int = 2) -> bool:
    """Whether the `last` validation losses are above an earlier, the lowest, by OVERFITS on average.

    And the training loss must have fallen by more. evaluations: rows of metrics.jsonl.
    """
    if not (found := _finite(evaluations)):
        return False
    (lowest, at, then), since = min(found), found[-last:]
    rise = statistics.fmean(val for val, _, _ in since) - lowest
    return rise > OVERFITS * lowest and then - since[-1][2] > rise and at < since[0][1]


def _finite(evaluations):
    """(validation loss, iteration, training loss) of the evaluations that were finite."""
    losses = {row["iter"]: (number(row["train_loss"]), number(row["val_loss"])) for row in evaluations}
    return [(val, it, train) for it, (train, val) in losses.items() if math.isfinite(train + val)]


def lesson(evaluations: list[dict], patience: int = 0) -> list[str]:
    """What the evaluations of a run say at its end: the lowest loss, overfitting, and whether `patience` ended it."""
    found = _finite(evaluations)
    if len(found) < 2:
        return []
    (lowest, at, train_then), (last, _, train_now) = min(found), found[-1]
    said = f"the lowest validation loss was {lowest:.4f}, at iteration {at}"
    if overfits(evaluations):
        ends = f", and patience={patience} ended it" * (patience > 0 and overfits(evaluations, patience))
        said += (
            f". Since then it rose to {last:.4f}, and the training loss fell from {train_then:.4f} to {train_now:.4f}:"
            f" the run overfits{ends}. Fewer steps, --dropout=0.2 or more text help; sample.py takes best.pt"
        )
    return [said]


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


def is_reported(done: int, s: Settings) -> bool:
    """Whether to report after `done` steps, because a line is due or because what comes next needs the results."""
    needed = (done % s.check_interval, done % s.eval_interval, done % (s.sample_interval or done + 1))
    return (done - 1) % s.log_interval == 0 or 0 in needed or done == s.max_iters


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of a step, of an evaluation, and of the samples that are drawn at a time; 0 of what is not timed yet."""

    step: float
    evaluation: float
    samples: float

    @classmethod
    def of(cls, step_ms: list[float], evaluation_s: float, samples_s: float) -> "Cost":
        """The cost by the milliseconds of the steps that were timed, in order. The first ones are slower."""
        recent = step_ms[-min(RECENT, -(-len(step_ms) // 2)) :]
        return cls(statistics.median(recent) / 1e3, evaluation_s, samples_s)

    def seconds(self, done: int, s: Settings) -> float:
        """How long the run still takes after `done` steps, with its evaluations and samples."""
        return sum(n * each for _, n, each in self._left(done, s))

    def parts(self, done: int, s: Settings) -> str:
        """What the run makes after `done` steps: '90 steps of 2 s, and 4 evaluations of 60 s'."""
        texts = []
        for what, n, each in self._left(done, s):
            known = f" of {in_words(each)}" if each else ", not timed yet"
            if n:
                texts.append(f"{n:,} {what}{'s' * (n > 1)}{known}")
        return ", and ".join(texts)

    def estimate(self, done: int, s: Settings) -> str:
        """One line that says how long the run still takes after `done` steps."""
        seconds = self.seconds(done, s)
        when = datetime.datetime.now() + datetime.timedelta(seconds=min(seconds, 1e11))  # years end at 9999
        return f"estimate: {in_words(seconds)}, until {when:%a %Y-%m-%d %H:%M}: {self.parts(done, s)}"

    def _left(self, done, s):
        evaluations, rounds = (_occasions(done, s.max_iters, every) for every in (s.eval_interval, s.sample_interval))
        times = (self.step, self.evaluation, self.samples)
        return zip(("step", "evaluation", "sampling"), (s.max_iters - done, evaluations, rounds), times)


def _occasions(done, last, interval):
    """How many evaluations or samples are left after `done` steps of `last`; with `interval` 0, there are none."""
    if not interval:
        return 0
    # the one at `done` is still to come, and at the end there is one in any case
    return last // interval - (done - 1) // interval + (last % interval > 0)
