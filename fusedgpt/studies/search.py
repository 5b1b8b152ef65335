"""A search: Optuna chooses variants. Workers on several machines may share one through a database.

    optuna-dashboard sqlite:///out-study/study.db       looks at it, also while it runs

A trial is a variant, run with all seeds; its value is the mean over them, infinite if a run has none. If a worker dies,
its heartbeat stops, and Optuna queues its trial again. Several workers may end with a trial more each.
"""

import dataclasses
import math
import re
import shlex
import time
import warnings
from collections.abc import Iterator

from fusedgpt.errors import UserError, first_line
from fusedgpt.machine import files
from fusedgpt.studies import command, design, outcomes, space
from fusedgpt.studies.command import Request
from fusedgpt.studies.design import Design
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.runner import Runner

HEARTBEAT_S, GRACE_S = 15, 180  # seconds between heartbeats, and without one until a trial is queued again
NAP_S = 1.0  # seconds until a variant that another worker runs is looked at again
FRUITLESS = 5  # trials in a row whose runs may fail before a worker gives up
UNFIT = 100  # suggestions in a row that may not fit together, such as n_head=5 and n_embd=256
FRESH_SEEDS = 5  # for the study that confirms a search
# settings of a search that the study that confirms it has not
OF_A_SEARCH = ("search", "trials", "storage", "max_minutes", "yes", "fail_unless", "seed", "looks", "study_dir")
FIXED = ("kind", "space", "varied", "metric", "target_loss", "seeds")


class Failed(Exception):
    """A trial has no value: its settings do not fit together, its runs failed, or the time is over."""


def run(request: Request, runner: Runner, deadline: float) -> None:
    """Take trials until there are enough, or until `deadline`, of time.monotonic(). Leaves what `outcomes.read` reads.

    Raises UserError if the storage has another study, or fails.
    """
    try:
        import optuna
        from sqlalchemy import exc
    except ImportError as error:
        raise UserError("--search needs Optuna: pip install 'optuna>=4.9'") from error
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heartbeats are an experiment, says Optuna
        try:
            Worker(request, runner, deadline).work()
        except Exception as error:  # if the storage is gone, Optuna may end in an error of its own beside it
            kinds = (exc.SQLAlchemyError, optuna.exceptions.StorageInternalError, ImportError)
            found = [each for each in _chain(error) if isinstance(each, kinds)]
            if not found:
                raise
            why = without_password(first_line(getattr(found[-1], "orig", None) or found[-1]))
            raise UserError(
                f"the storage fails: {why}. Nothing is lost: give the same command again, with a --storage as in"
                " postgresql://user@host/db, which needs pip install 'psycopg[binary]'"
            ) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


