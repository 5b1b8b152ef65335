"""The space of a search: `--search='learning_rate=1e-3..2e-2:log, optimizer=adamw|muon'`, read and checked."""

import dataclasses
import math
import re
from typing import Any

from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError, shown
from fusedgpt.settings import Settings, validate, validate_each
from fusedgpt.studies import command
from fusedgpt.studies.command import SET_BY_THE_STUDY, SHARED, Request

RANGE = re.compile(r"(.+?)\.\.(.+?)(:log)?")
# settings that no search chooses, each with the reason
NOT_SEARCHED = SET_BY_THE_STUDY | {
    "seed": "each trial runs all seeds of --seed=1..3",
    "dataset": "losses on different data say nothing about settings",
    "init_from": "all runs begin from the same weights",
}


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from low to high, of the setting's type. log: they are spread over orders of magnitude."""

    low: float
    high: float
    log: bool

    def suggested(self, trial: Any, name: str) -> float:
        """The value that Optuna suggests to a trial."""
        suggest = trial.suggest_int if isinstance(self.low, int) else trial.suggest_float
        return self.nearest(suggest(name, self.low, self.high, log=self.log))

    def nearest(self, value: Any) -> float:
        """The value of the range that is nearest to `value`, rounded so that a variant's name tells it whole."""
        if type(value) not in (int, float):  # None
            return self.low
        rounded = value if isinstance(self.low, int) else float(f"{value:.4g}")
        return min(max(rounded, self.low), self.high)


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
        if not values:
            raise UserError(
                f"--search has {shown(item)}: write setting=low..high, setting=low..high:log or setting=a|b"
            )
        if name in space:
            raise UserError(f"--search has {name} twice: give it once")
        if name in NOT_SEARCHED or name in SHARED:
            why = NOT_SEARCHED.get(name, "it is one for the whole study")
            raise UserError(f"--search cannot choose {name}: {why}")
        space[name] = _axis(name, values, shared)
    return space


def _axis(name, text, shared):
    found = RANGE.fullmatch(text) if "|" not in text else None
    texts = found.groups()[:2] if found else [each.strip() for each in text.split("|")]
    values = [command.value_of(name, each, shared) for each in texts]
    refused = f"--search: {name}={text}"
    if not found:
        if len({command.name_of({name: value}) for value in values}) < max(2, len(values)):
            raise UserError(f"{refused} must be different choices, a|b, or a range of numbers, low..high")
        return Choices(tuple(values))
    low, high = values
    if not all(type(value) in (int, float) for value in values):
        raise UserError(f"{refused} is a range, but {name} is no number: give choices, as in {name}=a|b")
    if not (low < high and math.isfinite(high - low)):
        raise UserError(f"{refused} must go up, from a finite number to another")
    if found[3] and low <= 0:
        raise UserError(f"{refused}: a range that is :log must begin above 0")
    for value in values:
        # a bound need not fit the other dimensions: a trial takes others until they fit
        validate_each(dataclasses.replace(shared, out_dir="run", **{name: value}))
    return Range(low, high, bool(found[3]))


def prepared(request: Request) -> Request:
    """`request`, which has --search, with one variant, the baseline: the config's settings, moved into the space.

    Raises UserError for a search that makes no sense, or whose baseline cannot run.
    """
    s, shared = request.study, request.shared
    if s.against or list(request.variants) != ["config"]:
        raise UserError("--search chooses the variants: leave out --against and the lists of values, except for --seed")
    if s.jobs > len(request.seeds):
        raise UserError(
            f"jobs={s.jobs}: a trial of a search runs its {len(request.seeds)} seed(s) at once: give more seeds, or"
            " start more workers, each with the same --storage"
        )
    space = parse(s.search, shared)
    command.require_meant(s.trials * len(request.seeds), s)
    sizes = space.get("batch_size") if shared.eval_iters else None
    for size in range(sizes.low, sizes.high + 1) if isinstance(sizes, Range) else getattr(sizes, "values", ()):
        command.completed(request, {"batch_size": size})  # raises for one that does not divide the windows
    baseline = {name: axis.nearest(getattr(shared, name)) for name, axis in space.items()}
    changes = command.completed(request, baseline)
    check(request, changes)
    return dataclasses.replace(request, variants={name_of(baseline): changes})


def name_of(values: dict[str, Any]) -> str:
    """The name of the variant with these `values` of a space. No other values have it."""
    return command.shortened(command.name_of(values))


def check(request: Request, changes: dict[str, Any]) -> None:
    """Raise UserError if a variant with these `changes` could not run."""
    one = dataclasses.replace(request.shared, out_dir="run", **changes)
    validate(one)
    GPTConfig.of(one)
