"""The space of a search: `--search='learning_rate=1e-3..2e-2:log, optimizer=adamw|muon'`, read and checked."""

import dataclasses
import math
import re
from typing import Any

from fusedgpt.errors import UserError, shown
from fusedgpt.settings import Settings, validate_each
from fusedgpt.studies import command
from fusedgpt.studies.command import Request

RANGE = re.compile(r"([^|]+?)\.\.([^|]+?)(:log)?")
OF_ALL = ("seed", "dataset", "init_from")  # each trial has the same


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from low to high, of the setting's type. log: they are spread over orders of magnitude."""

    low: float
    high: float
    log: bool

    def suggested(self, trial: Any, name: str) -> float:
        """The value that Optuna suggests to a trial."""
        if isinstance(self.low, int):
            return trial.suggest_int(name, self.low, self.high, log=self.log)
        return self.nearest(trial.suggest_float(name, self.low, self.high, log=self.log))

    def nearest(self, value: Any) -> float:
        """The value of the range that is nearest to `value`, rounded so that a variant's name tells it whole."""
        if type(value) not in (int, float):  # None
            return self.low
        if isinstance(self.low, float):
            value = float(f"{value:.4g}")
        return min(max(value, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class Choices:
    """Some values, in no order."""

    values: tuple

    def suggested(self, trial: Any, name: str) -> Any:
        """The value that Optuna suggests to a trial."""
        return trial.suggest_categorical(name, self.values)

    def nearest(self, value: Any) -> Any:
        """`value` if it is a choice, otherwise the first choice."""
        return value if value in self.values else self.values[0]


Space = dict[str, Range | Choices]


def parse(text: str, shared: Settings) -> Space:
    """The space that --search=`text` names. Raises UserError unless train.py takes its values beside `shared`."""
    space = {}
    for item in text.split(","):
        name, _, values = (part.strip() for part in item.partition("="))
        if not values or name in space:
            raise UserError(f"--search has {shown(item)}: write each setting once, as low..high, low..high:log or a|b")
        if name in OF_ALL:
            raise UserError(f"--search cannot choose {name}: it is one for all trials")
        command.require_may_vary(name)
        space[name] = _axis(name, values, shared)
    return space


def _axis(name, text, shared):
    if not (found := RANGE.fullmatch(text)):
        values = tuple(command.value_of(name, each.strip(), shared) for each in text.split("|"))
        if len({command.name_of({name: value}) for value in values}) < max(2, len(values)):
            raise UserError(f"--search: {name}={text} must be different choices, a|b, or a range of numbers, low..high")
        return Choices(values)
    low, high = (command.value_of(name, each, shared) for each in found.groups()[:2])
    if type(low) not in (int, float) or not low < high < math.inf or (found[3] and low <= 0):
        raise UserError(f"--search: {name}={text} must be numbers that go up, above 0 with :log, or choices, a|b")
    for value in (low, high):
        # a bound need not fit the other dimensions: a trial takes others until they fit
        validate_each(dataclasses.replace(shared, out_dir="run", **{name: value}))
    return Range(low, high, bool(found[3]))


def prepared(request: Request) -> Request:
    """`request`, which has --search, with one variant, the baseline: the config's settings, moved into the space.

    Raises UserError for a search that makes no sense, or whose baseline cannot run.
    """
    s = request.study
    if s.against or list(request.variants) != ["config"]:
        raise UserError("--search chooses the variants: leave out --against and the lists of values, except for --seed")
    if s.jobs > len(request.seeds):
        raise UserError(f"jobs={s.jobs}: a trial of a search runs its {len(request.seeds)} seed(s): start more workers")
    command.require_meant(s.trials * len(request.seeds), s)
    space = parse(s.search, request.shared)
    baseline = {name: axis.nearest(getattr(request.shared, name)) for name, axis in space.items()}
    changes = command.completed(request, baseline)
    command.require_fit(request, changes)
    return dataclasses.replace(request, variants={command.name_of(baseline): changes})
