"""A training run between its steps: it evaluates, samples, reports, saves and ends."""

import dataclasses
import math
import pathlib
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from fusedgpt.data.dataloader import Batch, DataLoader
from fusedgpt.errors import UserError
from fusedgpt.home import as_called
from fusedgpt.machine import memory, timing
from fusedgpt.parallel import distributed
from fusedgpt.runs import budget, checkpoint, progress
from fusedgpt.runs.logger import Logger
from fusedgpt.runs.run_folder import Checkpoints
from fusedgpt.settings import Settings
from fusedgpt.training import evaluation, nonfinite, samples
from fusedgpt.training.optimizer import averaged
from fusedgpt.training.step_results import StepResults

WARM_UP = 5  # the summary of times leaves out this many first steps: they still fill caches


@dataclasses.dataclass
class TrainState:
    """What steps read and change. A checkpoint holds model, optimizer, scaler and iteration."""

    model: Any  # a GPT
    optimizer: Optimizer
    scaler: GradScaler
    iteration: int  # steps done
    parallel: torch.nn.Module | None  # what a step calls: `model`, or DDP around it, whose backward averages gradients
    cast: AbstractContextManager  # autocast in the dtype of the matrix products
    batches: Iterator[Batch]  # the training batches from here on
    batch: Batch  # the next batch, read ahead
    clock: timing.StepClock
    results: StepResults  # what the steps since the last report returned
    val_losses: dict[int, float] = dataclasses.field(default_factory=dict)  # of the last evaluation, by its iteration
    loss: float = 0.0  # loss of the last reported step; NaN if an evaluation since was not finite
    bad_steps: int = 0  # reported steps in a row without a finite gradient
    step_ms: list[float] = dataclasses.field(default_factory=list)
    evaluation_s: float = 0.0  # seconds of the last evaluation, 0 before the first
    samples_s: float = 0.0  # seconds of the last round of samples, 0 before the first
    estimated: bool = False  # whether the run has said how long it will take

    @property
    def sound(self) -> bool:
        """Whether this state is worth saving: its last step had a finite loss and gradient.

        In float16, a bad gradient is forgiven while the loss scale is above 1: the scale may have caused the overflow.
        """
        return math.isfinite(self.loss) and (self.bad_steps == 0 or self.scaler.get_scale() > 1)


