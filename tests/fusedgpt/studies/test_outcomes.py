import json
import math

import pytest

from fusedgpt.errors import UserError
from fusedgpt.machine.files import json_line
from fusedgpt.studies import outcomes, words
from tests.fusedgpt.studies.test_design import plan

VARIANT = "learning_rate=0.001"


def study(folder, losses, name="val_loss", target=None, ended=True, every=2):
    """A study with runs of these validation losses, {(variant, seed): losses}, of steps of 10, 11, 12, … ms.

    every: steps between evaluations.
    """
    one = plan()
    one.metric, one.target_loss = name, target
    folder.mkdir()
    one.save(folder)
    for (variant, seed), each in losses.items():
        out_dir = outcomes.folder_of(folder, variant, seed)
        out_dir.mkdir(parents=True)
        rows = [{"kind": "train", "iter": i, "loss": 1.0, "ms": 10.0 + i} for i in range(every * (len(each) - 1))]
        rows += [
            {"kind": "eval", "iter": every * n, "train_loss": v, "val_loss": v, "val_bits_per_byte": v / 2}
            for n, v in enumerate(each)
        ]
        (out_dir / "metrics.jsonl").write_text("".join(map(json_line, rows)))
        (out_dir / "run.json").write_text(json.dumps({"tokens_per_step": 100, "settings": {}}))
    lines = [json_line({"variant": v, "seed": seed, "status": "finished", "why": ""}) for v, seed in losses if ended]
    (folder / "outcomes.jsonl").write_text("".join(lines))
    return outcomes.read(folder)


@pytest.mark.parametrize(
    ("name", "target", "value"),
    [
        ("val_loss", None, 1.5),  # the last, not the lowest
        ("bits_per_byte", None, 0.75),
        ("ms", None, 15.0),  # 10 to 15 ms, of which the first five are warm-up
        ("tokens_to_loss", 2.5, 200.0),  # first at or below it after two steps
        ("seconds_to_loss", 2.5, 0.021),
        ("seconds_to_loss", 1.4, 0.046),
    ],
)
def test_metrics(tmp_path, name, target, value):
    found = study(tmp_path / "study", {(VARIANT, 1): [4.0, 2.5, 1.4, 1.5]}, name, target)
    assert found.values()[VARIANT][1] == pytest.approx(value)


@pytest.mark.parametrize(("name", "value"), [("tokens_to_loss", 500.0), ("seconds_to_loss", 0.060)])
def test_the_way_to_a_loss_does_not_depend_on_when_it_is_seen(tmp_path, name, value):
    # it used to end at an evaluation: a run with half as many of them, or with twice the batch, was called worse
    for every, losses in ((2, [4.0, 3.5, 3.0, 2.5]), (4, [4.0, 3.0, 2.0])):  # both fall by 0.25 a step
        found = study(tmp_path / str(every), {(VARIANT, 1): losses}, name, 2.75, every=every)
        assert found.values()[VARIANT][1] == pytest.approx(value)  # after five steps, of 10 to 14 ms


def test_the_way_to_a_loss_may_be_none_or_lead_past_an_evaluation_that_is_not_finite(tmp_path):
    losses = {(VARIANT, 1): [1.2, 1.0], (VARIANT, 2): [4.0, math.nan, 1.0]}
    found = study(tmp_path / "study", losses, "tokens_to_loss", 2.0)
    assert found.values()[VARIANT] == {1: 0.0, 2: pytest.approx(400 * 2 / 3)}


def test_a_loss_that_is_not_reached_counts_as_the_worst(tmp_path):
    losses = {(VARIANT, 1): [4.0, 2.0], (VARIANT, 2): [4.0, 3.0, 3.0]}
    found = study(tmp_path / "study", losses, "tokens_to_loss", 2.0)
    assert [each.status for each in found.outcomes] == ["finished", "not reached", "missing", "missing"]
    assert found.outcomes[1].why == "did not reach the loss 2"
    # after the last step of the longest run, which might have reached it
    assert found.values() == {VARIANT: {1: 200.0, 2: 500.0}, "learning_rate=0.002": {}}
    assert found.stand_ins() == {VARIANT: {2}, "learning_rate=0.002": set()}
    assert f"{VARIANT} with seed 2 did not reach the loss 2, and counts as the worst" in found.warnings()
    found = study(tmp_path / "seconds", losses, "seconds_to_loss", 2.0)
    assert found.values()[VARIANT][2] == pytest.approx((10 + 11 + 12 + 13) / 1e3 * 5 / 4)
    # by a worker that has the folder of the run
    row = {"variant": VARIANT, "seed": 2, "status": "not reached", "why": "did not reach it", "value": 900.0}
    with open(tmp_path / "study" / "outcomes.jsonl", "a") as file:
        file.write(json_line(row))
    assert outcomes.read(tmp_path / "study").stand_ins()[VARIANT] == {2} and "not reached" in outcomes.OVER


