"""The value of a run, looks, and what a reader is warned of. test_runner.py has the line of a run."""

import dataclasses
import math

from fusedgpt.machine.files import json_line
from fusedgpt.settings import Settings
from fusedgpt.studies import design, outcomes
from fusedgpt.studies.command import Request, StudySettings


def study(folder, losses, variants=None, **changes):
    """The folder of a study made by hand, with validation losses {variant: {seed: those of its evaluations}}.

    The last loss of a run that diverged is NaN. A run that is None is missing. changes: fields of study.json.
    """
    seeds = list(dict.fromkeys(seed for by_seed in losses.values() for seed in by_seed))
    shared = Settings(dataset="shakespeare_char", batch_size=4, eval_iters=2)
    request = Request(StudySettings(), shared, variants or {name: {} for name in losses}, seeds, [])
    code, data = {"working tree": "c0de"}, {"shakespeare_char/train": "da7a"}
    plan = design.of(request, "grid", "python study.py config.py", code, data, None)
    plan.settled = {"attention": "manual", "dtype": "float32", "compile": False}
    folder.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(plan, **changes).save(folder)
    known = [(variant, seed) for variant in losses for seed in losses[variant] if losses[variant][seed]]
    lines = [json_line(row(variant, seed, losses[variant][seed])) for variant, seed in known]
    (folder / "outcomes.jsonl").write_text("".join(lines))
    return folder


def row(variant, seed, losses, ms=20.0, **ran):
    """A run's line of outcomes.jsonl."""
    diverged = math.isnan(losses[-1])
    values = [None if math.isnan(loss) else float(loss) for loss in losses]
    iters = [50 * n for n in range(len(losses))]
    halves = [None if loss is None else loss / 2 for loss in values]
    evals = {"iter": iters, "val_loss": values, "val_bits_per_byte": halves}
    why = "the weights are not finite" if diverged else ""
    found = {"variant": variant, "seed": seed, "status": "diverged" if diverged else "finished", "why": why}
    found |= {"iterations": iters[-1], "seconds": ms * iters[-1] / 1e3, "evals": evals}
    return found | {"ran": {"device": "a CPU", "torch": "2.13.0", "commit": "abc1234", "dtype": "float32"} | ran}


def three(folder):
    """A study of three variants with three seeds; of the last variant, one run diverged."""
    losses = {
        "learning_rate=0.01,optimizer=adamw": {1: [4.0, 3.0, 2.00], 2: [4.1, 3.2, 2.10], 3: [4.2, 3.4, 2.20]},
        "learning_rate=0.01,optimizer=muon": {1: [4.0, 2.5, 1.80], 2: [4.1, 2.7, 1.91], 3: [4.2, 2.9, 1.99]},
        "learning_rate=0.1,optimizer=muon": {1: [4.0, 2.4, 2.30], 2: [4.1, 3.9, math.nan], 3: [4.2, 2.5, 2.4]},
    }
    times = {name: {"ms": 20.0, "times": 1.0, "low": 0.99, "high": 1.01} for name in losses}
    return study(folder, losses, varied=["learning_rate", "optimizer"], times=times)


WORSE = (1.0, 1.4, 1.2, 1.1)  # b than a, by seed: two of them tell nothing
LOSSES = {name: {n: [4.0, 2.0 + n / 100 + (name == "b") * WORSE[n - 1]] for n in range(1, 5)} for name in "ab"}


def read(folder, *lines, losses=LOSSES, **how):
    """A study made by hand, with `lines` at the end of its outcomes.jsonl."""
    with open(study(folder, losses, **how) / "outcomes.jsonl", "a") as file:
        file.writelines(map(json_line, lines))
    return outcomes.read(folder)


def test_metrics(tmp_path):
    for metric, value in [("val_loss", 1.5), ("bits_per_byte", 0.75)]:  # the last, not the lowest
        assert read(tmp_path, losses={"a": {1: [4.0, 2.5, 1.4, 1.5]}}, metric=metric).values() == {"a": {1: value}}


