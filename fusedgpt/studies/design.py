"""study.json: what a study compares, and whether a new command line continues the study in a folder."""

import dataclasses
import json
import os
import pathlib
import types
import typing
from typing import Any

from fusedgpt.errors import UserError, shown
from fusedgpt.machine.files import atomic
from fusedgpt.studies.command import Request, StudySettings, following, safe, shortened

FORMAT = 1
# settings of a run that are named differently in each run, or that only say how it starts
OF_A_RUN = ("out_dir", "init_from", "seed", "wandb_run_name")
SETTLED = ("attention", "dtype", "compile")  # `auto` settles these once, for all runs
SAME_STUDY = ("kind", "space", "varied")
SAME_VALUE = ("metric", "target_loss", "seeds")  # the values that Optuna was told follow from these


@dataclasses.dataclass
class Design:
    """The content of study.json; see Request for `variants` and `seeds`."""

    command: str
    kind: str  # grid: all variants with all seeds; against: one config with two versions of the code; search: by Optuna
    metric: str
    target_loss: float | None
    interval: str
    baseline: str
    varied: list[str]  # names of the settings in `variants`, without those that follow from others
    variants: dict[str, dict[str, Any]]
    seeds: list[int]
    settings: dict[str, Any]  # of all runs, without those that vary and those OF_A_RUN; with init_from
    code: str  # a digest of the code of the working tree
    data: dict[str, str]  # digests of each split, of the files of own kernels, and of models that runs begin with
    threads: int | None = None  # CPU threads of each run; None: PyTorch's choice
    settled: dict[str, Any] | None = None  # what `auto` became in the first run
    against: dict[str, Any] | None = None  # ref, commit, initial_weights
    looks: int = 0  # times that seeds were added after a verdict
    space: str | None = None  # of a search, as --search has it; each line of outcomes.jsonl then has its settings
    format: int = FORMAT

    def save(self, folder: pathlib.Path) -> None:
        """Write study.json. Raises UserError if the disk refuses."""
        with atomic(folder / "study.json", "w", aside=f".{os.getpid()}") as file:  # workers may begin at once
            json.dump(dataclasses.asdict(self), file, indent=1)


def of(request: Request, kind: str, command: str, code: str, data: dict[str, str], threads: int | None) -> Design:
    """The design that a command line asks for."""
    s, variants = request.study, request.variants
    names = dict.fromkeys(name for changes in variants.values() for name in changes)
    varied = [name for name in names if name not in following(s)]
    left_out = {*names, *OF_A_RUN} - {"init_from"}
    shared = {name: value for name, value in dataclasses.asdict(request.shared).items() if name not in left_out}
    how = dict(metric=s.metric, target_loss=s.target_loss, interval=s.interval)
    baseline = s.baseline or next(iter(variants))
    named = dict(command=command, kind=kind, baseline=baseline, varied=varied, variants=variants, seeds=request.seeds)
    space = "".join(s.search.split()) if s.search else None
    return Design(**named, **how, settings=shared, code=code, data=data, threads=threads, space=space)


def load(folder: pathlib.Path) -> Design | None:
    """The design in a folder; None if it has none. Raises UserError if study.json is damaged."""
    path = folder / "study.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT:
            raise ValueError(f"its format is {found.get('format')}, not {FORMAT}")
        return _checked(Design(**found))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error}. Name another folder with --study_dir") from error


def _checked(plan):
    """`plan`, which somebody may have edited. Raises ValueError if it is no study."""
    variants, seeds = plan.variants, plan.seeds
    names = isinstance(variants, dict) and all(shortened(safe(name)) == name for name in variants)
    if not (names and variants and all(isinstance(each, dict) for each in variants.values())):
        raise ValueError(f"its variants are {shown(variants)}")
    if not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
        raise ValueError(f"its seeds are {shown(seeds)}")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"its seeds {shown(seeds)} have one twice")
    if plan.baseline not in variants:
        raise ValueError(f"its baseline {shown(plan.baseline)} is no variant")
    allowed = {field.name: typing.get_args(field.type) for field in dataclasses.fields(StudySettings)}
    for name in ("metric", "interval"):
        if getattr(plan, name) not in allowed[name]:
            raise ValueError(f"its {name} is {shown(getattr(plan, name))}")
    if plan.metric.endswith("_to_loss") and not isinstance(plan.target_loss, (int, float)):
        raise ValueError(f"its metric {plan.metric} has no target_loss")
    if not isinstance(plan.settings, dict) or not isinstance(plan.against, (dict, types.NoneType)):
        raise ValueError("its settings or against are no objects")
    return plan


