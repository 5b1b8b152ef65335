"""A study whose trials are in Optuna's storage: a search, or a grid that workers on many machines share.

    optuna-dashboard sqlite:///out-study/study.db       looks at it, also while it runs

A trial is a variant, run with all seeds; its value is the mean over them. Each worker is a study.py of its own. It
takes trials until there are enough, and its heartbeat says that it lives. If the heartbeat stops, another worker queues
the trial again. Optuna numbers trials without a gap, which makes their count exact: a worker that finds enough earlier
trials, or its variant among them, drops the trial that it was given. What was dropped or broke off does not count.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from fusedgpt.errors import UserError, first_line
from fusedgpt.machine import files
from fusedgpt.runs.metrics import number, read_metrics
from fusedgpt.studies import command, database, design, outcomes, space, verdict
from fusedgpt.studies.command import Request
from fusedgpt.studies.database import libraries
from fusedgpt.studies.design import SAME_STUDY, SAME_VALUE, Design
from fusedgpt.studies.outcomes import OVER, STAND_INS
from fusedgpt.studies.runner import Job, Runner, Stopped

NAP_S = 1.0  # seconds between looks at what other workers do
LOOK_S = 1.0  # seconds between looks at a run's evaluations
FRUITLESS = 5  # trials in a row that may fail, or break off with the database, before a worker gives up
UNFIT = 100  # suggestions in a row that may not fit together, such as n_head=5 and n_embd=256
PRUNED = "the trial was ended early with another seed"
FRESH_SEEDS = 5  # for the study that confirms a search
# settings of a search that the study that confirms it has not
OF_A_SEARCH = (
    "search",
    "trials",
    "sampler",
    "pruner",
    "storage",
    "max_minutes",
    "yes",
    "fail_unless",
    "seed",
    "study_dir",
)


class Superfluous(Exception):
    """The trial is one too many, another trial has its variant, or its settings do not fit together."""


class OutOfTime(Exception):
    """--max_minutes are over."""


def run(request: Request, plan: Design, folder: pathlib.Path, code: pathlib.Path, deadline: float) -> None:
    """Take trials until there are enough, or until `deadline`, of time.monotonic(). Leaves what `outcomes.read` reads.

    code: the folder of train.py. Raises UserError if the storage has another study, or is gone for good.
    """
    optuna = libraries(request.study.storage)
    if request.study.search and (moved := space.moved(request)):
        say(f"the config lies outside the space. The baseline, which lies in it, has {', '.join(moved)}")
    with files.lock(folder, shared=bool(request.study.storage)) as lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage")  # it has one
        worker = Worker(request, plan, folder, code, lock, deadline)
        try:
            worker.work()
        finally:
            worker.bar.close()
        worker.copy_outcomes()


@contextlib.contextmanager
def turn(folder: pathlib.Path) -> Iterator[None]:
    """Wait until no other worker writes the report of the study in `folder`."""
    while True:
        with contextlib.suppress(UserError):
            taken = files.lock(folder / "runs")
            break
        time.sleep(0.2)
    with taken:
        yield


class Worker:
    """Takes trials of a study, one after the other."""

    def __init__(
        self,
        request: Request,
        plan: Design,
        folder: pathlib.Path,
        code: pathlib.Path,
        lock: files.Lock,
        deadline: float,
    ):
        self.request, self.plan, self.folder, self.code, self.deadline = request, plan, folder, code, deadline
        s = request.study
        self.searches = bool(s.search)
        if self.searches:
            self.trials, self.space = s.trials, space.parse(s.search, request.shared)
            self.queued = request.variants  # tried whatever a sampler says: the baseline
        else:
            self.trials, self.space = len(plan.variants), space.of_grid(plan.variants, request.shared)
            self.queued = plan.variants
        self.optuna = libraries(s.storage)
        self.study, self.storage = open_study(request, plan, folder)
        if not s.storage:
            self._queue_again_what_was_running()
        if not s.storage or design.load(folder) is None:
            plan.save(folder)
        self.runner = Runner(plan, folder, dict.fromkeys(plan.variants, code), lock, say)
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(total=self.trials, disable=quiet, leave=False, unit="trial", dynamic_ncols=True)
        self.unheard: dict[int, float] = {}  # {a trial without a heartbeat: since when}
        self.reported: set[int] = set()  # iterations whose losses Optuna knows
        self.looked, self.shared, self.unfit = 0.0, False, 0

    def work(self) -> None:
        """Take trials until there are enough, or the time is over."""
        broken = failed = 0
        while True:
            try:
                trials = self._live()
                self.bar.n = sum(each.state.is_finished() for each in trials)
                self.bar.refresh()
                if self.bar.n >= self.trials:
                    return
                if time.monotonic() >= self.deadline:
                    raise OutOfTime
                self._queue(trials)
                if len(trials) < self.trials or any(each.state.name == "WAITING" for each in self._live()):
                    failed = failed + 1 if self._take() else 0
                else:
                    self._nap()
                broken = 0
            except OutOfTime:
                return say(f"the time is over after {self.bar.n} of {self.trials} trials: the same command goes on")
            except self.optuna.exceptions.StorageInternalError as error:  # the database went in the midst of a change
                broken += 1
                if broken == FRUITLESS:
                    raise UserError(f"the storage fails: {first_line(error.__cause__ or error)}") from error
            if failed == FRUITLESS:
                raise UserError(
                    f"{FRUITLESS} trials in a row failed: see the last lines of {self.folder / 'outcomes.jsonl'}"
                )

    def copy_outcomes(self) -> None:
        """Note runs that other workers have in folders of their own, so that the report needs no storage."""
        known, lines = set(outcomes.statuses(self.folder)), files.Lines(self.folder / "outcomes.jsonl")
        for trial in self._live():
            attributes = trial.user_attrs
            for seed, run in attributes.get("runs", {}).items():
                job = (attributes["variant"], int(seed))
                if job not in known:
                    row = {"variant": job[0], "seed": job[1], "settings": attributes["settings"]}
                    lines.add(files.json_line(row | run))
                    known.add(job)
        lines.close()

    def _live(self):
        """The trials that count, or will."""
        return [each for each in self.study.get_trials(deepcopy=False) if each.state.name != "FAIL"]

    def _queue(self, trials):
        """Queue the variants that are tried whatever a sampler says, unless they are in `trials`."""
        known = {each.user_attrs.get("variant") for each in trials}
        for variant, changes in self.queued.items():
            if variant not in known:
                values = {name: changes.get(name, getattr(self.request.shared, name)) for name in self.space}
                self.study.enqueue_trial(values, user_attrs={"variant": variant})

    def _queue_again_what_was_running(self):
        """In a study of one worker, a trial that is running at the start is one that broke off."""
        for trial in self.study.get_trials(states=(self.optuna.trial.TrialState.RUNNING,)):
            self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
            database.queue_again(self.study, trial)

    def _nap(self):
        """Wait a moment, and see to the trials of workers that have died."""
        time.sleep(NAP_S)
        if time.monotonic() > self.deadline:
            raise OutOfTime
        self.optuna.storages.fail_stale_trials(self.study)
        # a worker that died between taking a trial and its first heartbeat leaves one that never becomes stale
        running = [each for each in self._live() if each.state.name == "RUNNING" and "worker" not in each.user_attrs]
        now = time.monotonic()
        self.unheard = {each.number: self.unheard.get(each.number, now) for each in running}
        for trial in running:
            if now - self.unheard[trial.number] > database.GRACE_S:
                with contextlib.suppress(ValueError):  # another worker was faster
                    self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
                    database.queue_again(self.study, trial)

    def _take(self):
        """Take a trial and run it; whether it failed. A trial that breaks off is queued again.

        Optuna's own loop, Study.optimize, ends in an assertion of its own if the storage fails, or if another worker
        was given the trial.
        """
        state, errors = self.optuna.trial.TrialState, self.optuna.exceptions
        self.optuna.storages.fail_stale_trials(self.study)
        trial = self.study.ask()
        try:
            with database.heartbeat(self.storage, self.study.study_name, trial.number):
                value = self._value(trial)
            told = self.study.tell(trial, value, state=state.PRUNED if value is None else state.COMPLETE)
        except Superfluous:
            self.study.tell(trial, state=state.FAIL)
            return False
        except (Stopped, OutOfTime, KeyboardInterrupt, UserError, OSError, errors.StorageInternalError):
            with contextlib.suppress(ValueError, errors.UpdateFinishedTrialError, errors.StorageInternalError):
                database.queue_again(self.study, self.study.tell(trial, state=state.FAIL))
            raise
        except errors.UpdateFinishedTrialError:
            say(f"trial {trial.number} went to another worker: this one was not heard for {database.GRACE_S} s")
            return False
        return self._said(told)

    def _said(self, trial):
        """Say how a trial ended; whether it failed."""
        over = [each for each in self._live() if each.state.is_finished()]
        runs = trial.user_attrs["runs"].values()
        failed = [each["why"] for each in runs if each["status"] == "failed"]
        how = "ended early"
        if trial.state.name == "COMPLETE":
            best = min(each.value for each in over if each.state.name == "COMPLETE")
            how = f"{self.plan.metric} {trial.value:.5g}{', the best so far' if trial.value <= best else ''}"
        for status in STAND_INS:
            if number_of := sum(each["status"] == status for each in runs):
                how += f", {number_of} of {len(runs)} {status}"
        say(f"trial {len(over)} of {self.trials}, {trial.user_attrs['variant']}: {failed[0] if failed else how}")
        return bool(failed)

    def _value(self, trial):
        """Run the variant of a trial. Returns its value; None if it was ended early or failed.

        Raises Superfluous, OutOfTime, Stopped, or UpdateFinishedTrialError if another worker was given the trial.
        """
        trial.set_user_attr("worker", f"process {os.getpid()} on {socket.gethostname()}")
        named = trial.user_attrs.get("variant")
        earlier = [each for each in self._live() if each.number < trial.number]
        if len(earlier) >= self.trials or not (named or self.searches):
            raise Superfluous
        if named and any(each.user_attrs.get("variant") == named for each in earlier):
            raise Superfluous
        values = {name: axis.suggested(trial, name) for name, axis in self.space.items()}
        variant, changes = named or space.name_of(values), command.completed(self.request, values)
        self._require_fit(changes)
        changes = self.plan.variants.setdefault(variant, changes)
        trial.set_user_attr("variant", variant)
        trial.set_user_attr("settings", changes)
        twin = self._wait(trial.number, variant)
        runs = twin.user_attrs["runs"] if twin else self._runs(trial, variant)
        trial.set_user_attr("runs", runs)
        values = [each["value"] for each in runs.values() if each["status"] in ("finished", *STAND_INS)]
        return sum(values) / len(values) if len(values) == len(runs) and None not in values else None

    def _require_fit(self, changes):
        """Raise Superfluous for settings that do not fit together; UserError if that never ends."""
        try:
            space.check(self.request, changes)
        except UserError as error:
            self.unfit += 1
            if self.unfit == UNFIT:
                raise UserError(
                    f"{UNFIT} suggestions in a row do not fit together: {error}. Narrow --search"
                ) from error
            raise Superfluous from error
        self.unfit = 0

    def _wait(self, number, variant):
        """Wait for the earlier trials that this one depends on. Returns the one that ran the same variant, if any.

        The first run settles what `auto` means for all, and a variant that is running elsewhere need not run twice.
        """
        while True:
            earlier = [each for each in self._live() if each.number < number and each.state.name != "WAITING"]
            running = [each for each in earlier if each.state.name == "RUNNING"]
            twins = [each for each in earlier if each.user_attrs.get("variant") == variant]
            if not self.plan.settled and (found := self.study.user_attrs.get("settled")):
                self.plan.settled = found
                self.plan.save(self.folder)
            unknown = any("variant" not in each.user_attrs for each in running)
            same = any(each.state.name == "RUNNING" for each in twins)
            if not unknown and not same and (self.plan.settled or not running):
                return twins[0] if twins else None
            self._nap()

    def _runs(self, trial, variant):
        """Run the variant with all seeds; {seed: {"status", "why", "value"}}."""
        s, jobs = self.request.study, [(variant, seed) for seed in self.plan.seeds]
        self.runner.code[variant] = self.code
        self.reported = set()
        for batch in (jobs,) if s.pruner == "none" else (jobs[:1], jobs[1:]):  # the first seed decides on the others
            ended = {job: row["status"] for job, row in outcomes.statuses(self.folder).items() if job in jobs}
            if "pruned" not in ended.values():
                left = [job for job in batch if ended.get(job) not in OVER]
                list(self.runner.run(left, s.jobs, self.deadline, lambda job: self._look(trial, job)))
        self._look(trial, jobs[0], at_end=True)
        return self._records(variant)

    def _look(self, trial, job, at_end=False):
        """Tell Optuna the evaluations of the first seed, and workers what `auto` became; whether to end the run."""
        if job[1] != self.plan.seeds[0] or not (at_end or time.monotonic() - self.looked >= LOOK_S):
            return False
        self.looked = time.monotonic()
        if self.plan.settled and not self.shared:
            self.study.set_user_attr("settled", self.plan.settled)
            self.shared = True
        rows = []
        with contextlib.suppress(UserError):  # it has no metrics.jsonl yet
            rows = read_metrics(outcomes.folder_of(self.folder, *job), "eval")
        last = (self.plan.settings | self.plan.variants[job[0]])["max_iters"]
        for row in rows:
            if row["iter"] not in self.reported:
                self.reported.add(row["iter"])
                trial.report(number(row["val_loss"]), row["iter"])
                may_end = not at_end and row["iter"] < last and job[0] != self.plan.baseline
                if may_end and trial.should_prune():
                    return True
        return False

    def _records(self, variant):
        ended = outcomes.statuses(self.folder)
        runs = [
            outcomes.outcome(self.folder, self.plan, variant, seed, ended.get((variant, seed)))
            for seed in self.plan.seeds
        ]
        if any(each.status == "pruned" for each in runs):
            runs = [dataclasses.replace(each, status="pruned", why=each.why or PRUNED) for each in runs]
        if any(each.status == "missing" for each in runs):
            raise OutOfTime
        told = [run["value"] for each in self._live() for run in each.user_attrs.get("runs", {}).values()]
        known = [value for value in told if value is not None] + [each.value for each in runs]
        worst = outcomes.worst_of(known, [each.run for each in runs if each.run], self.plan.metric)
        values = {each.seed: worst if each.status in STAND_INS else each.value for each in runs}
        return {
            str(each.seed): {
                "status": each.status,
                "why": each.why,
                "value": values[each.seed] if math.isfinite(values[each.seed]) else None,
            }
            for each in runs
        }


def open_study(request: Request, plan: Design, folder: pathlib.Path) -> tuple[Any, Any]:
    """Optuna's study of the same name as `folder`, begun or joined, and its storage.

    Raises UserError if it is another study, or if the storage cannot be opened.
    """
    s, optuna = request.study, libraries(request.study.storage)
    storage, place = database.connect(s.storage or f"sqlite:///{folder.resolve() / 'study.db'}", say)
    name = folder.resolve().name
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True, pruner=_pruner(request))
    # workers would begin with the same settings if they had the same random numbers
    seed = None if s.storage else (plan.seeds[0] + len(study.trials)) % 2**32
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study.sampler = samplers[s.sampler](seed=seed)
    _require_same(study, plan, f"the study {name} in {place}")
    return study, storage


def _require_same(study, plan, place):
    """Let a new study in the storage have the design `plan`. Raise UserError if it has another."""
    if "design" not in study.user_attrs and not study.trials:  # if two begin at once, both see what the last one wrote
        told = dataclasses.replace(plan, command="", settled=None, threads=None, looks=0)
        study.set_user_attr("design", dataclasses.asdict(told))
    try:
        earlier = Design(**study.user_attrs["design"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{place} is not one of study.py, or of another version: name another --study_dir") from error
    fixed = (*SAME_STUDY, *SAME_VALUE, *(() if plan.kind == "search" else ("variants",)))
    design.require_same(earlier, plan, fixed, place)


def _pruner(request):
    pruners = libraries(request.study.storage).pruners
    if request.study.pruner == "none":
        return pruners.NopPruner()
    steps = command.completed(request, {}).get("max_iters", request.shared.max_iters)
    return pruners.HyperbandPruner(min_resource=request.shared.eval_interval, max_resource=steps)


def left(plan: Design, folder: pathlib.Path, trials: int) -> list[Job]:
    """As many runs as a search has left, each of the baseline: nobody knows the variants of the others."""
    over = sum(row["status"] in OVER for row in outcomes.statuses(folder).values())
    return [(plan.baseline, plan.seeds[0])] * max(0, trials * len(plan.seeds) - over)


def sentences(results: outcomes.Results) -> list[str]:
    """What a search found, in words, and the command that confirms it."""
    plan = results.design
    values = results.values()
    means = {name: sum(each.values()) / len(each) for name, each in values.items() if len(each) == len(plan.seeds)}
    best = min(means, key=means.get, default=plan.baseline)
    if plan.baseline not in means or best == plan.baseline:
        return [f"no trial is better than the baseline, {plan.baseline}"]
    found = f"the best of {len(means)} trials that ran to their end is {best}: {plan.metric} {means[best]:.5g}"
    (compared,) = (each for each in results.comparisons() if each.variant == best)
    return [
        f"{found}, and {means[plan.baseline]:.5g} for the baseline",
        verdict.sentence(compared, plan.baseline, plan.metric),
        "the best of many trials owes some of its lead to luck. To compare it with seeds that did not choose it:",
        f"    {confirmation(plan, best)}",
    ]


def confirmation(plan: Design, best: str) -> str:
    """The command of a study of the baseline and the variant `best` of a search, with seeds of its own."""
    names = [item.partition("=")[0] for item in plan.space.split(",")]
    dropped = (*OF_A_SEARCH, *names)
    kept = [each for each in shlex.split(plan.command) if each.lstrip("-").partition("=")[0] not in dropped]
    values = [[str(plan.variants[each][name]) for name in names] for each in (plan.baseline, best)]
    if any(mark in value for row in values for value in row for mark in ",:"):  # a kernel of a file, mine.py:attend
        return "name the two as `variants` in a config file, and give other seeds"
    first = max(plan.seeds) + 1
    kept += [f"--{','.join(names)}={','.join(map(':'.join, values))}", f"--seed={first}..{first + FRESH_SEEDS - 1}"]
    return shlex.join([*kept, "--study_dir=out-confirm"])


def say(line: str) -> None:
    """Print a line above the bar."""
    tqdm.write(line)
    sys.stdout.flush()
