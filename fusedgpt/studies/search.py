"""A search: Optuna chooses variants. Workers on several machines may share one through a database.

    optuna-dashboard sqlite:///out-study/study.db       looks at it, also while it runs

A trial is a variant, run with all seeds; its value is the mean over them, infinite if a run has none. If a worker dies,
its heartbeat stops, and Optuna queues its trial again.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
import shlex
import time
import warnings
from collections.abc import Callable

from fusedgpt.errors import UserError, first_line, shown
from fusedgpt.machine import files
from fusedgpt.studies import command, design, outcomes, space
from fusedgpt.studies.command import Request
from fusedgpt.studies.design import Design
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.runner import Runner, Stopped

HEARTBEAT_S, GRACE_S = 15, 180  # seconds between heartbeats, and without one until a trial is queued again
NAP_S = 1.0  # seconds between looks at what other workers do
FRUITLESS = 5  # trials in a row that may fail before a worker gives up
UNFIT = 100  # suggestions in a row that may not fit together, such as n_head=5 and n_embd=256
DRIVERS = {"postgresql": "psycopg"}  # which pip installs without a compiler
FRESH_SEEDS = 5  # for the study that confirms a search
# settings of a search that the study that confirms it has not
OF_A_SEARCH = ("search", "trials", "storage", "max_minutes", "yes", "fail_unless", "seed", "looks", "study_dir")


class Failed(Exception):
    """A trial has no value: it was one too many, its settings do not fit together, or its runs failed."""


class OutOfTime(Exception):
    """--max_minutes are over."""


def run(request: Request, plan: Design, folder: pathlib.Path, runner: Runner, deadline: float, say: Callable) -> None:
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
            Worker(request, plan, folder, runner, deadline, say).work()
        except Exception as error:  # if the storage is gone, Optuna may end in an error of its own beside it
            kinds = (exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)
            if not (found := [each for each in _chain(error) if isinstance(each, kinds)]):
                raise
            why = first_line(getattr(found[-1], "orig", None) or found[-1])
            raise UserError(f"the storage fails: {why}. Nothing is lost: give the same command again") from error


def _chain(error):
    """An error and those that led to it."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


