"""The ladder: each rung is train.py's own step, changes one thing, and computes the same."""

import math

import pytest
import torch

import train
from fusedgpt.bench import ladder, training
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from fusedgpt.machine.device import resolve_compile
from tests.fusedgpt.bench.small import result, results_of, run, settings

CPU = torch.device("cpu")
NO_COMPILER = resolve_compile(True, CPU)[1]


def build(rung, tmp_path, data, **changes):
    return ladder.build({}, rung, settings("ladder", tmp_path, data, **changes), CPU)


def test_rungs_to_a_report(tmp_path, data, monkeypatch):
    monkeypatch.setattr(training.memory, "peak_memory", lambda device: math.nan)  # macOS had no report for it
    (found,) = run("ladder", tmp_path, data, only="manual, eager,flash,flash + padded vocabulary,cudnn*", compile=False)
    refused = [name for name, line in found.contenders.items() if line["status"] == "refused"]
    assert refused == ["cudnn + padded vocabulary"]
    assert len(found.laps) == 6 and all(lap.keys() == found.measured.keys() for lap in found.laps)
    losses = [line["loss"] for line in found.measured.values()]
    assert max(losses) - min(losses) < 1e-4 and found.measured["manual"]["tokens"] == 4 * 16
    assert found.measured["flash"]["kernel"]["forward"] == ["flash"]
    assert found.measured["flash + padded vocabulary"]["ran"]["padded_vocab_size"] == 128
    text = (tmp_path / "results" / "ladder" / "report.md").read_text()
    said = ("they agree", "143 ms", "not known", "flash / flash (flash, float32, eager, 128 ids)")
    assert all(each in text for each in said)


def test_a_step_is_that_of_train(tmp_path, data, monkeypatch):
    # what users run, on the same batches, with the learning rate of each iteration
    made, step = [], train.train_step

    def watched(state, s, micro_steps):
        made.append((state.iteration, state.batch[0].clone()))
        return step(state, s, micro_steps)

    monkeypatch.setattr(train, "train_step", watched)
    turn, found = build("flash", tmp_path, data, compile=False)
    assert [n for n, _ in made] == [*range(training.WARM_UP)]
    _, again = build("manual", tmp_path, data, compile=False)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(made[:5], made[5:]))
    assert found["loss"] == pytest.approx(again["loss"], rel=1e-5)
    turn(0.0)
    assert made[-1][0] == training.WARM_UP


@pytest.mark.parametrize(
    ("rung", "why"),
    [
        (ladder.TF32, "only GPUs multiply in TF32"),
        (ladder.UNPADDED, "only in a compiled model on a GPU"),
        (ladder.GRAPHED, "only in a compiled model on a GPU"),
        ("cudnn + padded vocabulary", "on GPUs only"),
    ],
)
def test_a_rung_that_would_show_nothing_here_is_refused(rung, why, tmp_path, data):
    with pytest.raises(UserError, match=why):
        build(rung, tmp_path, data, compile=False)


def test_each_rung_changes_one_thing():
    # a ratio of two changes says nothing about either
    def workload(rung):
        defaults = {"dtype": "s", "compile": "s", "attention": "s", "vocab_multiple": 1}
        return {**defaults, **ladder.RUNGS[rung], **ladder.variables(rung)}

    steps = [(ladder.FLOAT32, ladder.TF32), ("manual, eager", "manual"), ("manual", "flash"), ("flash", ladder.PADDED)]
    steps += [("flash", ladder.UNPADDED), (ladder.PADDED, ladder.GRAPHED), (ladder.PADDED, "cudnn + padded vocabulary")]
    for one, other in steps:
        had, has = workload(one), workload(other)
        changed = {name for name in had.keys() | has.keys() if had.get(name) != has.get(name)}
        assert len(changed) == 1 or changed <= {*ladder.VARIABLES.get(other, {})}, (one, other, changed)


def test_a_kernel_of_the_users_own_is_a_rung(tmp_path, data):
    file = tmp_path / "mine.py"
    file.write_text("from fusedgpt.attention.functions import ATTENTION\nmine = ATTENTION['math']\n")
    (found,) = run("ladder", tmp_path, data, attention=f"{file}:mine", only="*mine", compile=False)
    assert found.measured.keys() == {"manual", f"{file}:mine"}  # which had a padded vocabulary, beside `flash` without
    assert {line["ran"]["padded_vocab_size"] for line in found.measured.values()} == {65}


def test_losses_that_differ_are_said(tmp_path):
    lines = {"manual": {"loss": 4.0}, "flash": {"loss": 4.3}}
    (said,) = ladder.notes([result({"manual": [2.0] * 6, "flash": [1.0] * 6}, **lines)])
    assert said == "Losses lie within 0.3000 of each other: **they DISAGREE**."
    with pytest.raises(ParityError, match="after 5 steps its loss is nan"):  # a report of it ended in a TypeError
        training.warmed_up(lambda: torch.tensor(math.nan), CPU)


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER or "")
def test_a_rung_has_a_process_of_its_own_and_its_variables(tmp_path, data):
    run("ladder", tmp_path, data, only="manual, eager,flash", compile=False)
    (found,) = results_of("ladder", tmp_path)
    assert found.measured.keys() == {"manual", "manual, eager", "flash"} and found.ratio("flash")
    assert sorted(path.name for path in (tmp_path / "results" / "ladder" / "logs").iterdir()) == [
        "flash.txt",
        "manual, eager.txt",
        "manual.txt",
    ]