def test_a_run_that_diverged_has_no_invented_value(tmp_path):
    # a stand-in used to be averaged, and a variant that always diverged was "no difference found"
    found = outcomes.read(three(tmp_path))
    assert [o.status for o in found.outcomes[6:]] == ["finished", "diverged", "finished"]
    muon, far = found.comparisons
    assert muon.tested and not far.tested and far.n == 2
    assert "learning_rate=0.1,optimizer=muon: 1 of 3 runs diverged (the weights are not finite)" in found.warnings()
    line = row("a", 1, [4.0, math.nan]) | {"status": "finished"}
    assert read(tmp_path / "finished", line).outcomes[0].status == "diverged"
    # a run that ends early by it made the steps of its variant look short, beside the same minutes
    assert read(tmp_path / "early", row("b", 4, [4.0, math.nan], ms=1.0)).seconds("b") == 1.0


def test_there_is_no_p_before_the_planned_seeds_are_in(tmp_path):
    # lines "so far" had a p after each seed: with 10 seeds, one of them "decided" in 20 % of studies of equal variants
    losses = {"a": LOSSES["a"], "b": LOSSES["b"] | {4: None}}
    found = read(tmp_path, losses=losses)
    assert found.counted == 0 and not found.comparisons[0].tested and found.comparisons[0].n == 3
    assert "1 runs are missing: 0 of 4 seeds count" in found.warnings()
    # a look takes the seeds that it planned: the third is in, but its look is not
    found = read(tmp_path / "looks", losses=losses, looks=[2, 4])
    assert found.counted == 2 and found.comparisons[0].n == 2 and found.comparisons[0].tested
    assert set(found.values()["a"]) == {1, 2} and not found.decided
    found = read(tmp_path / "whole", looks=[2, 4])
    assert found.counted == 4 and found.decided and found.warnings() == []
    # in a search every trial was "planned", and a table of forty had forty p
    assert not any(c.tested for c in read(tmp_path / "search", kind="search", space="learning_rate=1..2").comparisons)


def test_a_run_that_failed_is_tried_again_and_keeps_no_verdict_from_the_others(tmp_path):
    losses = LOSSES | {"c": LOSSES["b"]}
    failed = {"variant": "c", "seed": 2, "status": "failed", "why": "out of memory"}
    found = read(tmp_path, failed, losses=losses)
    assert [c.tested for c in found.comparisons] == [True, False]
    assert found.warnings() == ["c: 1 of 4 runs failed (out of memory)"]
    assert outcomes.left(tmp_path, [("c", 1), ("c", 2)]) == [("c", 2)]
    assert read(tmp_path, failed, row("c", 2, [4.0, 2.0]), losses=losses).warnings() == []  # the last word counts


def test_what_differs_though_it_does_not_vary_is_named(tmp_path):
    other = row("b", 4, [4.0, 3.04], dtype="bfloat16")
    said = "the runs differ in more than what varies: dtype: float32, bfloat16"
    assert read(tmp_path, other).warnings() == [said]
    variants = {name: {"dtype": name} for name in "ab"}
    # a kernel's file that was edited in mid-study gave one table of two kernels
    assert read(tmp_path, other, variants=variants).warnings() == [said.replace("32,", "32, float32,")]
    all_of_b = (row("b", seed, LOSSES["b"][seed], dtype="bfloat16") for seed in LOSSES["b"])
    assert read(tmp_path, *all_of_b, variants=variants).warnings() == []


def test_unequal_time_is_said(tmp_path):
    # runs of equal minutes made 482, 627 and 566 iterations, and warnings were empty
    found = read(tmp_path, *(row("b", seed, LOSSES["b"][seed], ms=22.0) for seed in LOSSES["b"]), minutes=1.0)
    assert found.warnings() == ["the steps of b took 1.1 s, those of the baseline 1 s, in equal minutes"]
