"""The command line of a study: which settings vary and over which values, which seeds, and what all runs share."""

import collections
import dataclasses
import functools
import itertools
import math
import operator
import re
import runpy
from typing import Any, Literal

from configurator import LENT, assigned, changed, configure, separate
from fusedgpt.errors import UserError, shown
from fusedgpt.settings import Settings, require_learning, validate

RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
# settings of train.py that a study sets itself, each with the reason
SET_BY_THE_STUDY = {
    "out_dir": "each run has a folder of its own in --study_dir",
    "eval_only": "a run of a study trains",
    "patience": "it would end runs at different iterations of their schedules",
    "max_seconds": "it would end runs at different iterations of their schedules: give --minutes to each run",
}
# settings that take one value for the whole study: they change what a run keeps and says, not what it learns
SHARED = ("profile", "log_interval", "keep_checkpoints", "always_save_checkpoint", "sample_interval", "eval_tasks")
SHARED += ("sample_prompts", "wandb_log", "wandb_project", "wandb_run_name", "backend", "timeout", "minutes")


@dataclasses.dataclass
class StudySettings:
    # folder of the study; the same command continues the study in it, and more seeds or variants are added to it
    study_dir: str = "out-study"
    baseline: str | None = None  # variant that the others are compared with, as the table names it; None: the first
    # what is compared, lower is better: the validation loss at the end, also in bits per byte. The time of a step is in
    # every table
    metric: Literal["val_loss", "bits_per_byte"] = "val_loss"
    looks: str = ""  # as in 5,10: make a verdict after so many seeds too, and end the study if it is decided then
    matters: float | None = None  # the smallest difference of interest: the verdict says which are surely smaller
    against: str | None = None  # a git commit, or the folder of a clone: compare its code with the working tree's
    # let Optuna choose settings, as in 'learning_rate=1e-3..2e-2:log, n_layer=2..6, optimizer=adamw|muon'
    search: str | None = None
    trials: int = 40  # that a search makes, over all workers and calls; each worker may end with one more
    # database in which workers share a search: the same command joins it, and a worker that is killed loses nothing.
    # postgresql://user@host/db
    storage: str | None = None
    jobs: int = 1  # runs at once; each gets its share of the CPU's cores


OWN = tuple(field.name for field in dataclasses.fields(StudySettings))


@dataclasses.dataclass
class Request:
    """What a command line asks for."""

    study: StudySettings
    shared: Settings  # of all runs, except for what varies and the seed
    variants: dict[str, dict[str, Any]]  # {name: its settings}; one, {"config": {}}, if nothing varies
    seeds: list[int]
    given: list[str]  # names of settings from config files and flags, also if they are defaults


@dataclasses.dataclass
class AllSettings(StudySettings, Settings):
    """All settings that a study takes: its own and those of its runs."""


def read(args: list[str], description: str) -> Request:
    """Read config files and flags, in the forms that study.py's help lists. Raises UserError for bad input."""
    files, flags = separate(args)
    lists = [flag for flag in flags if _varies(flag)]
    plain = [*files, *(flag for flag in flags if flag not in lists)]
    unused = SET_BY_THE_STUDY | {"variants": "a config file names variants"}
    both = dataclasses.asdict(configure(AllSettings(), plain, description, unused))
    given = [name for name, _, _ in assigned(AllSettings(), plain, unused)]
    study = StudySettings(**{name: both[name] for name in OWN})
    shared = Settings(**{field.name: both[field.name] for field in dataclasses.fields(Settings)})
    _require_once([name for flag in flags for name in flag.removeprefix("--").partition("=")[0].split(",")])
    seeds = [shared.seed]
    axes = [axis for axis in (_named(file, shared) for file in files) if axis]
    for flag in lists:
        axis = _axis(flag, shared)
        if flag.startswith("--seed="):
            seeds = [each["seed"] for each in axis.values()]
        else:
            axes.append(axis)
    _require_once([name for axis in axes for name in {name: None for each in axis.values() for name in each}])
    variants = {}
    for names in itertools.product(*axes):
        changes = [axis[name] for axis, name in zip(axes, names)]
        variants[",".join(names) or "config"] = functools.reduce(operator.or_, changes, {})
    varied = {name: both[name] for changes in variants.values() for name in changes}
    for name in [flag.removeprefix("--").partition("=")[0] for flag in flags if flag not in lists]:
        if all(name in changes for changes in variants.values()):
            raise UserError(f"--{name} would change nothing: each variant has a {name} of its own")
    # variants of a file may set different settings: each keeps the shared value of what only others set
    request = Request(study, shared, {name: varied | changes for name, changes in variants.items()}, seeds, given)
    _check(request)
    _check_budget(request)
    request.variants = {name: completed(request, changes) for name, changes in request.variants.items()}
    return request


