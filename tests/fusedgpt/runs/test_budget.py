"""A run of so many minutes: how many iterations it settles, and that it can be made again to the bit."""

import contextlib
import io
import os
import sys
import time
import types
from unittest import mock

import pytest
import torch

import train
from fusedgpt.runs import budget, checkpoint
from tests.conftest import again, assert_same_bytes, checkpoint_of, record, rows, run, small, tensors, weights
from tests.launch import POOL, script

NUMBERS = dict(max_iters=12, lr_decay_iters=12)


@pytest.fixture
def at_most_12(monkeypatch):
    """Let `minutes` settle no more than 12 iterations, after a short timing; in 60 minutes these fit."""
    monkeypatch.setattr(budget, "MOST_ITERATIONS", 12)
    monkeypatch.setattr(budget, "LONGEST_S", 0.05)


def assert_same_runs(a, b):
    """Two runs ended with the same weights, optimizer and scaler, and logged the same losses."""
    ours, theirs = (checkpoint.load(folder / "ckpt.pt") for folder in (a, b))
    assert_same_bytes(tensors(ours), tensors(theirs))
    assert ours["scaler"] == theirs["scaler"] and ours["best_val_loss"] == theirs["best_val_loss"]
    assert [row["loss"] for row in rows(a)] == [row["loss"] for row in rows(b)]
    assert rows(a, "eval") == rows(b, "eval")


@pytest.mark.usefixtures("at_most_12")
@pytest.mark.parametrize("weights_from", ["scratch", "an export"])
def test_a_run_with_the_numbers_that_it_settled_is_the_same_to_the_bit(tmp_path, data, exported, weights_from):
    settings = dict(dropout=0.2, dtype="float16", optimizer="muon", schedule="wsd")
    if weights_from != "scratch":
        settings = dict(init_from=str(exported), sample_interval=5, sample_prompts="!")
    timed = run(tmp_path / "timed", data, minutes=60.0, **settings)
    assert_same_runs(timed, run(tmp_path / "again", data, **settings, **NUMBERS))
    settled = record(timed)["settings"]
    for recorded in (settled, checkpoint_of(timed)["config"]):
        assert {name: recorded[name] for name in NUMBERS} == NUMBERS and recorded["minutes"] == 60.0
    assert [row["iter"] for row in rows(timed)] == list(range(12))  # the steps that were timed left no line


@pytest.mark.usefixtures("at_most_12")
def test_what_a_changed_step_draws_and_keeps_is_undone_too(tmp_path, data, monkeypatch):
    step = train.train_step

    def with_noise(state, *args):
        results = step(state, *args)
        with torch.no_grad():
            state.model.lm_head.weight += 1e-3 * torch.randn_like(state.model.lm_head.weight)
            state.model.steps_made += 1
        return results | {"steps_made": state.model.steps_made.float()}

    build = train.build_model

    def with_buffer(*args):
        model, s = build(*args)
        model.register_buffer("steps_made", torch.zeros((), dtype=torch.long))
        return model, s

    monkeypatch.setattr(train, "train_step", with_noise)
    monkeypatch.setattr(train, "build_model", with_buffer)
    timed = run(tmp_path / "timed", data, minutes=60.0)
    assert [row["steps_made"] for row in rows(timed)] == list(range(1, 13))
    steps = run(tmp_path / "again", data, **NUMBERS)
    assert_same_bytes(weights(timed), weights(steps))


def train_as_rank(settings, most):
    """Train in a rank, where `minutes` settles no more than `most` iterations; what it printed."""
    limits = mock.patch.multiple(budget, MOST_ITERATIONS=most, LONGEST_S=0.05)
    with limits, contextlib.redirect_stdout(io.StringIO()) as said:
        train.main(settings)
    return said.getvalue()


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_ranks_settle_one_number_and_are_the_same_to_the_bit(tmp_path, data, parallel):
    s = dict(gradient_accumulation_steps=2, dropout=0.1, parallel=parallel, eval_iters=1, lr_decay_iters=4, max_iters=4)
    asked = small(tmp_path / "timed", data, minutes=60.0, **s), small(tmp_path / "again", data, **s)
    said, _ = (POOL.call(2, dict(os.environ), train_as_rank, settings, 4) for settings in asked)
    assert_same_runs(tmp_path / "timed", tmp_path / "again")
    assert "".join(said).count("minutes=60: 4 steps") == 1


