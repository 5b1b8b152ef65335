"""The command line of a study: which settings vary and over which values, which seeds, and what all runs share."""

import dataclasses
import hashlib
import itertools
import math
import re
import runpy
import typing
from collections.abc import Iterable
from typing import Any, Literal

from configurator import configure, separate, subclass
from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError, shown
from fusedgpt.settings import Settings, require_learning, validate

RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
LARGEST_RANGE = 10_000  # values of a range a..b
LONGEST_NAME = 120  # bytes of a variant's name, which is a folder's name too
# settings of train.py that a study sets itself, each with the reason
SET_BY_THE_STUDY = {
    "out_dir": "each run has a folder of its own in --study_dir",
    "eval_only": "a run of a study trains",
    "max_seconds": "it would end runs at different iterations of their schedules: give --minutes to each run",
}
# settings that take one value for the whole study: they change what a run keeps and says, not what it learns
SHARED = ("dry_run", "profile", "log_interval", "keep_checkpoints", "always_save_checkpoint", "sample_interval")
SHARED += ("sample_prompts", "tensorboard_log", "wandb_log", "wandb_project", "wandb_run_name", "backend", "timeout")


@dataclasses.dataclass
class StudySettings:
    # folder of the study; the same command continues the study in it, and more seeds or variants are added to it
    study_dir: str = "out-study"
    baseline: str | None = None  # variant that the others are compared with, as the table names it; None: the first
    # what is compared, lower is better: the validation loss at the end, also in bits per byte, or the tokens until the
    # loss is at target_loss, on the line between two evaluations. The time of a step is in every table
    metric: Literal["val_loss", "bits_per_byte", "tokens_to_loss"] = "val_loss"
    target_loss: float | None = None  # validation loss to reach, for metric=tokens_to_loss
    tokens: int | None = None  # train each run on this many tokens: settles max_iters and lr_decay_iters by its batch
    looks: str = ""  # as in 5,10: make a verdict after so many seeds too, and end the study if it is decided then
    matters: float | None = None  # the smallest difference of interest: the verdict says which are surely smaller
    against: str | None = None  # a git commit, or the folder of a clone: compare its code with the working tree's
    # let Optuna choose settings, as in 'learning_rate=1e-3..2e-2:log, n_layer=2..6, optimizer=adamw|muon'
    search: str | None = None
    trials: int = 40  # variants that a search tries, over all workers and the calls that continue it
    # database in which workers share a search: the same command joins it, and a worker that is killed loses nothing.
    # postgresql://user@host/db
    storage: str | None = None
    jobs: int = 1  # runs at once; each gets its share of the CPU's cores
    max_minutes: float | None = None  # begin no run after this many minutes; the same command goes on
    fail_unless: Literal["better"] | None = None  # end with status 1 unless a variant is better than the baseline
    dry_run: bool = False  # say how many runs there are and what they take, and start none
    yes: bool = False  # start more than 200 runs


@dataclasses.dataclass
class Request:
    """What a command line asks for."""

    study: StudySettings
    shared: Settings  # of all runs, except for what varies and the seed
    variants: dict[str, dict[str, Any]]  # {name: its settings}; one, {"config": {}}, if nothing varies
    seeds: list[int]


def settings_class() -> type:
    """The dataclass of all settings that a study takes: its own and those of its runs."""
    return subclass([], StudySettings, Settings)