class Worker:
    """Takes trials of a study, one after the other."""

    def __init__(self, request: Request, runner: Runner, deadline: float):
        import optuna

        self.request, self.runner, self.deadline = request, runner, deadline
        self.plan, self.folder, self.say, self.states = runner.plan, runner.folder, runner.say, optuna.trial.TrialState
        self.space, self.trials = space.parse(request.study.search, request.shared), request.study.trials
        self.unfit = self.failed = 0
        self.queue_again = optuna.storages.RetryHeartbeatStaleTrialCallback()
        self.study = self._open(optuna)

    def _open(self, optuna):
        shared = self.request.study.storage
        url = shared or f"sqlite:///{self.folder.resolve() / 'study.db'}"
        storage = optuna.storages.RDBStorage(
            # Optuna formats it; psycopg is the driver that pip installs without a compiler
            url.replace("postgresql:", "postgresql+psycopg:", 1).replace("{", "{{").replace("}", "}}"),
            engine_kwargs={"pool_pre_ping": True},
            heartbeat_interval=HEARTBEAT_S,
            grace_period=GRACE_S,
            heartbeat_stale_trial_callback=self.queue_again,
        )
        name = self.folder.resolve().name
        study = optuna.create_study(study_name=name, storage=storage, load_if_exists=True)
        # workers would begin with the same settings if they had the same random numbers
        seed = None if shared else (self.plan.seeds[0] + len(study.trials)) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        if not study.trials:
            study.set_user_attr("fusedgpt", dataclasses.asdict(self.plan))
            baseline = self.plan.variants[self.plan.baseline]
            study.enqueue_trial({axis: baseline[axis] for axis in self.space}, skip_if_exists=True)
        if "fusedgpt" not in study.user_attrs:
            raise UserError(f"{without_password(url)} has another program's study of the name {name}")
        design.require_same(Design(**study.user_attrs["fusedgpt"]), self.plan, FIXED, f"the study {name}")
        if not shared:
            for trial in study.get_trials(states=(self.states.RUNNING,)):  # of a process that died
                study.tell(trial.number, state=self.states.FAIL)
                self.queue_again(study, trial)
        return study

    def work(self) -> None:
        """Take trials until there are enough, or the time is over."""
        import optuna

        self.plan.save(self.folder)
        if len(self._complete()) < self.trials:
            enough = optuna.study.MaxTrialsCallback(self.trials, states=(self.states.COMPLETE,))
            self.study.optimize(self._value, catch=(Failed,), callbacks=[self._ended, enough])
        self._copy_outcomes()

    def _complete(self):
        return self.study.get_trials(deepcopy=False, states=(self.states.COMPLETE,))

    def _ended(self, study, trial):
        if trial.state == self.states.COMPLETE:
            self.failed = 0
            best = "; the best so far" * (trial.number == study.best_trial.number)
            value = f"{trial.user_attrs['variant']}: {self.plan.metric} {trial.value:.5g}{best}"
            self.say(f"trial {len(self._complete())} of {self.trials}, {value}")

    def _value(self, trial):
        """Run the variant of a trial with all seeds; the mean of their values. Raises Failed or Stopped."""
        values = {name: axis.suggested(trial, name) for name, axis in self.space.items()}
        variant, changes = command.name_of(values), self._fitting(values)
        trial.set_user_attr("variant", variant)
        others = [each for each in self.study.get_trials(deepcopy=False) if each.number < trial.number]
        for each in [each for each in others if each.user_attrs.get("variant") == variant]:
            if each.state == self.states.COMPLETE:  # a repeated suggestion reuses its result
                trial.set_user_attr("rows", each.user_attrs["rows"])
                return each.value
            if each.state == self.states.RUNNING:
                time.sleep(NAP_S)
                raise Failed
        changes = self.plan.variants.setdefault(variant, changes)
        jobs = [(variant, seed) for seed in self.plan.seeds]
        try:
            list(self.runner.run(outcomes.left(self.folder, jobs), self.request.study.jobs, self.deadline))
        finally:
            ended = outcomes.statuses(self.folder)
            if any(job not in ended for job in jobs):  # broken off: it is queued again with its settings
                self.queue_again(self.study, self.study.get_trials(deepcopy=False)[trial.number])
        if any(job not in ended for job in jobs):
            self.say("the time is over: the same command goes on")
            self.study.stop()
            raise Failed
        rows = [ended[job] | {"settings": changes} for job in jobs]
        trial.set_user_attr("rows", rows)
        return self._mean(variant, rows)

    def _mean(self, variant, rows):
        found = [outcomes.outcome(self.plan, variant, row["seed"], row) for row in rows]
        if failed := [each.why for each in found if each.status == "failed"]:
            self.failed += 1
            self.say(f"{variant} failed: {failed[0]}")
            if self.failed == FRUITLESS:
                raise UserError(f"{FRUITLESS} trials in a row failed: {failed[0]}")
            raise Failed
        values = [each.value for each in found]
        return math.inf if any(map(math.isnan, values)) else sum(values) / len(values)

    def _fitting(self, values):
        """The settings of a variant. Raises Failed if they do not fit together; UserError if that never ends."""
        try:
            changes = command.completed(self.request, values)
            command.require_fit(self.request, changes)
        except UserError as error:
            self.unfit += 1
            if self.unfit == UNFIT:
                raise UserError(f"{UNFIT} suggestions in a row do not fit together: {error}") from error
            raise Failed from error
        self.unfit = 0
        return changes

    def _copy_outcomes(self):
        """Note runs that other workers have in folders of their own, so that the report needs no storage."""
        known, lines = set(outcomes.statuses(self.folder)), files.Lines(self.folder / "outcomes.jsonl")
        for row in [row for trial in self._complete() for row in trial.user_attrs["rows"]]:
            if (row["variant"], row["seed"]) not in known:
                known.add((row["variant"], row["seed"]))
                lines.add(files.json_line(row))


def without_password(text: str) -> str:
    """`text`, such as a command line, with the password of each URL hidden."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]+@", r"\1:***@", text)


def sentences(results: Results) -> list[str]:
    """What a search found, in words, and the command that confirms it."""
    plan, values = results.design, results.values()
    means = {name: sum(each.values()) / len(each) for name, each in values.items() if len(each) == len(plan.seeds)}
    best = min(means, key=means.get, default=plan.baseline)
    if best == plan.baseline:
        return [f"no trial that has a value is better than the baseline, {plan.baseline}"]
    return [
        f"the best of {len(means)} trials that have a value is {best}: {plan.metric} {means[best]:.5g}, and"
        f" {means.get(plan.baseline, math.nan):.5g} for the baseline",
        "the best of many trials owes some of its lead to luck, so this is no verdict. To compare it with seeds that"
        f" did not choose it: {confirmation(plan, best)}",
    ]


def confirmation(plan: Design, best: str) -> str:
    """The command of a study of the baseline and the variant `best` of a search, with seeds of its own."""
    names = tuple(item.partition("=")[0] for item in plan.space.split(","))
    flags = shlex.split(plan.command)
    kept = [flag for flag in flags if flag.lstrip("-").partition("=")[0] not in OF_A_SEARCH + names]
    values = [":".join(str(plan.variants[each][name]) for name in names) for each in (plan.baseline, best)]
    first = max(plan.seeds) + 1
    kept += [f"--{','.join(names)}={','.join(values)}", f"--seed={first}..{first + FRESH_SEEDS - 1}"]
    return shlex.join([*kept, "--study_dir=out-confirm"])
