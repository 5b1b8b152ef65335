"""What the runs of a study gave: a line of outcomes.jsonl each, with all that a report needs, and the verdict."""

import dataclasses
import functools
import math
import pathlib
from typing import Any

import numpy as np

from fusedgpt.errors import UserError
from fusedgpt.machine.files import read_jsonl
from fusedgpt.runs.metrics import LoggedRun, number, section
from fusedgpt.studies import design, verdict
from fusedgpt.studies.design import Design
from fusedgpt.studies.verdict import Finding

OVER = ("finished", "diverged")  # a run that failed is tried again by the next call
WITHOUT = ("diverged", "failed")  # how a run may be over without a value
EVALS = ("iter", "tokens", "val_loss", "val_bits_per_byte")
SEEN = ("dtype", "compile", "attention", "attention_sha256", "world_size")  # in run.json, what ran
MACHINE = ("device", "torch", "python", "threads", "commit")  # in run.json's environment
UNEQUAL = 0.05  # a share by which times may differ that should be equal


@dataclasses.dataclass
class Outcome:
    """A run of a study."""

    variant: str
    seed: int
    status: str  # finished, one of WITHOUT, or missing
    why: str  # the reason, in a sentence, unless it finished
    value: float  # of the study's metric; NaN if there is none
    row: dict[str, Any]  # its line in outcomes.jsonl; {} if it is missing


@dataclasses.dataclass
class Results:
    """A study on the disk."""

    design: Design
    folder: pathlib.Path
    outcomes: list[Outcome]  # every variant with every seed, in the order of the design

    @functools.cached_property
    def counted(self) -> int:
        """The number of seeds of the last look that is complete; 0 before the first."""
        plan = self.design
        waited_for = {plan.baseline, *(plan.planned or plan.variants)}
        missing = {o.seed for o in self.outcomes if o.variant in waited_for and o.status == "missing"}
        complete = [n for n in plan.looks if not missing.intersection(plan.seeds[:n])]
        return max(complete, default=0)

    @property
    def decided(self) -> bool:
        """Whether a look found a difference of every planned variant, so that no more seeds are needed."""
        each = [c for c in self.comparisons if c.planned]
        return bool(each) and all(c.p < verdict.LEVEL for c in each)

    def values(self) -> dict[str, dict[int, float]]:
        """{variant: {seed: value}} of the runs that have a value; from the first look on, of its seeds."""
        found = {name: {} for name in self.design.variants}
        seeds = self.design.seeds[: self.counted or None]
        for each in self.outcomes:
            if each.seed in seeds and not math.isnan(each.value):
                found[each.variant][each.seed] = each.value
        return found

    def without(self, variant: str) -> dict[str, int]:
        """{how: number of runs} of the variant's runs that are over without a value."""
        ended = [o.status for o in self.outcomes if o.variant == variant and o.status in WITHOUT]
        return {how: ended.count(how) for how in WITHOUT if how in ended}

    @functools.cached_property
    def comparisons(self) -> list[Finding]:
        """The verdict on each variant but the baseline. There is none before a look is complete, or without a value."""
        plan, values = self.design, self.values()
        base, pairs, untested = values[plan.baseline], {}, set()
        for name in [name for name in values if name != plan.baseline]:
            paired = [seed for seed in plan.seeds if seed in values[name] and seed in base]
            pairs[name] = np.array([values[name][seed] - base[seed] for seed in paired])
            if plan.kind == "search" or not self.counted or len(paired) < self.counted:
                untested.add(name)
        largest = max((abs(v) for each in values.values() for v in each.values()), default=1.0)
        how = dict(untested=frozenset(untested), planned=frozenset(plan.planned), matters=plan.matters)
        return verdict.compare(pairs, largest, looks=tuple(plan.looks), **how)

    def ms(self, variant: str) -> float:
        """Milliseconds of a step, in turns; NaN if there were none."""
        return self.design.times.get(variant, {}).get("ms", math.nan)

    def seconds(self, variant: str) -> float:
        """Seconds of the training steps of a run, on average over those that finished; NaN if none did."""
        known = [o.row["seconds"] for o in self.outcomes if o.variant == variant and o.status == "finished"]
        return float(np.mean(known or [math.nan]))

    def warnings(self) -> list[str]:
        """What a reader of the verdict has to know beside it, in sentences."""
        plan = self.design
        found = [f"after the first run, {each}" for each in plan.changes]
        found += ["comparisons that were not planned are exploratory"] * bool(plan.changes)
        for name in plan.variants:
            for how, count in self.without(name).items():
                why = next(o.why for o in self.outcomes if o.variant == name and o.status == how)
                found.append(f"{name}: {count} of {len(plan.seeds)} runs {how} ({why})")
        varied = {f"{name}{of_a_file}" for name in plan.varied for of_a_file in ("", "_sha256")}
        ran = [(o.variant, o.row["ran"]) for o in self.outcomes if "ran" in o.row]
        for name in (*SEEN, *MACHINE):
            kinds = dict.fromkeys((variant * (name in varied), str(each.get(name))) for variant, each in ran)
            if len(kinds) > len({variant for variant, _ in kinds}) and (name, plan.kind) != ("commit", "against"):
                found.append(f"the runs differ in more than what varies: {name}: {', '.join(v for _, v in kinds)}")
        seeds = plan.seeds[: self.counted] if self.decided else plan.seeds
        if missing := sum(o.status == "missing" and o.seed in seeds for o in self.outcomes):
            found.append(f"{missing} runs are missing: {self.counted} of {len(plan.seeds)} seeds count")
        return found + self._unequal_times()

    def _unequal_times(self):
        base = self.seconds(self.design.baseline)
        return [
            f"the steps of {name} took {self.seconds(name):.3g} s, those of the baseline {base:.3g} s, in equal minutes"
            for name in self.design.variants
            if self.design.minutes and abs(self.seconds(name) - base) > UNEQUAL * base
        ]