def read(args: list[str], description: str) -> Request:
    """Read config files and flags. `--name=a,b` varies a setting, `--name=1..5` a whole number.

    `--a,b=1:2,3:4` varies two settings together. A config file may name variants of any number of settings:
    `variants = {"small": dict(n_layer=2), "large": dict(n_layer=8)}`. Raises UserError for bad input.
    """
    unused = SET_BY_THE_STUDY | {"variants": "a config file names variants"}
    files, flags = separate(args)
    lists = [flag for flag in flags if _varies(flag)]
    plain = [*files, *(flag for flag in flags if flag not in lists)]
    both = configure(settings_class()(), plain, description, unused)
    study, shared = (_part(kind, both) for kind in (StudySettings, Settings))
    shared = dataclasses.replace(shared, dry_run=False)
    axes = [axis for axis in (_named(file, shared) for file in files) if axis]
    axes += [_axis(flag, shared) for flag in lists if not flag.startswith("--seed=")]
    _require_different(axes)
    _require_once(flags)
    seeds = [each["seed"] for flag in lists if flag.startswith("--seed=") for each in _axis(flag, shared).values()]
    variants = {
        ",".join(names): {k: v for axis, name in zip(axes, names) for k, v in axis[name].items()}
        for names in itertools.product(*axes)
    }
    varied = {name: getattr(shared, name) for changes in variants.values() for name in changes}
    # variants of a file may set different settings: each keeps the shared value of what only others set
    variants = {shortened(name) or "config": varied | changes for name, changes in variants.items()}
    request = Request(study, shared, variants, seeds or [shared.seed])
    _check(request, runs=len(request.seeds) * math.prod(map(len, axes)))
    _check_budget(request)
    request.variants = {name: completed(request, changes) for name, changes in request.variants.items()}
    return request


