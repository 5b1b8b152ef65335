"""study.json: what a study compares, fixed before its first run, and whether a new command line continues it."""

import dataclasses
import json
import os
import pathlib
import types
import typing
from typing import Any

from fusedgpt.errors import UserError, shown
from fusedgpt.machine.files import atomic
from fusedgpt.studies.command import Request, StudySettings, following, looks_of, safe, shortened

FORMAT = 2
# settings of a run that are named differently in each run, or that only say how it starts
OF_A_RUN = ("out_dir", "init_from", "seed", "wandb_run_name")
SETTLED = ("attention", "dtype", "compile")  # `auto` settles these once, for all runs
METRICS = typing.get_args(typing.get_type_hints(StudySettings)["metric"])
FIXED = ("kind", "space", "varied", "threads", "minutes")
PLANNED = {"metric": "val_loss", "target_loss": None, "matters": None}  # a call that does not name them keeps them


@dataclasses.dataclass
class Design:
    """The content of study.json; see Request for `variants` and `seeds`."""

    command: str
    kind: str  # grid: all variants with all seeds; against: one config with two versions of the code; search: by Optuna
    metric: str
    target_loss: float | None
    matters: float | None
    baseline: str
    varied: list[str]  # names of the settings in `variants`, without those that follow from others
    variants: dict[str, dict[str, Any]]
    planned: list[str]  # variants whose comparisons were planned before the first run
    seeds: list[int]
    looks: list[int]  # numbers of seeds after which a verdict is made; the last is all
    settings: dict[str, Any]  # of all runs, without those that vary and those OF_A_RUN; with init_from
    code: dict[str, str]  # {version: digest of its code}
    data: dict[str, str]  # SHA-256 of each split, of the files of own kernels, and of models that runs begin with
    minutes: float | None = None  # of training steps that each run has
    threads: int | None = None  # CPU threads of each run; None: PyTorch's choice
    settled: dict[str, Any] | None = None  # what `auto` became in the first run
    against: dict[str, Any] | None = None  # the other version: as it was named, and its commit
    times: dict[str, dict] = dataclasses.field(default_factory=dict)  # of a step, in turns; see step_time
    changes: list[str] = dataclasses.field(default_factory=list)  # of the plan, after the first run
    diff: str | None = None  # SHA-256 of working-tree.diff
    space: str | None = None  # of a search, as --search has it; each line of outcomes.jsonl then has its settings
    format: int = FORMAT

    def save(self, folder: pathlib.Path) -> None:
        """Write study.json. Raises UserError if the disk refuses."""
        with atomic(folder / "study.json", "w", aside=f".{os.getpid()}") as file:  # workers may begin at once
            json.dump(dataclasses.asdict(self), file, indent=1)

    def iterations(self, variant: str) -> int | None:
        """The steps of each run of a variant that fit into --minutes by its time of a step; None without --minutes."""
        ms = self.times.get(variant, {}).get("ms")
        return max(1, round(60e3 * self.minutes / ms)) if self.minutes and ms else None


def of(request: Request, kind: str, command: str, code: dict, data: dict[str, str], threads: int | None) -> Design:
    """The design that a command line asks for."""
    s, variants = request.study, request.variants
    names = dict.fromkeys(name for changes in variants.values() for name in changes)
    varied = [name for name in names if name not in following(s)]
    left_out = {*names, *OF_A_RUN, "minutes"} - {"init_from"}
    shared = {name: value for name, value in dataclasses.asdict(request.shared).items() if name not in left_out}
    how = dict(metric=s.metric, target_loss=s.target_loss, matters=s.matters, minutes=request.shared.minutes)
    how |= dict(seeds=request.seeds, looks=looks_of(s.looks, len(request.seeds)))
    baseline = s.baseline or next(iter(variants))
    if baseline not in variants:
        raise UserError(f"baseline={baseline!r} is no variant: it can be {', '.join(variants)}")
    named = dict(command=command, kind=kind, baseline=baseline, varied=varied, variants=variants)
    space = "".join(s.search.split()) if s.search else None
    planned = [name for name in variants if name != baseline]
    more = dict(settings=shared, code=code, data=data, threads=threads, space=space)
    return Design(**named, **how, planned=planned, **more)


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
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}. Name another folder with --study_dir") from error


def _checked(plan):
    """`plan`, which somebody may have edited. Raises ValueError if it is no study."""
    for name, kind in typing.get_type_hints(Design).items():
        kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        kinds = tuple(typing.get_origin(each) or each for each in kinds)
        if not isinstance(value := getattr(plan, name), (*kinds, *((int,) * (float in kinds)))):
            raise ValueError(f"its {name} is {shown(value)}")
    named = all(shortened(safe(name)) == name and isinstance(each, dict) for name, each in plan.variants.items())
    counts = range(1, len(plan.seeds) + 1)
    if not (named and plan.baseline in plan.variants and set(plan.planned) <= plan.variants.keys()):
        raise ValueError(f"its variants {shown(plan.variants)}, baseline and planned do not fit")
    looks = (
        plan.looks == sorted(set(plan.looks)) and set(plan.looks) <= set(counts) and plan.looks[-1:] == [*counts][-1:]
    )
    if not (all(type(seed) is int for seed in plan.seeds) and len(set(plan.seeds)) == len(plan.seeds) > 0 and looks):
        raise ValueError(f"its seeds are {shown(plan.seeds)}, and its looks {shown(plan.looks)}")
    if (plan.metric == "tokens_to_loss") != (plan.target_loss is not None) or plan.metric not in METRICS:
        raise ValueError(f"its metric is {shown(plan.metric)}, and its target_loss {shown(plan.target_loss)}")
    return plan


