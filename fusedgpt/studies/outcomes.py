"""What the runs of a study gave: one value each, and whether they differ in anything but what varies."""

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np

from fusedgpt import dimensions
from fusedgpt.errors import UserError
from fusedgpt.machine.files import read_jsonl
from fusedgpt.runs.metrics import Run, number, section
from fusedgpt.studies import design
from fusedgpt.studies.design import OF_A_RUN, SETTLED, Design
from fusedgpt.studies.verdict import LEAST_RESAMPLED, Comparison, compare, sentence

STAND_INS = ("diverged", "not reached")  # statuses of runs without a value, which count as the worst
OVER = ("finished", "pruned", *STAND_INS)  # a run that failed is tried again by the next call
WARM_UP = 5  # first steps that metric=ms leaves out: they still fill caches
NOT_REACHED = "did not reach the loss {loss:g}"
SEEN = ("device", "dtype", "compile", "attention", "world_size")  # in run.json, what ran
MACHINE = ("device", "torch", "python", "threads", "commit")  # in run.json's environment


@dataclasses.dataclass
class Outcome:
    """A run of a study."""

    variant: str
    seed: int
    status: str  # finished, diverged, not reached, failed, pruned or missing
    why: str  # the reason, in a sentence, unless it finished
    value: float  # of the study's metric; one of STAND_INS has the worst value of all; NaN if there is none
    run: Run | None  # None if it has no metrics.jsonl


@dataclasses.dataclass
class Results:
    """A study on the disk."""

    design: Design
    folder: pathlib.Path
    outcomes: list[Outcome]  # every variant with every seed, in the order of the design
    differences: list[str]  # what differs between runs though it does not vary, such as "dtype: bfloat16, float32"

    def values(self) -> dict[str, dict[int, float]]:
        """{variant: {seed: value}} of the runs that have a value. STAND_INS count as the worst."""
        found = {name: {} for name in self.design.variants}
        for each in self.outcomes:
            if not math.isnan(each.value):
                found[each.variant][each.seed] = each.value
        return found

    def stand_ins(self) -> dict[str, set[int]]:
        """{variant: seeds of its runs that count as the worst}."""
        found = {name: set() for name in self.design.variants}
        for each in self.outcomes:
            if each.status in STAND_INS and not math.isnan(each.value):
                found[each.variant].add(each.seed)
        return found

    def comparisons(self) -> list[Comparison]:
        """The verdict on each variant but the baseline."""
        return compare(self.values(), self.design.baseline, self.design.interval, self.stand_ins())

    def sentences(self) -> list[str]:
        """The verdict on each variant, in words."""
        return [sentence(each, self.design.baseline, self.design.metric) for each in self.comparisons()]

    def warnings(self) -> list[str]:
        """What a reader of the verdict has to know beside it, in sentences."""
        found = [f"the runs differ in more than what varies: {each}" for each in self.differences]
        happened = {
            "diverged": "diverged, and counts as the worst: {why}",
            "not reached": "{why}, and counts as the worst",
            "failed": "failed: {why}",
        }
        for status, what in happened.items():
            ended_so = [each for each in self.outcomes if each.status == status]
            found += [f"{o.variant} with seed {o.seed} {what.format(why=o.why)}" for o in ended_so]
        found += self._too_few_to_resample()
        if missing := sum(each.status == "missing" for each in self.outcomes):
            found.append(f"{missing} of {len(self.outcomes)} runs are missing: the verdict is not final")
        if self.design.looks:
            found.append(
                "seeds were added after a verdict: whoever adds them until a difference shows finds one more often than"
                " 1 time in 20"
            )
        weights = (self.design.against or {"initial_weights": "equal"})["initial_weights"]
        if weights != "equal":
            said = f"the initial weights of the two versions {weights or 'could not be compared'}"
            found.append(f"{said}, so the runs are not pairs that differ in one thing")
        return found

    def _too_few_to_resample(self):
        few = [each.variant for each in self.comparisons() if each.tested and each.n < LEAST_RESAMPLED]
        if not few or self.design.interval != "bootstrap":
            return []
        return [f"too few pairs for the bootstrap, so the verdict is by Student's t: {', '.join(few)}"]


def folder_of(folder: pathlib.Path, variant: str, seed: int) -> pathlib.Path:
    """The folder of a run of the study in `folder`."""
    return folder / "runs" / variant / f"seed-{seed}"


def is_over(folder: pathlib.Path, job: tuple[str, int]) -> bool:
    """Whether a run has ended for good: a run that failed, or whose folder was removed, is made again."""
    row = statuses(folder).get(job)
    return row is not None and row["status"] in OVER and (folder_of(folder, *job) / "metrics.jsonl").exists()


def statuses(folder: pathlib.Path) -> dict[tuple[str, int], dict]:
    """{(variant, seed): its last line in outcomes.jsonl} of the runs that ended."""
    path = folder / "outcomes.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    return {(row["variant"], row["seed"]): row for row in rows if {"variant", "seed", "status"} <= row.keys()}


def read(folder: str | pathlib.Path) -> Results:
    """Read the study in a folder. Raises UserError if it has none."""
    folder = pathlib.Path(folder)
    plan = design.load(folder)
    if plan is None:
        raise UserError(f"{folder / 'study.json'} does not exist: name the folder of a study")
    ended = statuses(folder)
    if plan.kind == "search":
        plan.variants |= {row["variant"]: row["settings"] for row in ended.values() if "settings" in row}
    outcomes = []
    for variant in plan.variants:
        for seed in plan.seeds:
            outcomes.append(outcome(folder, plan, variant, seed, ended.get((variant, seed))))
    _count_as_worst(outcomes, plan.metric)
    return Results(plan, folder, outcomes, [*_differences(outcomes, plan), *_other_settings(outcomes, plan)])


