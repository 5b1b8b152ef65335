"""A search: Optuna chooses variants. Workers on several machines may share one through a database.

    optuna-dashboard sqlite:///out-study/study.db       looks at it, also while it runs

A trial is a variant, run with all seeds; its value is the mean over them, infinite if a run has none, or if settings
do not fit together, as n_head=5 and n_embd=256. If a worker ends within a trial, its heartbeat stops, and Optuna queues
the trial again. Several workers may end with a trial more each.
"""

import contextlib
import dataclasses
import math
import re
import time
import warnings
from typing import Any

from fusedgpt.errors import UserError, first_line, shown
from fusedgpt.machine import files
from fusedgpt.settings import Settings
from fusedgpt.studies import command, design, outcomes
from fusedgpt.studies.command import Request
from fusedgpt.studies.design import Design
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.runner import Runner

RANGE = re.compile(r"([^|]+?)\.\.([^|]+?)(:log)?")
HEARTBEAT_S, GRACE_S = 15, 180  # seconds between heartbeats, and without one until a trial is queued again
NAP_S = 1.0  # seconds until a variant that another worker runs is looked at again
FRESH_SEEDS = 5  # for the study that confirms a search
FIXED = ("kind", "space", "varied", "metric", "seeds")


@dataclasses.dataclass(frozen=True)
class Axis:
    """The values that a search may give to a setting: `choices`, in no order, or numbers from low to high.

    The numbers have the setting's type. log: they are spread over orders of magnitude.
    """

    choices: tuple = ()
    low: float = math.nan
    high: float = math.nan
    log: bool = False

    def suggested(self, trial: Any, name: str) -> Any:
        """The value that Optuna suggests to a trial."""
        if self.choices:
            return trial.suggest_categorical(name, self.choices)
        if isinstance(self.low, int):
            return trial.suggest_int(name, self.low, self.high, log=self.log)
        return self.nearest(trial.suggest_float(name, self.low, self.high, log=self.log))

    def nearest(self, value: Any) -> Any:
        """The value that is nearest to `value`, with few enough digits for a variant's name; else the first."""
        if self.choices:
            return next((each for each in self.choices if each == value), self.choices[0])
        if type(value) not in (int, float):  # None
            return self.low
        if isinstance(self.low, float):
            value = float(f"{value:.4g}")
        return min(max(value, self.low), self.high)


def space_of(text: str, shared: Settings) -> dict[str, Axis]:
    """The space of --search='learning_rate=1e-3..2e-2:log, optimizer=adamw|muon': {setting: its values}.

    Raises UserError unless train.py takes them beside `shared`.
    """
    space = {}
    for item in text.split(","):
        name, _, values = (part.strip() for part in item.partition("="))
        if not values or name in space:
            raise UserError(f"--search has {shown(item)}: write each setting once, as low..high, low..high:log or a|b")
        command.require_may_vary(name)
        space[name] = _axis(name, values, shared)
    return space


def _axis(name, text, shared):
    if not (found := RANGE.fullmatch(text)):
        values = tuple(command.value_of(name, each.strip(), shared) for each in text.split("|"))
        if len({command.name_of({name: value}) for value in values}) < max(2, len(values)):
            raise UserError(f"--search: {name}={text} must be different choices, a|b, or a range of numbers, low..high")
        return Axis(values)
    low, high = (command.value_of(name, each, shared) for each in found.groups()[:2])
    if type(low) not in (int, float) or not low < high < math.inf or (found[3] and low <= 0):
        raise UserError(f"--search: {name}={text} must be numbers that go up, above 0 with :log, or choices, a|b")
    return Axis(low=low, high=high, log=bool(found[3]))


def prepared(request: Request) -> Request:
    """`request`, which has --search, with one variant, the baseline: the config's settings, moved into the space.

    Raises UserError for a search that makes no sense, or whose baseline cannot run.
    """
    s = request.study
    if s.against or list(request.variants) != ["config"]:
        raise UserError("--search chooses the variants: leave out --against and the lists of values, except for --seed")
    space = space_of(s.search, request.shared)
    baseline = {name: axis.nearest(getattr(request.shared, name)) for name, axis in space.items()}
    changes = command.completed(request, baseline)
    command.require_fit(request, changes)
    return dataclasses.replace(request, variants={command.name_of(baseline): changes})


def run(request: Request, runner: Runner) -> None:
    """Take trials until there are enough. Leaves what `outcomes.read` reads.

    Raises UserError if the storage has another study, or fails.
    """
    import optuna
    from sqlalchemy import exc

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heartbeats are an experiment, says Optuna
        try:
            Worker(request, runner).work()
        except Exception as error:
            kinds = (exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)
            # if the storage is gone, Optuna may end in an error of its own beside it
            found = next((each for each in (error, error.__context__) if isinstance(each, kinds)), None)
            if not found:
                raise
            why = without_password(first_line(found.__cause__ or found))
            raise UserError(f"the storage fails: {why}. Nothing is lost: give the same command again") from error