class Worker:
    """Takes trials of a study, one after the other."""

    def __init__(
        self,
        request: Request,
        plan: Design,
        folder: pathlib.Path,
        runner: Runner,
        deadline: float,
        say: Callable[[str], None],
    ):
        import optuna

        self.request, self.plan, self.folder, self.runner = request, plan, folder, runner
        self.deadline, self.say, self.states = deadline, say, optuna.trial.TrialState
        self.space, self.trials = space.parse(request.study.search, request.shared), request.study.trials
        self.unfit = self.failed = 0
        self.queue_again = optuna.storages.RetryHeartbeatStaleTrialCallback()
        self.study = self._open(optuna)

    def _open(self, optuna):
        s = self.request.study
        url = s.storage or f"sqlite:///{self.folder.resolve() / 'study.db'}"
        storage = optuna.storages.RDBStorage(
            driven(url).replace("{", "{{").replace("}", "}}"),  # Optuna formats it
            engine_kwargs={"pool_pre_ping": True},
            heartbeat_interval=HEARTBEAT_S,
            grace_period=GRACE_S,
            heartbeat_stale_trial_callback=self.queue_again,
        )
        name = self.folder.resolve().name
        try:
            study, begun = optuna.create_study(study_name=name, storage=storage), True
        except optuna.exceptions.DuplicatedStudyError:
            study, begun = optuna.load_study(study_name=name, storage=storage), False
        # workers would begin with the same settings if they had the same random numbers
        seed = None if s.storage else (self.plan.seeds[0] + len(study.trials)) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        if begun:
            study.set_user_attr("design", dataclasses.asdict(dataclasses.replace(self.plan, command="", settled=None)))
            study.enqueue_trial({axis: self.plan.variants[self.plan.baseline][axis] for axis in self.space})
        for _ in range(5):  # the worker that began it has not yet said what it is
            if "design" not in study.user_attrs:
                time.sleep(NAP_S)
        try:
            earlier = Design(**study.user_attrs["design"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{without_password(url)} has another program's study of this name") from error
        fixed = ("kind", "space", "varied", "metric", "target_loss", "seeds")
        design.require_same(earlier, self.plan, fixed, f"the study {name} in the storage")
        if not s.storage:
            for trial in study.get_trials(states=(self.states.RUNNING,)):  # of a process that died
                study.tell(trial.number, state=self.states.FAIL)
                self.queue_again(study, trial)
        return study

    def work(self) -> None:
        """Take trials until there are enough, or the time is over."""
        import optuna

        self.plan.save(self.folder)
        try:
            while not self._enough(self.states.COMPLETE):
                if self._enough() and not self._waiting():  # other workers have the last trials, unless they have died
                    time.sleep(NAP_S)
                    optuna.storages.fail_stale_trials(self.study)
                else:
                    self.study.optimize(self._value, catch=(Failed,), callbacks=[self._ended])
                if time.monotonic() >= self.deadline:
                    raise OutOfTime
        except OutOfTime:
            self.say("the time is over: the same command goes on")
        self._copy_outcomes()

    def _waiting(self):
        return self.study.get_trials(deepcopy=False, states=(self.states.WAITING,))

    def _live(self, *states):
        every = self.study.get_trials(deepcopy=False, states=states or None)
        return [each for each in every if each.state != self.states.FAIL]

    def _enough(self, *states):
        return len(self._live(*states)) >= self.trials

    def _ended(self, study, trial):
        """Say how a trial ended; stop if there are enough, or if one after the other fails."""
        if trial.state == self.states.COMPLETE:
            self.failed = 0
            over = self._live(self.states.COMPLETE)
            best = "; the best so far" * (trial.value <= min(each.value for each in over))
            name = trial.user_attrs["variant"]
            self.say(f"trial {len(over)} of {self.trials}, {name}: {self.plan.metric} {trial.value:.5g}{best}")
        if self._enough() and not self._waiting():
            study.stop()

    def _value(self, trial):
        """Run the variant of a trial with all seeds; the mean of their values. Raises Failed, OutOfTime or Stopped."""
        if time.monotonic() >= self.deadline:
            self._broken_off(trial)
            raise OutOfTime
        earlier = [each for each in self._live() if each.number < trial.number]
        if len(earlier) >= self.trials:
            raise Failed
        values = {name: axis.suggested(trial, name) for name, axis in self.space.items()}
        variant, changes = space.name_of(values), command.completed(self.request, values)
        self._require_fit(changes)
        trial.set_user_attr("variant", variant)
        for each in earlier:  # settings that come again are not run again
            if each.user_attrs.get("variant") == variant and each.state == self.states.COMPLETE:
                trial.set_user_attr("rows", each.user_attrs["rows"])
                return each.value
            if each.user_attrs.get("variant") == variant and each.state == self.states.RUNNING:
                time.sleep(NAP_S)
                raise Failed
        changes = self.plan.variants.setdefault(variant, changes)
        jobs = [(variant, seed) for seed in self.plan.seeds]
        try:
            list(self.runner.run(outcomes.left(self.folder, jobs), self.request.study.jobs, self.deadline))
        except (Stopped, UserError, KeyboardInterrupt):
            self._broken_off(trial)
            raise
        ended = outcomes.statuses(self.folder)
        if any(job not in ended for job in jobs):
            self._broken_off(trial)
            raise OutOfTime
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

    def _broken_off(self, trial):
        """Queue a trial again, with the settings that it has."""
        with contextlib.suppress(Exception):  # the database may be what broke it off: then its heartbeat stops
            frozen = self.study.get_trials(deepcopy=False)[trial.number]
            self.queue_again(self.study, frozen)

    def _require_fit(self, changes):
        """Raise Failed for settings that do not fit together; UserError if that never ends."""
        try:
            space.check(self.request, changes)
        except UserError as error:
            self.unfit += 1
            if self.unfit == UNFIT:
                raise UserError(
                    f"{UNFIT} suggestions in a row do not fit together: {error}. Narrow --search"
                ) from error
            raise Failed from error
        self.unfit = 0

    def _copy_outcomes(self):
        """Note runs that other workers have in folders of their own, so that the report needs no storage."""
        known, lines = set(outcomes.statuses(self.folder)), files.Lines(self.folder / "outcomes.jsonl")
        for trial in self._live(self.states.COMPLETE):
            for row in trial.user_attrs["rows"]:
                if (row["variant"], row["seed"]) not in known:
                    known.add((row["variant"], row["seed"]))
                    lines.add(files.json_line(row))
        lines.close()


def driven(url: str) -> str:
    """`url` with the driver that we name, for SQLAlchemy. Raises UserError if it is no database, or without driver."""
    import sqlalchemy
    from sqlalchemy import exc

    try:
        parsed = sqlalchemy.make_url(url)
        if parsed.drivername in DRIVERS:
            parsed = parsed.set(drivername=f"{parsed.drivername}+{DRIVERS[parsed.drivername]}")
        parsed.get_dialect().import_dbapi()
        return parsed.render_as_string(hide_password=False)
    except (exc.ArgumentError, exc.NoSuchModuleError) as error:
        wanted = "write postgresql://user@host/db"
        raise UserError(f"--storage={shown(without_password(url))} is no database: {wanted}") from error
    except ImportError as error:
        raise UserError(f"{without_password(url)} needs a driver: pip install 'psycopg[binary]'") from error


def without_password(text: str) -> str:
    """`text`, such as a command line, with the password of each URL hidden."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]+@", r"\1:***@", text)


def sentences(results: Results) -> list[str]:
    """What a search found, in words, and the command that confirms it."""
    plan, values = results.design, results.values()
    means = {name: sum(each.values()) / len(each) for name, each in values.items() if len(each) == len(plan.seeds)}
    best = min(means, key=means.get, default=plan.baseline)
    if plan.baseline not in means:
        return [f"the baseline, {plan.baseline}, has no value yet, or {' and '.join(results.without(plan.baseline))}"]
    if best == plan.baseline:
        return [f"no trial is better than the baseline, {plan.baseline}"]
    return [
        f"the best of {len(means)} trials that have a value is {best}: {plan.metric} {means[best]:.5g}, and"
        f" {means[plan.baseline]:.5g} for the baseline",
        "the best of many trials owes some of its lead to luck, so this is no verdict. To compare it with seeds that"
        f" did not choose it: {confirmation(plan, best)}",
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
