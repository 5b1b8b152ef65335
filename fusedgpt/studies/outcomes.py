"""What the runs of a study gave: one value each, and whether they differ in anything but what varies."""

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np

from fusedgpt.errors import UserError
from fusedgpt.machine.files import read_jsonl
from fusedgpt.runs.metrics import Run, number, section
from fusedgpt.studies import design
from fusedgpt.studies.design import OF_A_RUN, SETTLED, Design
from fusedgpt.studies.verdict import Comparison, compare, sentence

OVER = ("finished", "diverged", "pruned")  # a run that failed is tried again by the next call
WARM_UP = 5  # first steps that metric=ms leaves out: they still fill caches
NOT_REACHED = "did not reach the loss {loss:g}"
SEEN = ("device", "dtype", "compile", "attention", "world_size")  # in run.json, what ran
MACHINE = ("device", "torch", "python", "threads", "commit")  # in run.json's environment


@dataclasses.dataclass
class Outcome:
    """A run of a study."""

    variant: str
    seed: int
    status: str  # finished, diverged, failed, pruned or missing
    why: str  # the reason, in a sentence, unless it finished
    value: float  # of the study's metric; a diverged run has the worst value of all; NaN if there is none
    run: Run | None  # None if it has no metrics.jsonl


@dataclasses.dataclass
class Results:
    """A study on the disk."""

    design: Design
    folder: pathlib.Path
    outcomes: list[Outcome]  # every variant with every seed, in the order of the design
    differences: list[str]  # what differs between runs though it does not vary, such as "dtype: bfloat16, float32"

    def values(self) -> dict[str, dict[int, float]]:
        """{variant: {seed: value}} of the runs that have a value. Diverged runs count as the worst."""
        found = {name: {} for name in self.design.variants}
        for each in self.outcomes:
            if not math.isnan(each.value):
                found[each.variant][each.seed] = each.value
        return found

    def comparisons(self) -> list[Comparison]:
        """The verdict on each variant but the baseline; by Student's t while runs are missing."""
        complete = all(each.status != "missing" for each in self.outcomes)
        return compare(self.values(), self.design.baseline, self.design.interval if complete else "t")

    def sentences(self) -> list[str]:
        """The verdict on each variant, in words."""
        return [sentence(each, self.design.baseline, self.design.metric) for each in self.comparisons()]

    def warnings(self) -> list[str]:
        """What a reader of the verdict has to know beside it, in sentences."""
        found = [f"the runs differ in more than what varies: {each}" for each in self.differences]
        for status, what in (("diverged", "diverged, and counts as the worst"), ("failed", "failed")):
            found += [f"{o.variant} with seed {o.seed} {what}: {o.why}" for o in self.outcomes if o.status == status]
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


def folder_of(folder: pathlib.Path, variant: str, seed: int) -> pathlib.Path:
    """The folder of a run of the study in `folder`."""
    return folder / "runs" / variant / f"seed-{seed}"


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
    _count_diverged_as_worst(outcomes, plan.metric)
    return Results(plan, folder, outcomes, _differences(outcomes, plan))


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
            status, why, value = "diverged", NOT_REACHED.format(loss=plan.target_loss), math.nan
    return Outcome(variant, seed, status, why, value, run)


def metric(run: Run, name: str, target_loss: float | None) -> float:
    """The value of `name`, a metric of StudySettings, for a run: infinite if it did not reach `target_loss`."""
    if name == "ms":
        ms = run.train["ms"][WARM_UP:]
        return float(np.nanmedian(ms)) if np.isfinite(ms).any() else math.nan
    losses = run.eval["val_bits_per_byte" if name == "bits_per_byte" else "val_loss"]
    if not name.endswith("_to_loss"):
        return float(losses[-1]) if len(losses) else math.nan
    reached = np.flatnonzero(losses <= target_loss)
    if not len(reached):
        return math.inf
    axis = {"seconds_to_loss": "time", "tokens_to_loss": "tokens"}[name]
    return float(run.position(run.eval["iter"][reached[:1]], axis)[0])


def _count_diverged_as_worst(outcomes, name):
    """Give each diverged run the worst value of the study, so that it counts, but does not make every mean infinite."""
    worst = worst_of([each.value for each in outcomes], [each.run for each in outcomes if each.run], name)
    for each in outcomes:
        if each.status == "diverged":
            each.value = worst


def worst_of(values: list[float], runs: list[Run], name: str) -> float:
    """The worst value of the metric `name` among `values` and in the course of `runs`; NaN if there is none."""
    known = list(values)
    for run in runs:
        if name in ("val_loss", "bits_per_byte"):  # among them the loss of untrained weights
            known += [float(v) for v in run.eval["val_loss" if name == "val_loss" else "val_bits_per_byte"]]
        elif name == "seconds_to_loss":
            known.append(float(np.nansum(run.train["ms"]) / 1e3))
        elif name == "tokens_to_loss":
            known.append(len(run.train["iter"]) * run.tokens_per_step)
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


def _each(values: Any) -> list[str]:
    return list(dict.fromkeys(map(str, values)))