class Worker:
    """Takes trials of a study, one after the other."""

    def __init__(self, request: Request, runner: Runner):
        import optuna

        self.request, self.runner, self.plan, self.folder = request, runner, runner.plan, runner.folder
        self.space, self.trials = space_of(request.study.search, request.shared), request.study.trials
        self.pruned = optuna.TrialPruned
        shared, queue_again = request.study.storage, optuna.storages.RetryHeartbeatStaleTrialCallback()
        url = shared or f"sqlite:///{self.folder.resolve() / 'study.db'}"
        storage = _storage(url, heartbeat_stale_trial_callback=queue_again)
        name = self.folder.resolve().name
        self.study = study = optuna.create_study(study_name=name, storage=storage, load_if_exists=True)
        # workers would begin with the same settings if they had the same random numbers
        seed = None if shared else (self.plan.seeds[0] + len(study.trials)) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        if all(each.state.name == "FAIL" for each in study.trials):  # of none, or the first ended in an error
            study.set_user_attr("fusedgpt", dataclasses.asdict(self.plan))
            baseline = self.plan.variants[self.plan.baseline]
            study.enqueue_trial({axis: baseline[axis] for axis in self.space}, skip_if_exists=not study.trials)
        if "fusedgpt" not in study.user_attrs:
            raise UserError(f"{without_password(url)} has another program's study of the name {name}")
        design.require_same(Design(**study.user_attrs["fusedgpt"]), self.plan, FIXED, f"the study {name}")
        for trial in [] if shared else self._in_state("RUNNING"):  # of a process that has ended
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            queue_again(study, trial)

    def _in_state(self, name):
        return [each for each in self.study.get_trials(deepcopy=False) if each.state.name == name]

    def work(self) -> None:
        """Take trials until there are enough."""
        from optuna.study import MaxTrialsCallback

        self.plan.save(self.folder)
        if len(self._in_state("COMPLETE")) < self.trials:
            self.study.optimize(self._value, callbacks=[self._ended, MaxTrialsCallback(self.trials)])
        self._copy_outcomes()

    def _ended(self, study, trial):
        if trial.state.name == "COMPLETE":
            best = "; the best so far" * (trial.number == study.best_trial.number)
            value = f"{trial.user_attrs['variant']}: {self.plan.metric} {trial.value:.5g}{best}"
            self.runner.say(f"trial {len(self._in_state('COMPLETE'))} of {self.trials}, {value}")

    def _value(self, trial):
        """Run the variant of a trial with all seeds; the mean of their values."""
        values = {name: axis.suggested(trial, name) for name, axis in self.space.items()}
        variant = command.name_of(values)
        trial.set_user_attr("variant", variant)
        trial.set_user_attr("rows", [])
        try:
            changes = command.completed(self.request, values)
            command.require_fit(self.request, changes)
        except UserError as error:
            self.runner.say(f"{variant} is not tried: {error}")
            return math.inf
        others = [each for each in self._in_state("RUNNING") if each.number < trial.number]
        if any(each.user_attrs.get("variant") == variant for each in others):
            time.sleep(NAP_S)
            raise self.pruned
        changes = self.plan.variants.setdefault(variant, changes)
        jobs = [(variant, seed) for seed in self.plan.seeds]
        list(self.runner.run(outcomes.left(self.folder, jobs), self.request.study.jobs))
        ended = outcomes.statuses(self.folder)
        rows = [ended[job] | {"settings": changes} for job in jobs]
        trial.set_user_attr("rows", rows)
        losses = [outcomes.outcome(self.plan, variant, row["seed"], row).value for row in rows]
        return math.inf if any(map(math.isnan, losses)) else sum(losses) / len(losses)

    def _copy_outcomes(self):
        """Note runs that other workers have in folders of their own, so that the report needs no storage."""
        known, lines = set(outcomes.statuses(self.folder)), files.Lines(self.folder / "outcomes.jsonl")
        for row in [row for trial in self._in_state("COMPLETE") for row in trial.user_attrs["rows"]]:
            if (row["variant"], row["seed"]) not in known:
                known.add((row["variant"], row["seed"]))
                lines.add(files.json_line(row))


def _storage(url, **how):
    """Optuna's storage at `url`. Of workers that start together, all but one fail to make its tables, and try again."""
    from optuna.storages import RDBStorage
    from sqlalchemy import exc

    # Optuna formats it; psycopg is the driver that pip installs without a compiler
    url = url.replace("postgresql:", "postgresql+psycopg:", 1).replace("{", "{{").replace("}", "}}")
    how |= dict(engine_kwargs={"pool_pre_ping": True}, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)
    with contextlib.suppress(exc.SQLAlchemyError):
        return RDBStorage(url, **how)
    time.sleep(NAP_S)
    return RDBStorage(url, **how)


def without_password(text: str) -> str:
    """`text`, such as a command line, with the password of each URL hidden."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]+@", r"\1:***@", text)


def sentences(results: Results) -> list[str]:
    """What a search found, in words, and the flags of the study that confirms it."""
    plan, values = results.design, results.values()
    means = {name: sum(each.values()) / len(each) for name, each in values.items() if len(each) == len(plan.seeds)}
    best = min(means, key=means.get, default=plan.baseline)
    if best == plan.baseline:
        return [f"no trial that has a value is better than the baseline, {plan.baseline}"]
    # the file of an attention, FILE:FUNCTION, can only stand last
    names = sorted((item.partition("=")[0].strip() for item in plan.space.split(",")), key="attention".__eq__)
    both = [":".join(str(plan.variants[each][name]) for name in names) for each in (plan.baseline, best)]
    first = max(plan.seeds) + 1
    flags = f"--{','.join(names)}={','.join(both)} --seed={first}..{first + FRESH_SEEDS - 1} --study_dir=out-confirm"
    return [
        f"the best of {len(means)} trials that have a value is {best}: {plan.metric} {means[best]:.5g}, and"
        f" {means.get(plan.baseline, math.nan):.5g} for the baseline",
        "the best of many trials owes some of its lead to luck, so this is no verdict. To compare it with seeds that"
        f" did not choose it, give {flags} in place of --search, --trials, --storage, --seed and --study_dir",
    ]