def test_variants_that_do_not_reach_the_loss_are_not_compared(tmp_path):
    losses = {(name, seed): [4.0, 3.0] for name in (VARIANT, "learning_rate=0.002") for seed in (1, 2)}
    found = study(tmp_path / "study", losses, "tokens_to_loss", 2.0)
    (compared,) = found.comparisons()
    assert compared.n == 2 and not compared.tested
    assert words.headline(found) == "No verdict: no run of a pair has a value of its own"
    assert found.sentences()[0].startswith("no verdict on learning_rate=0.002: with each of 2 seeds")


def test_a_diverged_run_counts_by_untrained_weights_whatever_it_came_to(tmp_path):
    # four thousand million, from a learning rate of 1000
    found = study(tmp_path / "study", {(VARIANT, 1): [4.0, 5e9, math.nan], (VARIANT, 2): [4.1, 2.0]})
    assert found.outcomes[0].value == 4.1
    found = study(tmp_path / "worse", {(VARIANT, 1): [4.0, 5e9, math.nan], (VARIANT, 2): [4.1, 6.0]})
    assert found.outcomes[0].value == 6.0


def test_failed_runs_may_leave_too_few_pairs_for_the_bootstrap(tmp_path):
    losses = {(name, seed): [4.0, 2.0 + seed / 10] for name in (VARIANT, "learning_rate=0.002") for seed in (1, 2)}
    found = study(tmp_path / "study", losses)
    found.design.interval = "bootstrap"
    assert found.comparisons()[0].n == 2
    assert found.warnings() == [
        "too few pairs for the bootstrap, so the verdict is by Student's t: learning_rate=0.002"
    ]


def test_a_run_that_ends_without_a_finite_loss_has_diverged(tmp_path):
    found = study(tmp_path / "study", {(VARIANT, 1): [4.0, math.nan], (VARIANT, 2): [4.1, 2.0]})
    assert [each.status for each in found.outcomes[:2]] == ["diverged", "finished"]
    assert found.outcomes[0].value == 4.1


def test_a_run_without_an_end_is_missing_and_said_to_be(tmp_path):
    found = study(tmp_path / "study", {(VARIANT, 1): [4.0, 2.0]}, ended=False)
    assert [each.status for each in found.outcomes] == ["missing"] * 4
    assert math.isnan(found.outcomes[0].value)
    assert found.warnings() == ["4 of 4 runs are missing: the verdict is not final"]


def test_the_last_word_on_a_run_counts(tmp_path):
    # a run that failed is tried again by the next call
    study(tmp_path / "study", {(VARIANT, 1): [4.0, 2.0]}, ended=False)
    lines = [{"variant": VARIANT, "seed": 1, "status": status, "why": "x"} for status in ("failed", "finished")]
    (tmp_path / "study" / "outcomes.jsonl").write_text("".join(map(json_line, lines)) + '{"variant": "learn')
    assert outcomes.read(tmp_path / "study").outcomes[0].status == "finished"


def test_warnings_are_sentences(tmp_path):
    found = study(tmp_path / "study", {(VARIANT, 1): [4.0, 2.0]})
    found.design.looks = 1
    found.design.against = {"ref": "HEAD~1", "commit": "abc", "initial_weights": "differ"}
    found.differences.append("dtype: bfloat16, float32")
    assert [line.split(":")[0] for line in found.warnings()] == [
        "the runs differ in more than what varies",
        "3 of 4 runs are missing",
        "seeds were added after a verdict",
        "the initial weights of the two versions differ, so the runs are not pairs that differ in one thing",
    ]


def test_a_folder_without_a_study_is_named(tmp_path):
    with pytest.raises(UserError, match=r"study\.json does not exist: name the folder of a study"):
        outcomes.read(tmp_path)