def completed(request: Request, changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` with what follows from them, the batches of an evaluation: all variants have the same windows.

    Raises UserError if these do not fill whole batches.
    """
    follows = {}
    if batch := changes.get("batch_size"):
        windows = request.shared.eval_iters * request.shared.batch_size
        if windows % batch:
            raise UserError(
                f"batch_size={batch} does not divide the {windows:,} windows of an evaluation, the same"
                " for all variants: take another, or evaluate all of both splits, with --eval_iters=0"
            )
        follows["eval_iters"] = windows // batch
    return changes | follows


def looks_of(text: str, seeds: int) -> list[int]:
    """The numbers of seeds after which a verdict is made, as --looks has them; the last is all. Raises UserError."""
    looks = [int(each) for each in text.split(",") if each.isdecimal()]
    if not re.fullmatch(r"[\d,]*", text) or any(not 2 <= look <= seeds for look in looks):
        raise UserError(f"looks={text!r} must be numbers of seeds from 2 to {seeds}, as in --looks=5,10")
    return sorted({*looks, seeds})


def _varies(arg):
    """Whether a flag has several values. Text of a setting that cannot vary may hold a comma."""
    name, _, value = arg.removeprefix("--").partition("=")
    if name in SHARED or name in OWN:
        return False
    return "," in name or "," in value or bool(RANGE.fullmatch(value))


def require_may_vary(name: str) -> None:
    """Raise UserError for a setting that no two variants may have differently. Each variant has all seeds."""
    if name in (*SET_BY_THE_STUDY, *SHARED, *OWN, "seed"):
        raise UserError(f"{name} cannot vary: {SET_BY_THE_STUDY.get(name, 'it is one for the whole study')}")


def _axis(flag, shared):
    """{name of a value: the settings that it sets} of a flag such as --learning_rate=1e-3,3e-3 or --a,b=1:2,3:4."""
    head, _, text = flag.removeprefix("--").partition("=")
    names, axis, texts = head.split(","), {}, text.split(",")
    if head != "seed":
        for name in names:
            require_may_vary(name)
    if found := RANGE.fullmatch(text):
        texts = list(map(str, range(int(found[1]), int(found[2]) + 1)))
    for each in texts:
        parts = each.split(":", len(names) - 1)
        if len(parts) != len(names):
            raise UserError(f"--{head}={shown(text)}: {shown(each)} has no value for each setting: write 1:2,3:4")
        changes = {name: value_of(name, part, shared) for name, part in zip(names, parts)}
        if name_of(changes) in axis:
            raise UserError(f"--{head}={shown(text)} has {name_of(changes)} twice: give each value once")
        axis[name_of(changes)] = changes
    if not axis:
        raise UserError(f"--{head}={text} must go up, as in --{head}=1..5")
    return axis


def value_of(name: str, text: str, shared: Settings) -> Any:
    """The value of the flag --name=text, checked as train.py checks it."""
    return getattr(configure(shared, [f"--{name}={text}"], ""), name)


def _named(file, shared):
    """The variants that a config file names: {name: settings}, each value read as another one of the file is."""
    found = {}
    variants = runpy.run_path(file, init_globals=LENT | dataclasses.asdict(shared)).get("variants", {})
    for name, changes in variants.items():
        if safe(name).casefold() in map(str.casefold, found):
            raise UserError(f"{file}: variant {shown(name)} would have the folder of another: give it another name")
        for setting in changes:
            require_may_vary(setting)
        settings = changed(shared, [(setting, value, file) for setting, value in changes.items()])
        found[safe(name)] = {setting: getattr(settings, setting) for setting in changes}
    return found


def name_of(changes: dict[str, Any]) -> str:
    """A readable name for settings, which a folder can have: 'learning_rate=0.004'."""
    return safe("+".join(f"{name}={value}" for name, value in changes.items()))


def safe(name: str) -> str:
    """`name` as a folder can have it."""
    return re.sub(r"[^\w.=+, -]", "-", name).strip(".- ") or "variant"


def _require_once(names):
    """Raise UserError for a setting that is varied or given twice: one of the two would not count."""
    if twice := [name for name, many in collections.Counter(names).items() if many > 1]:
        raise UserError(f"{twice[0]} is given twice: give all its values in one flag, as in --{twice[0]}=a,b")


def _check(request):
    """Raise UserError if a run could not start, or for a study that makes no sense."""
    s = request.study
    for name in ("jobs", "trials", "matters"):
        if getattr(s, name) is not None and not 0 < getattr(s, name) < math.inf:
            raise UserError(f"{name}={getattr(s, name)} must be more than 0, and finite")
    if s.storage and not s.search:
        raise UserError("--storage shares the trials of a search among workers: give --search, or leave it out")
    looks_of(s.looks, len(request.seeds))
    for changes in request.variants.values():
        one = require_fit(request, changes)
        require_learning(one)
        if one.init_from in ("resume", "auto"):
            raise UserError(f"init_from={one.init_from}: a study starts each run itself and resumes it: leave it out")


def require_fit(request: Request, changes: dict[str, Any]) -> Settings:
    """The settings of a variant. Raises UserError if it could not run."""
    one = dataclasses.replace(request.shared, out_dir="run", **changes)
    validate(one)
    return one


def _check_budget(request):
    """Raise UserError if the runs' budget would overwrite what varies, or if what varies changes the yardstick."""
    s, varied = request.study, {name for changes in request.variants.values() for name in changes}
    varied |= {item.partition("=")[0].strip() for item in (s.search or "").split(",")}
    one, minutes = request.shared, request.shared.minutes
    if minutes and (taken := varied & {"max_iters", "lr_decay_iters"}):
        raise UserError(f"--minutes sets {', '.join(sorted(taken))} of each run, so it cannot vary")
    if s.search and minutes:
        raise UserError("--minutes times each variant first, and a search does not know them: leave it out")
    fixed = {"eval_iters", "vocab_size"}
    if s.metric != "bits_per_byte":
        fixed.add("dataset")
    if one.eval_iters:  # whose windows would hold other text for each variant
        fixed |= {"block_size", "dataset"}
    if changed := varied & fixed:
        raise UserError(
            f"{', '.join(sorted(changed))} cannot vary with metric={s.metric} and eval_iters={one.eval_iters}: variants"
            " are evaluated on the same text. --eval_iters=0 evaluates all of it, for any block_size;"
            " --metric=bits_per_byte compares tokenizers of the same text"
        )
