"""Study folders made by hand, without training: study.json and outcomes.jsonl."""

import json
import math
import pathlib
from typing import Any

from fusedgpt.studies.design import Design

EVERY = 50  # iterations from an evaluation to the next
TOKENS = 1000  # a step


def study(
    folder: pathlib.Path,
    losses: dict[str, dict[int, list[float] | None]],
    variants: dict[str, dict[str, Any]] | None = None,
    **design: Any,
) -> pathlib.Path:
    """A study with the validation losses {variant: {seed: those of its evaluations}}.

    The last loss of a run that diverged is NaN. A run that is None is missing. design: fields of study.json.
    """
    variants = variants or {name: {} for name in losses}
    seeds = list(dict.fromkeys(seed for by_seed in losses.values() for seed in by_seed))
    varied = list(dict.fromkeys(name for changes in variants.values() for name in changes))
    plan = dict(command="python study.py config.py", kind="grid", metric="val_loss", target_loss=None, matters=None)
    plan |= dict(baseline=next(iter(variants)), varied=varied, variants=variants, seeds=seeds, looks=[len(seeds)])
    plan |= dict(code={"working tree": "c0de"}, data={"shakespeare_char/train": "da7a"})
    plan |= dict(settings={"batch_size": 4, "dataset": "shakespeare_char", "eval_iters": 2})
    plan |= dict(settled={"attention": "manual", "dtype": "float32", "compile": False})
    plan |= dict(planned=[name for name in variants if name != plan["baseline"]])
    folder.mkdir(parents=True, exist_ok=True)
    Design(**plan | design).save(folder)
    lines = [
        row(variant, seed, values)
        for variant, by_seed in losses.items()
        for seed, values in by_seed.items()
        if values is not None
    ]
    (folder / "outcomes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def row(variant: str, seed: int, losses: list[float], ms: float = 20.0, **ran: Any) -> dict[str, Any]:
    """A run's line of outcomes.jsonl."""
    diverged = math.isnan(losses[-1])
    values = [None if math.isnan(loss) else float(loss) for loss in losses]
    iters = [n * EVERY for n in range(len(losses))]
    evals = {"iter": iters, "tokens": [TOKENS * n for n in iters], "val_loss": values}
    evals["val_bits_per_byte"] = [None if loss is None else loss / 2 for loss in values]
    why = "the weights are not finite" if diverged else ""
    found = {"variant": variant, "seed": seed, "status": "diverged" if diverged else "finished", "why": why}
    found |= {"iterations": iters[-1], "seconds": ms * iters[-1] / 1e3, "evals": evals}
    return found | {"ran": {"device": "a CPU", "torch": "2.13.0", "commit": "abc1234", "dtype": "float32"} | ran}


def three(folder: pathlib.Path) -> pathlib.Path:
    """A study of three variants with three seeds; of the last variant, one run diverged."""
    variants = {
        "learning_rate=0.01,optimizer=adamw": {"learning_rate": 0.01, "optimizer": "adamw"},
        "learning_rate=0.01,optimizer=muon": {"learning_rate": 0.01, "optimizer": "muon"},
        "learning_rate=0.1,optimizer=muon": {"learning_rate": 0.1, "optimizer": "muon"},
    }
    losses = {
        "learning_rate=0.01,optimizer=adamw": {1: [4.0, 3.0, 2.00], 2: [4.1, 3.2, 2.10], 3: [4.2, 3.4, 2.20]},
        "learning_rate=0.01,optimizer=muon": {1: [4.0, 2.5, 1.80], 2: [4.1, 2.7, 1.91], 3: [4.2, 2.9, 1.99]},
        "learning_rate=0.1,optimizer=muon": {1: [4.0, 2.4, 2.30], 2: [4.1, 3.9, math.nan], 3: [4.2, 2.5, 2.4]},
    }
    times = {name: {"ms": 20.0, "times": 1.0, "low": 0.99, "high": 1.01} for name in variants}
    return study(folder, losses, variants, times=times)