def continued(new: Design, folder: pathlib.Path, baseline: str | None = None) -> Design:
    """The design of a study in `folder` that `new` begins or continues, possibly with more variants and seeds.

    What is changed after the first run is noted in `changes`, and its comparisons are exploratory. baseline: the one
    that the command line names. What it does not name stays: variants, seeds, looks, what `auto` became, and the times.
    Raises UserError if the folder has another study: what its runs share, the code or the data differ.
    """
    if not has_begun(folder):  # a study whose first run was refused leaves nothing to continue
        return new
    earlier = load(folder)
    if earlier is None:
        raise UserError(
            f"{folder} has runs of a study, but study.json, which says what they are, is gone: name another folder with"
            " --study_dir"
        )
    require_same(earlier, new, FIXED, str(folder))
    plan = dataclasses.replace(earlier, changes=list(earlier.changes))
    more = [seed for seed in new.seeds if seed not in plan.seeds]
    added = [name for name in new.variants if name not in plan.variants]
    plan.seeds, plan.variants, plan.data = plan.seeds + more, plan.variants | new.variants, plan.data | new.data
    if (baseline := baseline or plan.baseline) not in plan.variants:
        raise UserError(f"baseline={baseline!r} is no variant: it can be {', '.join(plan.variants)}")
    now = {name: getattr(new, name) for name, usual in PLANNED.items() if getattr(new, name) != usual}
    if "metric" in now:
        now["target_loss"] = new.target_loss
    looks = new.looks[:-1] or earlier.looks[:-1]
    now |= {"baseline": baseline, "looks": [*(n for n in looks if n < len(plan.seeds)), len(plan.seeds)]}
    changed = [f"seeds {', '.join(map(str, more))} were added"] if more else []
    for name, value in now.items():
        was = getattr(earlier, name)
        if was != value and not (name == "looks" and more):
            changed.append(f"{name} was {shown(was)}, and is {shown(value)} now")
        setattr(plan, name, value)
    plan.planned = [] if changed else plan.planned
    plan.changes += changed + [f"the variant {name} was added" for name in added]
    if plan.changes != earlier.changes:
        plan.command += f"\n{new.command}"
    return plan


def has_begun(folder: pathlib.Path) -> bool:
    """Whether a run of the study in a folder has made a step, or ended."""
    ended = folder / "outcomes.jsonl"
    return (ended.exists() and ended.stat().st_size > 0) or any(folder.glob("runs/*/*/metrics.jsonl"))


def _windows(plan):
    """The windows of an evaluation, the same for all variants."""
    one = plan.settings | next(iter(plan.variants.values()))
    return one["eval_iters"] * one["batch_size"]


def require_same(earlier: Design, new: Design, fixed: tuple[str, ...], place: str) -> None:
    """Raise UserError, which names it, if the study in `place` differs from `new` in a field of `fixed`, or in more.

    More: the settings of all runs, those of a variant that both have, the code and the data.
    """
    refused, other = f"{place} has another study", "begin another study with --study_dir, or give what it had"
    if earlier.code.keys() != new.code.keys():
        was, now = (" and ".join(each.code) for each in (earlier, new))
        raise UserError(f"{refused}: it compares {was}, and not {now}: {other}")
    for name in fixed:
        was, now = getattr(earlier, name), getattr(new, name)
        if was != now:
            what = "threads of a run (by --jobs and the cores)" if name == "threads" else name
            raise UserError(f"{refused}: {what} was {shown(was)}, and is {shown(now)} now: {other}")
    for name in sorted(earlier.settings.keys() | new.settings.keys()):
        was, now = (each.settings.get(name, "absent") for each in (earlier, new))
        if was != now:
            raise UserError(f"{refused}: {name} was {shown(was)}, and is {shown(now)} now: {other}")
    for name, changes in new.variants.items():
        if earlier.variants.get(name, changes) != changes:
            raise UserError(f"{refused}: the variant {name} was {earlier.variants[name]}: {other}")
    if (was := _windows(earlier)) != (now := _windows(new)):
        raise UserError(f"{refused}: an evaluation had {was} windows, and has {now} now: {other}")
    require_unchanged(earlier, {f"the code of {name}": each for name, each in new.code.items()} | new.data, place)


def require_unchanged(plan: Design, now: dict[str, str], place: str) -> None:
    """Raise UserError if the code or the data, {what: digest}, are other ones than when the study began."""
    was = {f"the code of {name}": each for name, each in plan.code.items()} | plan.data
    if changed := [what for what in now if was.get(what, now[what]) != now[what]]:
        raise UserError(
            f"{' and '.join(changed)} changed since the study in {place} began, so later runs could not be compared"
            " with earlier ones: undo the change and give the same command, or begin another study with --study_dir"
        )