def outcome(folder: pathlib.Path, plan: Design, variant: str, seed: int, row: dict | None) -> Outcome:
    """The outcome of a run, from its `row` in outcomes.jsonl and its folder. A run on another machine has no folder."""
    row = row or {"status": "missing"}
    path = folder_of(folder, variant, seed)
    elsewhere = "value" in row
    run = Run(path) if not elsewhere and (path / "metrics.jsonl").exists() else None
    status, why, value = row["status"], row.get("why", ""), math.nan
    if elsewhere:
        value = number(row["value"])
    elif status == "finished":
        value = metric(run, plan.metric, plan.target_loss) if run else math.nan
        if math.isnan(value):
            status, why = ("failed", "metrics.jsonl is gone") if run is None else ("diverged", "not finite at the end")
        elif math.isinf(value):
            status, why, value = "not reached", NOT_REACHED.format(loss=plan.target_loss), math.nan
    return Outcome(variant, seed, status, why, value, run)


def metric(run: Run, name: str, target_loss: float | None) -> float:
    """The value of `name`, a metric of StudySettings, for a run: infinite if it did not reach `target_loss`.

    Between the first evaluation at or below `target_loss` and the one before, the loss counts as a line. The evaluation
    itself would be too late, by half an interval on average, and by more tokens or seconds if a step has more.
    """
    if name == "ms":
        ms = run.train["ms"][WARM_UP:]
        return float(np.nanmedian(ms)) if np.isfinite(ms).any() else math.nan
    losses = run.eval["val_bits_per_byte" if name == "bits_per_byte" else "val_loss"]
    if not name.endswith("_to_loss"):
        return float(losses[-1]) if len(losses) else math.nan
    iters, losses = run.eval["iter"][np.isfinite(losses)], losses[np.isfinite(losses)]
    reached = np.flatnonzero(losses <= target_loss)
    if not len(reached):
        return math.inf
    around = slice(max(0, reached[0] - 1), reached[0] + 1)
    crossed = np.interp(-target_loss, -losses[around], iters[around])
    axis = {"seconds_to_loss": "time", "tokens_to_loss": "tokens"}[name]
    return float(run.position(np.array([crossed]), axis)[0])


def _count_as_worst(outcomes, name):
    """Give each of STAND_INS the worst value of the study, so that it counts, but makes no mean infinite."""
    worst = worst_of([each.value for each in outcomes], [each.run for each in outcomes if each.run], name)
    for each in outcomes:
        if each.status in STAND_INS:
            each.value = worst


def worst_of(values: list[float], runs: list[Run], name: str) -> float:
    """What counts as the worst value of the metric `name`, among `values` and the least that `runs` show; NaN if none.

    Of the losses in the course of a run, only the first counts, that of untrained weights: others may be of any size if
    the run diverges. The way to a loss is a step longer than the longest run, whose last step might have reached it.
    """
    known = list(values)
    for run in runs:
        steps = len(run.train["iter"])
        if name in ("val_loss", "bits_per_byte"):
            known += [float(v) for v in run.eval["val_loss" if name == "val_loss" else "val_bits_per_byte"][:1]]
        elif name == "seconds_to_loss" and steps:
            known.append(float(np.nansum(run.train["ms"]) / 1e3) * (1 + 1 / steps))
        elif name == "tokens_to_loss":
            known.append((steps + 1) * run.tokens_per_step)
    return max((value for value in known if math.isfinite(value)), default=math.nan)


def _differences(outcomes, plan):
    """What differs between the records of the runs, except for what varies and, against another version, the code."""
    records = [each.run.record for each in outcomes if each.run and each.status != "missing"]
    free = {*plan.varied, *OF_A_RUN}
    if plan.settings.get("minutes"):
        free |= {"max_iters", "lr_decay_iters"}
    if plan.settings.get("vocab_size") is None and "dataset" in free:
        free.add("vocab_size")
    settings = {name: _each(section(record, "settings").get(name) for record in records) for name in plan.settings}
    settings = {name: found for name, found in settings.items() if name not in SETTLED}  # auto in the first run alone
    seen = {name: _each(record.get(name) for record in records) for name in SEEN}
    machine = {name: _each(section(record, "environment").get(name) for record in records) for name in MACHINE}
    if plan.kind == "against":
        del machine["commit"]
    machine = {("machine" if name == "device" else name): found for name, found in machine.items()}
    return [
        f"{name}: {', '.join(found)}"
        for name, found in (settings | seen | machine).items()
        if len(found) > 1 and name not in free
    ]


def _other_settings(outcomes, plan):
    """What runs have other than the plan asked of them, such as runs of another study that were moved here."""
    free = {*SETTLED, *OF_A_RUN}
    if (plan.settings | plan.variants[plan.baseline]).get("init_from", "scratch") != "scratch":
        free |= set(dimensions.NAMES)  # those of the weights count
    found = []
    for each in outcomes:
        if not each.run or each.status == "missing":
            continue
        asked, has = plan.settings | plan.variants[each.variant], section(each.run.record, "settings")
        if asked.get("minutes"):
            asked = {name: value for name, value in asked.items() if name not in ("max_iters", "lr_decay_iters")}
        asked = {name: value for name, value in asked.items() if value is not None and name not in free}
        wrong = [n for n, value in (asked | {"seed": each.seed}).items() if n in has and str(has[n]) != str(value)]
        found += [f"{each.variant} with seed {each.seed} ran with {n}={has[n]}" for n in wrong]
    return found


def _each(values: Any) -> list[str]:
    return list(dict.fromkeys(map(str, values)))
