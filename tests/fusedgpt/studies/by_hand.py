"""Study folders made by hand, without training: study.json, outcomes.jsonl, and what train.py leaves in each run's."""

import dataclasses
import json
import math
import pathlib
from typing import Any

from fusedgpt.studies.design import Design
from fusedgpt.studies.outcomes import Results, folder_of

EVERY = 50  # iterations from an evaluation to the next
MS = 20.0  # a step
TOKENS = 1000  # a step


def study(
    folder: pathlib.Path,
    variants: dict[str, dict[str, Any]],
    losses: dict[str, dict[int, list[float] | None]],
    **design: Any,
) -> pathlib.Path:
    """A study of `variants` with the validation losses {variant: {seed: those of its evaluations}}.

    The last loss of a run that diverged is NaN. A run that is None is missing. design: fields of study.json.
    """
    seeds = list(dict.fromkeys(seed for by_seed in losses.values() for seed in by_seed))
    varied = list(dict.fromkeys(name for changes in variants.values() for name in changes))
    plan = dict(command="python study.py config.py", kind="grid", metric="val_loss", target_loss=None, interval="t")
    plan |= dict(baseline=next(iter(variants)), varied=varied, variants=variants, seeds=seeds, code="", data={})
    plan |= dict(settings={"batch_size": 4, "dataset": "shakespeare_char"})
    plan |= dict(settled={"attention": "manual", "dtype": "float32", "compile": False})
    folder.mkdir(parents=True, exist_ok=True)
    Design(**plan | design).save(folder)
    lines = []
    for variant, by_seed in losses.items():
        for seed, values in by_seed.items():
            if values is not None:
                lines.append(_run(folder_of(folder, variant, seed), variant, seed, values, variants[variant]))
    (folder / "outcomes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _run(folder, variant, seed, losses, changes):
    """Write the files of a run; returns its line of outcomes.jsonl."""
    folder.mkdir(parents=True)
    diverged, rows = losses[-1] != losses[-1], []
    for n, loss in enumerate(losses):
        loss = None if loss != loss else float(loss)
        rows.append({"kind": "eval", "iter": n * EVERY, "train_loss": loss, "val_loss": loss})
        if loss is not None:
            rows[-1] |= {"train_bits_per_byte": 1.4427 * loss, "val_bits_per_byte": 1.4427 * loss}
        if n < len(losses) - 1:
            rows += [{"kind": "train", "iter": n * EVERY + i, "loss": loss, "ms": MS} for i in range(EVERY)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"batch_size": 4, "dataset": "shakespeare_char", "seed": seed, **changes}
    record = {"settings": settings, "tokens_per_step": TOKENS, "device": "cpu", "dtype": "float32", "compile": False}
    record |= {"attention": "manual", "world_size": 1, "environment": {"device": "a CPU", "torch": "2.13.0"}}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "report.html").write_text("the page of the run")
    why = {"status": "diverged", "why": "the weights are not finite"} if diverged else {"status": "finished"}
    return {"variant": variant, "seed": seed, **why}


def three(folder: pathlib.Path) -> pathlib.Path:
    """A study of three variants with three seeds, of which one run diverged and one is missing."""
    variants = {
        "learning_rate=0.01,optimizer=adamw": {"learning_rate": 0.01, "optimizer": "adamw"},
        "learning_rate=0.01,optimizer=muon": {"learning_rate": 0.01, "optimizer": "muon"},
        "learning_rate=0.1,optimizer=muon": {"learning_rate": 0.1, "optimizer": "muon"},
    }
    losses = {
        "learning_rate=0.01,optimizer=adamw": {1: [4.0, 3.0, 2.00], 2: [4.1, 3.2, 2.10], 3: [4.2, 3.4, 2.20]},
        "learning_rate=0.01,optimizer=muon": {1: [4.0, 2.5, 1.80], 2: [4.1, 2.7, 1.91], 3: [4.2, 2.9, 1.99]},
        "learning_rate=0.1,optimizer=muon": {1: [4.0, 2.4, 2.30], 2: [4.1, 3.9, math.nan], 3: None},
    }
    return study(folder, variants, losses)


def renamed(results: Results, names: dict[str, str]) -> Results:
    """`results` with other `names` for its variants, such as no folder could have."""
    plan = results.design
    variants = {names.get(name, name): changes for name, changes in plan.variants.items()}
    plan = dataclasses.replace(plan, variants=variants, baseline=names.get(plan.baseline, plan.baseline))
    runs = [dataclasses.replace(each, variant=names.get(each.variant, each.variant)) for each in results.outcomes]
    return dataclasses.replace(results, design=plan, outcomes=runs)