def continued(new: Design, folder: pathlib.Path, looked: bool, named: bool = False) -> Design:
    """The design of a study in `folder` that `new` begins or continues, possibly with more variants and seeds.

    looked: whether the study has a verdict. named: whether the command line names the baseline; otherwise it stays, as
    do what `auto` became, and variants and seeds that the command line no longer names. Raises UserError if the folder
    has another study: what its runs share, the code or the data differ.
    """
    if not has_begun(folder):  # a study whose first run was refused leaves nothing to continue
        return _with_baseline(new, new.baseline)
    earlier = load(folder)
    if earlier is None:
        raise UserError(
            f"{folder} has runs of a study, but study.json, which says what they are, is gone: name another folder with"
            " --study_dir"
        )
    fixed = (*SAME_STUDY, "threads", *(SAME_VALUE if new.kind == "search" else ()))
    require_same(earlier, new, fixed, str(folder))
    variants = earlier.variants | new.variants
    seeds = earlier.seeds + [seed for seed in new.seeds if seed not in earlier.seeds]
    more = earlier.looks + (looked and len(seeds) > len(earlier.seeds))
    kept = dict(variants=variants, seeds=seeds, settled=earlier.settled, against=earlier.against, looks=more)
    kept["data"] = earlier.data | new.data  # of variants that only one of the two names, too
    return _with_baseline(dataclasses.replace(new, **kept), new.baseline if named else earlier.baseline)


def has_begun(folder: pathlib.Path) -> bool:
    """Whether a run of the study in a folder has made a step, or ended."""
    ended = folder / "outcomes.jsonl"
    return (ended.exists() and ended.stat().st_size > 0) or any(folder.glob("runs/*/*/metrics.jsonl"))


def _windows(plan):
    """The windows of an evaluation, the same for all variants."""
    one = plan.settings | next(iter(plan.variants.values()))
    return one["eval_iters"] * one["batch_size"]


def _with_baseline(plan, name):
    if name not in plan.variants:
        raise UserError(f"baseline={name!r} is no variant: it can be {', '.join(plan.variants)}")
    return dataclasses.replace(plan, baseline=name)


def require_same(earlier: Design, new: Design, fixed: tuple[str, ...], place: str) -> None:
    """Raise UserError, which names it, if the study in `place` differs from `new` in a field of `fixed`, or in more.

    More: the settings of all runs, those of a variant that both have, the code and the data.
    """
    refused, other = f"{place} has another study", "begin another study with --study_dir, or give what it had"
    for name in fixed:
        was, now = getattr(earlier, name), getattr(new, name)
        if was != now:
            what = "threads of a run (by --jobs and the cores)" if name == "threads" else name
            raise UserError(f"{refused}: {what} was {shown(was)}, and is {shown(now)} now: {other}")
    if (was := earlier.against) and (now := new.against) and was["commit"] != now["commit"]:
        raise UserError(
            f"{refused}: {was['ref']} was commit {was['commit'][:7]}, and {now['ref']} is {now['commit'][:7]} now: give"
            f" --against={was['commit'][:7]}, or {other}"
        )
    for name in sorted(earlier.settings.keys() | new.settings.keys()):
        was, now = (each.settings.get(name, "absent") for each in (earlier, new))
        if was != now:
            raise UserError(f"{refused}: {name} was {shown(was)}, and is {shown(now)} now: {other}")
    for name, changes in new.variants.items():
        if earlier.variants.get(name, changes) != changes:
            raise UserError(f"{refused}: the variant {name} was {earlier.variants[name]}: {other}")
    if new.metric != "ms" and (was := _windows(earlier)) != (now := _windows(new)):
        raise UserError(f"{refused}: an evaluation had {was} windows, and has {now} now: {other}")
    was, now = ({"the code": each.code} | each.data for each in (earlier, new))
    if changed := [what for what in now if was.get(what, now[what]) != now[what]]:
        raise UserError(
            f"{' and '.join(changed)} changed since the study in {place} began, so its runs and new ones cannot be"
            " compared: go back to what it was then, or begin another study with --study_dir"
        )