def folder_of(folder: pathlib.Path, variant: str, seed: int) -> pathlib.Path:
    """The folder of a run of the study in `folder`."""
    return folder / "runs" / variant / f"seed-{seed}"


def statuses(folder: pathlib.Path) -> dict[tuple[str, int], dict]:
    """{(variant, seed): its last line in outcomes.jsonl} of the runs that ended."""
    path = folder / "outcomes.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    return {(row.get("variant"), row.get("seed")): row for row in rows}


def left(folder: pathlib.Path, jobs: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those of the `jobs` that have not ended for good."""
    ended = statuses(folder)
    return [job for job in jobs if ended.get(job, {}).get("status") not in OVER]


def row_of(out_dir: pathlib.Path) -> dict[str, Any]:
    """What outcomes.jsonl keeps of the run in a folder: its evaluations, times and machine; {} if it has none."""
    if not (out_dir / "metrics.jsonl").exists():
        return {}
    run = LoggedRun(out_dir)
    ms, iters = run.train["ms"], run.eval["iter"]
    tokens = run.position(iters, "tokens") if run.tokens_per_step > 0 else np.full(len(iters), math.nan)
    evals = {"iter": iters, "tokens": tokens} | {name: run.eval[name] for name in EVALS[2:]}
    ran = {name: run.record.get(name) for name in SEEN}
    ran |= {name: section(run.record, "environment").get(name) for name in MACHINE}
    return {
        "iterations": len(ms),
        "seconds": float(np.nansum(ms)) / 1e3,
        "evals": {name: each.tolist() for name, each in evals.items()},
        "ran": ran,
    }


def read(folder: str | pathlib.Path) -> Results:
    """Read the study in a folder. Raises UserError if it has none."""
    folder = pathlib.Path(folder)
    plan = design.load(folder)
    if plan is None:
        raise UserError(f"{folder / 'study.json'} does not exist: name the folder of a study")
    ended = statuses(folder)
    plan.variants |= {variant: row["settings"] for (variant, _), row in ended.items() if "settings" in row}
    found = [outcome(plan, v, seed, ended.get((v, seed), {})) for v in plan.variants for seed in plan.seeds]
    return Results(plan, folder, found)


def outcome(plan: Design, variant: str, seed: int, row: dict) -> Outcome:
    """The outcome of a run, from its line in outcomes.jsonl."""
    status, why, value = row.get("status", "missing"), row.get("why", ""), math.nan
    if status == "finished":
        named = {"val_loss": "val_loss", "bits_per_byte": "val_bits_per_byte"}[plan.metric]
        value = number((row.get("evals") or {})[named][-1])
        if math.isnan(value):
            status, why = "diverged", "not finite at the end"
    return Outcome(variant, seed, status, why, value, row)