@dataclasses.dataclass
class Run:
    """What the training loop owns."""

    s: Settings
    state: TrainState
    ranks: distributed.Ranks
    micro_steps: range  # this rank's micro-steps in each step
    loader: DataLoader
    meta: dict  # meta.json of the data
    prompts: samples.Prompts | None  # None if this rank draws no samples
    checkpoints: Checkpoints
    logger: Logger
    record: dict = dataclasses.field(default_factory=dict)  # what run.json says
    token_bytes: torch.Tensor | None = None  # bytes of each id, for bits per byte
    scorer: Any = None  # a harness.Scorer, if evaluations score eval_tasks too
    stopped_by: list[int] = dataclasses.field(default_factory=list)  # signals that have come
    deadline: float = math.inf  # time.perf_counter() at which the run ends
    due: float = math.inf  # time.perf_counter() at which the minutes of a new run are over

    @property
    def trace(self) -> pathlib.Path | None:
        """Where the rehearsal writes its profile, until the folder is open; None if it writes none."""
        return self.checkpoints.out_dir / ".trace.json" if self.s.profile and self.ranks.main else None

    def open_log(self) -> None:
        """Write run.json and open metrics.jsonl, once all settings are settled; see Logger.open."""
        if self.ranks.main:
            folder = self.checkpoints
            self.logger.open(folder.out_dir, self.state.iteration, self.record, folder.best[0])
        if self.trace:
            self.trace.replace(self.checkpoints.out_dir / "trace.json")

    def losses(self, windows: int) -> dict[str, float] | None:
        """The losses of both splits over `windows` windows of each (0: all), None if a signal ended the evaluation."""
        state, tell = self.state, (self.stopped_by, self.logger.status)
        how = (state.model, self.loader, state.cast, self.ranks, self.token_bytes, *tell)
        with averaged(state.model, state.optimizer):
            return evaluation.evaluate(*how, windows)

    def evaluate_and_save(self) -> bool:
        """Evaluate, log the losses, save if it is time to, and score. Returns False if a signal ended that."""
        s, state, checkpoints = self.s, self.state, self.checkpoints
        unsaved, began = state.iteration > checkpoints.saved_at, time.perf_counter()
        try:
            losses = self.losses(s.eval_iters * s.batch_size)
        except BaseException:
            if unsaved and not checkpoints.together:
                self.save()  # a failing evaluation must not lose the steps before it
            raise
        if losses is None:
            return False
        self.logger.evaluation({"iter": state.iteration, **losses}, in_full=s.eval_only)
        if not math.isfinite(losses["train_loss"] + losses["val_loss"]):
            state.loss = math.nan  # the last batch may have missed what diverged
        state.val_losses = {state.iteration: losses["val_loss"]}
        improved = state.iteration > 0 and losses["val_loss"] < checkpoints.best[0] and not s.eval_only
        if improved or (unsaved and s.always_save_checkpoint):
            self.save()
        done = not self.scorer or self._score()  # may take minutes, and so comes after the save
        state.evaluation_s = time.perf_counter() - began
        return done

    def _score(self):
        self.logger.status("scoring")
        with averaged(self.state.model, self.state.optimizer):
            scores = self.scorer.scores(self.stopped_by)
        if scores is not None:
            self.logger.scores({"iter": self.state.iteration, **scores})
        return scores is not None

    def overfits(self) -> bool:
        """Whether the run ends because it overfits, by its last `patience` evaluations; rank 0 has all of them."""
        patience, rows = self.s.patience, self.logger.evaluations
        return patience > 0 and self.ranks.broadcast(progress.overfits(rows, patience))

    def save(self) -> None:
        """Save the whole state, unless the run has diverged. Raises UserError if a weight is not finite."""
        state, record = self.state, self.record
        advice = self.checkpoints.recovery_advice()
        if not distributed.finite_weights(state.model):
            raise UserError(f"the weights are not finite after {state.iteration} steps and were not saved: {advice}")
        if not state.sound:
            self.logger.say(f"iteration {state.iteration} is not saved, because the run has diverged: {advice}")
            return
        with averaged(state.model, state.optimizer):
            content = {"model": state.model.state_dict(), **checkpoint.model_args(record["model"])}
            content |= {"optimizer": state.optimizer.state_dict(), "scaler": state.scaler.state_dict()}
            content |= {"iter_num": state.iteration, "config": record["settings"], "meta": self.meta}
            # auto keeps what ran if the run is resumed
            content |= {name: record[name] for name in ("attention", "attention_sha256", "dtype", "compile")}
            self.checkpoints.save(content, state.val_losses.get(state.iteration, math.inf))

    def save_whole_steps(self) -> None:
        """Report and save the steps before one that failed. A step fails if another process or the data is gone."""
        self.report(explains=False)
        if self.state.iteration > self.checkpoints.saved_at and not self.checkpoints.together:
            self.save()

    def report(self, explains: bool = True) -> tuple[bool, bool]:
        """Log the steps since the last report. A report waits for the device; on CUDA, a step does not.

        explains: whether all ranks take part, which explaining a bad step needs. Returns whether the time is up on any
        rank, and whether a signal to any rank ends the run. Raises UserError after more than max_bad_steps steps in a
        row without a finite gradient.
        """
        state, record, mfu = self.state, self.record, self.record["mfu"]
        times = state.clock.read()
        steps, raised = state.results.read()
        state.step_ms += times
        first, peak = state.iteration - len(steps), memory.peak_memory(state.clock.device)
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
            self.logger.iteration(metrics, to_console=it % self.s.log_interval == 0)
            self._count_bad_step(metrics, explains)
        if steps and explains:
            self._say_what_is_left()
        return "time is up" in raised, "stopped" in raised

    def _count_bad_step(self, metrics, explains):
        state, s, it, say = self.state, self.s, metrics["iter"], self.logger.say
        state.loss = metrics["loss"]
        if math.isfinite(metrics["grad_norm"]):
            state.bad_steps = 0
            return
        state.bad_steps += 1
        say(f"iter {it}: loss {state.loss}, gradient norm {metrics['grad_norm']}: step skipped, weights kept")
        if state.bad_steps == 1 and explains:
            how = (state.model, self.loader, s.seed, self.micro_steps, state.cast, state.scaler, self.ranks)
            say(f"iter {it}: {nonfinite.explain(*how, it)}")
        if state.bad_steps > s.max_bad_steps:
            bad, how = f"{state.bad_steps} steps in a row", self.checkpoints.recovery_advice()
            raise UserError(f"{bad} had no finite gradient, the last at iteration {it}: {how}")

    def _say_what_is_left(self):
        state, s = self.state, self.s
        cost = progress.Cost.of(state.step_ms, state.evaluation_s, state.samples_s)
        timed = len(state.step_ms) >= progress.STEPS_OF_AN_ESTIMATE
        # a run whose time is up evaluates once more
        limit = self.deadline - time.perf_counter() + state.evaluation_s
        if timed and not state.estimated and state.iteration < s.max_iters and cost.seconds(state.iteration, s) < limit:
            state.estimated = True
            self.logger.say(cost.estimate(state.iteration, s))
        if timed:
            budget.shorten(self, cost)
        self.logger.ends_in(min(cost.seconds(state.iteration, self.s), limit))

    def draw_samples(self) -> list[tuple[str, str]]:
        """A sample after each prompt, as (prompt, text). Raises UserError if the weights have diverged.

        The main rank has prompts; if ranks share the model, all of them have.
        """
        state = self.state
        # ranks that share the model need this one until all have the last sample
        stopped_by = () if distributed.is_shared(state.model) else self.stopped_by
        how = (state.model, state.cast, state.clock.device, self.s.seed, stopped_by)
        with averaged(state.model, state.optimizer):
            return self.prompts.sample(*how) if self.prompts else []

    def sample(self) -> None:
        """Log a sample after each prompt."""
        self.logger.status("sampling")
        began = time.perf_counter()
        try:
            for prompt, text in self.draw_samples():
                self.logger.sample(self.state.iteration, prompt, text)
            self.state.samples_s = time.perf_counter() - began
        except UserError as error:  # weights that have diverged; the training loop decides if the run goes on
            self.logger.say(f"step {self.state.iteration}: no sample: {error}")

    def finish(self) -> None:
        """Save, and disconnect from the other ranks. After a signal, exit with 128 + its number.

        Raises UserError if the last state could not be saved.
        """
        state, checkpoints = self.state, self.checkpoints
        unsaved = state.iteration > checkpoints.saved_at
        if (unsaved and state.sound) or checkpoints.failed:
            self.save()
        if len(state.step_ms) > WARM_UP and self.ranks.main:
            self.logger.times(timing.summary(state.step_ms[WARM_UP:]))
        for line in progress.lesson(self.logger.evaluations, self.s.patience * (state.iteration < self.s.max_iters)):
            self.logger.say(line)
        if checkpoints.saved_at and not (self.s.eval_only or self.stopped_by or checkpoints.failed):
            out = shlex.quote(str(checkpoints.out_dir))
            self.logger.say(as_called(f"next: python sample.py {out}; {out}/report.html shows the run"))
        # free DDP first: as the last holder of the process group, it would end the group itself and might hang
        state.parallel = None
        distributed.leave(self.ranks)
        if checkpoints.failed:
            raise checkpoints.failed
        self.logger.close()
        if unsaved and not state.sound:
            how = checkpoints.recovery_advice()
            raise UserError(f"the run has diverged and ends after {state.iteration} steps: {how}")
        if self.stopped_by:
            saved = "saved: go on with the same command and --init_from=resume"
            how = saved if checkpoints.saved_at else "with nothing to save"
            self.logger.say(f"stopped after {state.iteration} iterations, {how}")
            sys.exit(128 + self.stopped_by[0])