def completed(request: Request, changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` with what follows from them: iterations for --tokens, and batches of an evaluation.

    The evaluations of all variants have the same windows. Raises UserError if they do not fill whole batches.
    """
    s, follows = dataclasses.replace(request.shared, **changes), {}
    if request.study.tokens:
        steps = math.ceil(request.study.tokens / (s.gradient_accumulation_steps * s.batch_size * s.block_size))
        follows |= {"max_iters": steps, "lr_decay_iters": steps}
    if "batch_size" in changes:
        windows = request.shared.eval_iters * request.shared.batch_size
        if windows % s.batch_size:
            raise UserError(
                f"batch_size={s.batch_size} does not divide the {windows:,} windows of an evaluation, which must be the"
                " same for all variants: take batch sizes that do, or all of both splits, with --eval_iters=0"
            )
        follows["eval_iters"] = windows // s.batch_size
    return changes | follows


def looks_of(text: str, seeds: int) -> list[int]:
    """The numbers of seeds after which a verdict is made, as --looks has them; the last is all. Raises UserError."""
    try:
        looks = [int(each) for each in text.split(",") if each] if text else []
    except ValueError:
        looks = [0]
    looks += [seeds] * (seeds not in looks)
    if looks != sorted(set(looks)) or looks[-1] > seeds or (len(looks) > 1 and looks[0] < 2):
        raise UserError(f"looks={text!r} must be numbers of seeds that go up, from 2 to {seeds}, as in --looks=5,10")
    return looks


def following(s: StudySettings) -> tuple[str, ...]:
    """The settings that `completed` may add to a variant. Nobody can vary them."""
    return ("max_iters", "lr_decay_iters") * bool(s.tokens) + ("eval_iters",)


def _part(kind, both):
    return kind(**{field.name: getattr(both, field.name) for field in dataclasses.fields(kind)})


def _varies(arg):
    """Whether a flag has several values. Text of a setting that cannot vary may hold a comma."""
    name, _, value = arg.removeprefix("--").partition("=")
    if not arg.startswith("--") or name in SHARED or name in _own():
        return False
    return "," in name or "," in value or bool(RANGE.fullmatch(value))


def _own():
    return {field.name for field in dataclasses.fields(StudySettings)}


def _axis(flag, shared):
    """{name of a value: the settings that it sets} of a flag such as --learning_rate=1e-3,3e-3 or --a,b=1:2,3:4."""
    head, _, text = flag.removeprefix("--").partition("=")
    names = head.split(",")
    for name in names:
        if name in SET_BY_THE_STUDY or name in SHARED or name in _own():
            why = SET_BY_THE_STUDY.get(name, "it is one for the whole study")
            raise UserError(f"{name} cannot vary: {why}")
    if "seed" in names and len(names) > 1:
        raise UserError(f"--{head}: each variant is trained with every seed: give --seed=1..5 on its own")
    axis = {}
    for item in text.split(","):
        texts = item.split(":") if len(names) > 1 else [item]
        if len(texts) != len(names):
            raise UserError(
                f"--{head}={shown(text)}: {shown(item)} is {len(texts)} value(s) for {len(names)} settings that change"
                f" together: write --{head}={':'.join('xy'[: len(names)])},…"
            )
        for values in itertools.product(*(_expanded(each, name, shared) for name, each in zip(names, texts))):
            changes = dict(zip(names, values))
            label = name_of(changes)
            if label in axis:
                raise UserError(f"--{head}={shown(text)} has {label} twice: give each value once")
            axis[label] = changes
    return axis


def _expanded(text, name, shared):
    """The values of `text` for the setting `name`, checked as a flag of train.py is: one, or those of a range."""
    found = RANGE.fullmatch(text)
    if found and int in (_type(shared, name), *typing.get_args(_type(shared, name))):
        first, last = map(int, found.groups())
        if not first <= last < first + LARGEST_RANGE:
            raise UserError(f"--{name}={text} must go up, by at most {LARGEST_RANGE:,} values, as in --{name}=1..5")
        texts = map(str, range(first, last + 1))
    else:
        texts = [text]
    return [value_of(name, each, shared) for each in texts]


def value_of(name: str, text: str, shared: Settings) -> Any:
    """The value of the flag --name=text, checked as train.py checks it."""
    return getattr(configure(shared, [f"--{name}={text}"], ""), name)


def _type(shared, name):
    return {field.name: field.type for field in dataclasses.fields(shared)}.get(name)


def _named(file, shared):
    """The variants that a config file names: {name: settings}, checked as a config file's settings are."""
    variants = runpy.run_path(file, init_globals=dataclasses.asdict(shared)).get("variants")
    if variants is None:
        return {}
    if not (isinstance(variants, dict) and all(isinstance(each, dict) for each in variants.values()) and variants):
        raise UserError(f'{file}: variants must be a dict of dicts, as in {{"small": dict(n_layer=2)}}')
    for name, changes in variants.items():
        for setting, value in changes.items():
            if setting in SET_BY_THE_STUDY or setting in SHARED or setting == "seed":
                raise UserError(f"{file}: {setting} cannot vary: {SET_BY_THE_STUDY.get(setting, 'it is for all runs')}")
            kept = getattr(configure(shared, [f"--{setting}={value}"], ""), setting)
            if kept != value:
                raise UserError(f"{file}: {setting}={shown(value)} of the variant {name!r} is not of the right type")
    named = {safe(str(name)): changes for name, changes in variants.items()}
    if len(named) < len(variants):
        raise UserError(f"{file}: two variants would have one folder: letters, digits and . = + - _ tell names apart")
    return named


def name_of(changes: dict[str, Any]) -> str:
    """A readable name for settings, which a folder can have: 'learning_rate=0.004'."""
    return safe("+".join(f"{name}={value}" for name, value in changes.items()))


def safe(name: str) -> str:
    """`name` as a folder can have it."""
    return re.sub(r"[^\w.=+, -]", "-", name).strip(".- ") or "variant"


def shortened(name: str) -> str:
    """`name`, or if it is too long for a folder, its beginning and a digest: no other name becomes the same."""
    raw = name.encode()
    if len(raw) <= LONGEST_NAME:
        return name
    return f"{raw[: LONGEST_NAME - 9].decode(errors='ignore')}-{hashlib.sha256(raw).hexdigest()[:8]}"


def _require_once(args):
    """Raise UserError for a setting that the command line has twice: one of the two would not count."""
    heads = [arg.removeprefix("--").partition("=")[0].split(",") for arg in args if arg.startswith("--")]
    seen = set()
    for name in itertools.chain.from_iterable(heads):
        if name in seen:
            raise UserError(f"{name} is given twice: give all its values in one flag, as in --{name}=a,b")
        seen.add(name)


def _require_different(axes: Iterable[dict]):
    seen = set()
    for axis in axes:
        names = {name for changes in axis.values() for name in changes}
        if twice := names & seen:
            raise UserError(f"{', '.join(sorted(twice))} varies twice: give all its values in one flag")
        seen |= names


def _check(request, runs):
    """Raise UserError if a run could not start, or for a study that makes no sense."""
    s = request.study
    if len(request.variants) * len(request.seeds) < runs:
        raise UserError("two variants have the same name: their values differ only in characters that no folder has")
    if not s.study_dir:
        raise UserError("study_dir is empty: name a folder for the study")
    require_meant(runs, s)
    if len(set(request.seeds)) < len(request.seeds):
        raise UserError(f"--seed={','.join(map(str, request.seeds))} has a seed twice: give each once")
    if (s.metric == "tokens_to_loss") != (s.target_loss is not None and math.isfinite(s.target_loss)):
        raise UserError(
            f"metric={s.metric} and target_loss={s.target_loss} do not fit: metric=tokens_to_loss needs"
            " --target_loss=LOSS, and nothing else has one"
        )
    if s.fail_unless and s.search:
        raise UserError("--fail_unless asks for a verdict, and a search makes none: give it to the study that confirms")
    for name in ("jobs", "trials", "tokens", "max_minutes"):
        if getattr(s, name) is not None and not 0 < getattr(s, name) < math.inf:
            raise UserError(f"{name}={getattr(s, name)} must be more than 0, and finite")
    if s.storage and not s.search:
        raise UserError("--storage shares the trials of a search among workers: give --search, or leave it out")
    if s.matters is not None and not 0 < s.matters < math.inf:
        raise UserError(f"matters={s.matters} must be more than 0, and finite: the smallest difference of interest")
    looks_of(s.looks, len(request.seeds))
    for seed in request.seeds:
        validate(dataclasses.replace(request.shared, out_dir="run", seed=seed))
    for changes in request.variants.values():
        one = dataclasses.replace(request.shared, out_dir="run", **changes)
        validate(one)
        if not s.tokens:  # which settle the schedule
            require_learning(one)
        GPTConfig.of(one)  # raises for dimensions that do not fit each other
        if one.init_from in ("resume", "auto"):
            raise UserError(f"init_from={one.init_from}: a study starts each run itself and resumes it: leave it out")


def _check_budget(request):
    """Raise UserError if the runs' budget would overwrite what varies, or if what varies changes the yardstick."""
    s, varied = request.study, {name for changes in request.variants.values() for name in changes}
    varied |= {item.partition("=")[0].strip() for item in (s.search or "").split(",")}
    minutes = request.shared.minutes or "minutes" in varied
    if s.tokens and minutes:
        raise UserError("--tokens and --minutes both set the number of iterations: give one of the two")
    if (s.tokens or minutes) and (taken := varied & {"max_iters", "lr_decay_iters"}):
        name = "tokens" if s.tokens else "minutes"
        raise UserError(f"--{name} sets {' and '.join(sorted(taken))} of each run: they cannot vary beside it")
    if s.search and minutes:
        raise UserError(
            "--minutes needs the time of a step of each variant before the first run, when a search does not know its"
            " variants: compare them at equal iterations or, with --tokens, at equal tokens"
        )
    if "minutes" in varied:
        raise UserError("minutes cannot vary: it gives all variants equal time")
    others = {"eval_iters", "vocab_size"} | ({"dataset"} if s.metric != "bits_per_byte" else set())
    if changed := varied & others:
        raise UserError(
            f"{', '.join(sorted(changed))} cannot vary: losses on other validation text, or over other ids, say nothing"
            " about settings. Data sets of the same text with other tokenizers compare in --metric=bits_per_byte"
        )
    if s.metric == "tokens_to_loss" and "eval_interval" in varied:
        raise UserError(
            f"eval_interval cannot vary with metric={s.metric}, because a loss is seen at evaluations only: give one"
            " interval for all variants"
        )
    if request.shared.eval_iters and (changed := varied & {"block_size", "dataset"}):
        raise UserError(
            f"{' and '.join(sorted(changed))} cannot vary with eval_iters={request.shared.eval_iters}, whose windows"
            " would then hold other text for each variant: give --eval_iters=0, which evaluates all of both splits"
        )


def require_meant(runs: int, s: StudySettings) -> None:
    """Raise UserError for more runs than anybody wants by accident."""
    if runs > 200 and not s.yes:
        raise UserError(f"this study has {runs:,} runs: give fewer values or seeds, or --yes=True if you mean it")