@pytest.mark.usefixtures("at_most_12")
def test_a_run_that_is_cut_off_keeps_its_numbers(tmp_path, data, monkeypatch, capsys):
    step, broken = train.train_step, tmp_path / "broken"

    def train_step(state, *args):
        if state.iteration == 7 and (broken / "metrics.jsonl").exists():  # not while steps are timed
            raise ArithmeticError
        return step(state, *args)

    asked = dict(minutes=60.0, max_iters=3, dropout=0.1, init_from="auto")
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(train, "train_step", train_step)
        run(broken, data, **asked)
    run(broken, data, **asked)  # the same command
    said = capsys.readouterr().out
    assert said.count("minutes=60: 12 steps of ") == 1 and "resuming with" not in said
    only = "minutes=60 settles the length of a new run only, and this one has max_iters=12 and lr_decay_iters=12"
    assert f"{only}: give --max_iters" in said
    assert_same_runs(broken, run(tmp_path / "whole", data, dropout=0.1, **NUMBERS))


@pytest.mark.usefixtures("at_most_12")
def test_a_run_goes_on_with_other_numbers_only_if_it_gives_up_its_minutes(tmp_path, data, capsys):
    timed = run(tmp_path, data, minutes=60.0)
    run(timed, data, minutes=120.0, init_from="resume")
    assert "minutes=120 settles the length of a new run only, and this one has max_iters=12" in capsys.readouterr().out
    script("train.py", *again(timed))  # nothing is left to do
    run(timed, data, minutes=60.0, max_iters=20, init_from="resume")
    assert len(rows(timed)) == 12 and "raise --max_iters above that to train on" in capsys.readouterr().out
    script("train.py", *again(timed, "--max_iters=20"))
    assert len(rows(timed)) == 20
    run(timed, data, minutes=120.0, init_from="resume", eval_only=True)  # no length matters


@pytest.mark.parametrize(("schedule", "iterations"), [("wsd", 12), ("cosine", 30)])
def test_a_run_whose_steps_become_slow_is_shortened(tmp_path, data, monkeypatch, capsys, schedule, iterations):
    # --minutes=0.5 took 200 s beside other work. The shorter run, too, can be made again by its numbers
    monkeypatch.setattr(budget, "MOST_ITERATIONS", 30)
    monkeypatch.setattr(budget, "LONGEST_S", 0.05)
    fits = budget.most_iterations  # when steps are timed; afterwards no more fit
    monkeypatch.setattr(budget, "most_iterations", lambda left, cost, s, done=0: done or fits(left, cost, s))
    asked = dict(schedule=schedule, dropout=0.2, log_interval=1)
    timed = run(tmp_path / "timed", data, minutes=60.0, **asked)
    said = "steps have become slower: minutes=60: 6 steps of "
    assert capsys.readouterr().out.count(said) == (schedule == "wsd")
    numbers = dict(max_iters=iterations, lr_decay_iters=iterations)
    settled = record(timed)["settings"]
    assert {name: settled[name] for name in numbers} == numbers
    assert_same_runs(timed, run(tmp_path / "again", data, **asked, **numbers))


@pytest.mark.parametrize("every", [7, 50, 10**9])
def test_steps_evaluations_and_samples_fill_the_minutes(tmp_path, data, every):
    s = small(tmp_path, data, eval_interval=every, sample_interval=20)

    def takes(n):
        evaluations = [it for it in range(n + 1) if it % every == 0 or it == n]
        samples = [it for it in range(n + 1) if it % 20 == 0 or it == n]
        return 0.5 * n + 3.0 * len(evaluations) + len(samples)

    n = budget.most_iterations(60.0, budget.Cost(0.5, 3.0, 1.0), s)
    assert takes(n) <= 60 < takes(n + 1)


def test_scoring_takes_of_the_minutes(tmp_path, data, monkeypatch):
    # a run of 4.8 seconds took 18
    scorer, costs = types.SimpleNamespace(scores=lambda _: time.sleep(0.3) or {"x": 1.0}), []
    harness = types.SimpleNamespace(Scorer=lambda *_: scorer)
    monkeypatch.setitem(sys.modules, "fusedgpt.interchange.harness", harness)
    monkeypatch.setattr(budget, "LONGEST_S", 0.05)
    monkeypatch.setattr(budget, "most_iterations", lambda left, cost, *_: costs.append(cost) or 1)
    run(tmp_path, data, minutes=60.0, eval_tasks="slow")
    assert costs[0].evaluation > 0.3


def test_a_flag_of_max_iters_overrides_the_minutes_of_a_config_file(tmp_path):
    # a run of --max_iters=60 would have made as many iterations as its config file's minutes allow
    pytest.importorskip("tyro")
    config = tmp_path / "mine.py"
    config.write_text(f"minutes = 5.0\nout_dir = {str(tmp_path / 'out')!r}\n")
    for flags, minutes in (([], 5.0), (["--max_iters=60"], None), (["--max_iters=60", "--minutes=2"], 2.0)):
        assert train.read_settings([str(config), *flags]).minutes == minutes


def test_minutes_that_are_over_before_the_first_step_leave_one(tmp_path, data, capsys):
    run(tmp_path, data, minutes=1e-6)
    assert len(rows(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "minutes=1e-06: 1 step of" in said and "; max_iters=1, all in the warm-up: lower warmup_iters=" in said
