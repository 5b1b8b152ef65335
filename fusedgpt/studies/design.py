"""study.json: what a study compares, fixed before its first run, and whether a new command line continues it."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from fusedgpt.errors import UserError, shown
from fusedgpt.machine.files import atomic
from fusedgpt.studies.command import Request, looks_of

# settings of a run that are named differently in each run, or that only say how it starts
OF_A_RUN = ("out_dir", "init_from", "seed", "wandb_run_name")
SETTLED = ("attention", "dtype", "compile")  # `auto` settles these once, for all runs
FIXED = ("kind", "space", "varied", "minutes")


@dataclasses.dataclass
class Design:
    """The content of study.json; see Request for `variants` and `seeds`."""

    command: str
    kind: str  # grid: all variants with all seeds; against: one config with two versions of the code; search: by Optuna
    metric: str
    matters: float | None
    baseline: str
    varied: list[str]  # names of the settings in `variants`, without eval_iters, which follows from batch_size
    variants: dict[str, dict[str, Any]]
    planned: list[str]  # variants whose comparisons were planned before the first run
    seeds: list[int]
    looks: list[int]  # numbers of seeds after which a verdict is made; the last is all
    settings: dict[str, Any]  # of all runs, without those that vary and those OF_A_RUN; with init_from
    code: dict[str, str]  # {version: digest of its code}
    data: dict[str, str]  # SHA-256 of each split
    minutes: float | None = None  # of training steps that each run has
    threads: int | None = None  # CPU threads of each run; None: PyTorch's choice
    settled: dict[str, Any] | None = None  # what `auto` became in the first run
    given: list[str] = dataclasses.field(default_factory=list)  # names of settings from config files and flags
    against: dict[str, Any] | None = None  # the other version: as it was named, and its commit
    times: dict[str, dict] = dataclasses.field(default_factory=dict)  # of a step, in turns; see step_time
    changes: list[str] = dataclasses.field(default_factory=list)  # of the plan, after the first run
    diff: str | None = None  # SHA-256 of working-tree.diff
    space: str | None = None  # of a search, as --search has it; each line of outcomes.jsonl then has its settings

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
    left_out = {*names, *OF_A_RUN, "minutes"} - {"init_from"}
    baseline = s.baseline or next(iter(variants))
    return Design(
        command=command,
        kind=kind,
        metric=s.metric,
        matters=s.matters,
        baseline=baseline,
        varied=[name for name in names if name != "eval_iters"],
        variants=variants,
        planned=[name for name in variants if name != baseline],
        seeds=request.seeds,
        looks=looks_of(s.looks, len(request.seeds)),
        settings={name: value for name, value in dataclasses.asdict(request.shared).items() if name not in left_out},
        code=code,
        data=data,
        minutes=request.shared.minutes,
        threads=threads,
        space=(s.search or "").replace(" ", "") or None,
        given=request.given,
    )


def require_variant(baseline: str, variants: Iterable[str]) -> None:
    """Raise UserError for a baseline that is no variant."""
    if baseline not in variants:
        raise UserError(f"baseline={baseline!r} is no variant: it can be {', '.join(variants)}")


def load(folder: pathlib.Path) -> Design | None:
    """The design in a folder; None if it has none."""
    path = folder / "study.json"
    if not path.exists():
        return None
    return Design(**json.loads(path.read_text(encoding="utf-8")))


def continued(new: Design, folder: pathlib.Path, baseline: str | None = None) -> Design:
    """The design of a study in `folder` that `new` begins or continues, possibly with more variants and seeds.

    What is changed after the first run is noted in `changes`, and its comparisons are exploratory. What the command
    line does not name stays, such as the `baseline`. Raises UserError if the folder has another study.
    """
    if not has_begun(folder):  # a study whose first run was refused leaves nothing to continue
        require_variant(new.baseline, new.variants)
        return new
    earlier = load(folder)
    if earlier is None:
        raise UserError(f"study.json, which says what the runs in {folder} are, is gone: name another --study_dir")
    require_same(earlier, new, FIXED, str(folder))
    more = [seed for seed in new.seeds if seed not in earlier.seeds]
    seeds = earlier.seeds + more
    plan = dataclasses.replace(
        earlier,
        seeds=seeds,
        variants=earlier.variants | new.variants,
        data=earlier.data | new.data,
        looks=[n for n in new.looks[:-1] or earlier.looks[:-1] if n < len(seeds)] + [len(seeds)],
        baseline=baseline or earlier.baseline,
        matters=new.matters or earlier.matters,
    )
    if new.metric != "val_loss":
        plan.metric = new.metric
    require_variant(plan.baseline, plan.variants)
    changed = [f"seed {seed} was added" for seed in more]
    for name in ("metric", "matters", "baseline", "looks"):
        was, now = getattr(earlier, name), getattr(plan, name)
        if was != now and not (name == "looks" and more):
            changed.append(f"{name} was {shown(was)}, and is {shown(now)} now")
    if changed:
        plan.planned = []
    changed += [f"the variant {name} was added" for name in new.variants if name not in earlier.variants]
    if changed:
        plan.changes = earlier.changes + changed
        plan.command += f"\n{new.command}"
    return plan


def has_begun(folder: pathlib.Path) -> bool:
    """Whether a run of the study in a folder has made a step, or ended."""
    ended = folder / "outcomes.jsonl"
    return (ended.exists() and ended.stat().st_size > 0) or any(folder.glob("runs/*/*/metrics.jsonl"))


def require_same(earlier: Design, new: Design, fixed: tuple[str, ...], place: str) -> None:
    """Raise UserError if the study in `place` differs from `new` in a field of `fixed`, settings, code or data."""
    pairs = {name: (getattr(earlier, name), getattr(new, name)) for name in fixed}
    pairs["compared code"] = list(earlier.code), list(new.code)
    for name in sorted(earlier.settings.keys() | new.settings.keys()):
        pairs[name] = earlier.settings.get(name), new.settings.get(name)
    for name, changes in new.variants.items():
        pairs[f"the variant {name}"] = earlier.variants.get(name, changes), changes
    for name, (was, now) in pairs.items():
        if was != now:
            but = f"{name} was {shown(was)}, and is {shown(now)} now"
            raise UserError(f"{place} has another study: {but}: give what it had, or another --study_dir")
    require_unchanged(earlier, {f"the code of {name}": each for name, each in new.code.items()} | new.data, place)


def require_unchanged(plan: Design, now: dict[str, str], place: str) -> None:
    """Raise UserError if the code or the data, {what: digest}, are other ones than when the study began."""
    was = {f"the code of {name}": each for name, each in plan.code.items()} | plan.data
    if changed := [what for what in now if was.get(what, now[what]) != now[what]]:
        how = "undo that and give the same command, or begin another study with --study_dir"
        raise UserError(f"{' and '.join(changed)} changed since the study in {place} began: {how}")
