"""A run of so many minutes: how many iterations it settles, and that it can be made again to the bit."""

import functools
import json
import math
import os
import signal
import time

import pytest
import torch

import train
from fusedgpt.errors import UserError
from fusedgpt.runs import budget, checkpoint
from tests.conftest import assert_same_bytes, checkpoint_of, hugging_face, rows, run, small, tensors, weights
from tests.faults.processes import finish, start
from tests.launch import script

NUMBERS = dict(max_iters=12, lr_decay_iters=12)


def at_most(n):
    """Let `minutes` settle no more than `n` iterations in this process, after a short timing."""
    budget.MOST_ITERATIONS, budget.LONGEST_S = n, 0.1


@pytest.fixture
def at_most_12(monkeypatch):
    for name in ("MOST_ITERATIONS", "LONGEST_S"):
        monkeypatch.setattr(budget, name, getattr(budget, name))  # as it was, after the test
    at_most(12)


def assert_same_runs(a, b):
    """Two runs ended with the same weights, optimizer and scaler, and logged the same losses."""
    ours, theirs = (checkpoint.load(folder / "ckpt.pt") for folder in (a, b))
    assert_same_bytes(tensors(ours), tensors(theirs))
    assert ours["scaler"] == theirs["scaler"] and ours["best_val_loss"] == theirs["best_val_loss"]
    assert [row["loss"] for row in rows(a)] == [row["loss"] for row in rows(b)]
    assert rows(a, "eval") == rows(b, "eval")


@pytest.mark.usefixtures("at_most_12")
@pytest.mark.parametrize(
    "settings",
    [
        dict(attention="manual"),
        dict(dropout=0.2, dtype="bfloat16"),
        dict(dropout=0.2, dtype="float16", optimizer="muon", schedule="wsd"),
        dict(init_from="pretrained", n_layer=2, dropout=0.1),
        dict(sample_interval=5, sample_prompts="!"),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_a_run_with_the_numbers_that_it_settled_is_the_same_to_the_bit(tmp_path, data, settings):
    if settings.get("init_from"):
        hugging_face(tmp_path / "hf", n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=65)
        settings = settings | dict(init_from=str(tmp_path / "hf"))
    timed = run(tmp_path / "timed", data, minutes=1.0, **settings)
    assert_same_runs(timed, run(tmp_path / "again", data, **settings, **NUMBERS))
    settled = json.loads((timed / "run.json").read_text())["settings"]
    for recorded in (settled, checkpoint_of(timed)["config"]):
        assert {name: recorded[name] for name in NUMBERS} == NUMBERS and recorded["minutes"] == 1.0
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
    timed = run(tmp_path / "timed", data, minutes=1.0)
    assert [row["steps_made"] for row in rows(timed)] == list(range(1, 13))
    steps = run(tmp_path / "again", data, **NUMBERS)
    assert_same_bytes(weights(timed), weights(steps))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_settle_one_number_and_are_the_same_to_the_bit(tmp_path, data, parallel):
    settings = dict(
        gradient_accumulation_steps=2, dropout=0.1, parallel=parallel, sample_interval=6, sample_prompts="!"
    )
    timed, again, log = tmp_path / "timed", tmp_path / "again", tmp_path / "log"
    minutes = small(timed, data, minutes=1.0, **settings)
    finish(start(minutes, log, world=2, before=functools.partial(at_most, 12)), log)
    finish(start(small(again, data, **settings, **NUMBERS), log, world=2), log)
    assert_same_runs(timed, again)
    assert log.read_text().count("minutes=1: 12 iterations") == 1


def killed_in_step(n, out_dir):
    """Let `minutes` settle 100 iterations, and SIGKILL this process in step `n` of the run that it then makes."""
    step = train.train_step
    at_most(100)

    def train_step(state, *args):
        if state.iteration == n and (out_dir / "ckpt.pt").exists():  # not while steps are timed
            os.kill(os.getpid(), signal.SIGKILL)
        return step(state, *args)

    train.train_step = train_step


def test_a_run_that_is_killed_keeps_its_numbers(tmp_path, data):
    broken, log = tmp_path / "broken", tmp_path / "log"
    # on a busy machine, fewer than 100 iterations may fit into one minute
    asked = small(broken, data, minutes=60.0, max_iters=30, dropout=0.1, init_from="auto")
    (killed,) = start(asked, log, before=functools.partial(killed_in_step, 30, broken))
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL and len(rows(broken)) < 100
    finish(start(asked, log), log)  # the same command
    said = log.read_text()
    assert said.count("minutes=60: 100 iterations of ") == 1 and "resuming with" not in said
    assert "max_iters=100 and lr_decay_iters=100, as minutes=60 settled: to take others, give --max_iters" in said
    numbers = dict(max_iters=100, lr_decay_iters=100)
    assert_same_runs(broken, run(tmp_path / "whole", data, dropout=0.1, **numbers))


@pytest.mark.usefixtures("at_most_12")
def test_a_run_goes_on_with_other_numbers_only_if_it_gives_up_its_minutes(tmp_path, data, capsys):
    timed = run(tmp_path / "timed", data, minutes=1.0)
    with pytest.raises(
        UserError, match=r"minutes=2 can only settle the length of a new run, .* max_iters=12 and .* another --out_dir"
    ):
        run(timed, data, minutes=2.0, init_from="resume")
    script("train.py", "--init_from=resume", f"--out_dir={timed}")  # nothing is left to do
    assert len(rows(timed)) == 12
    capsys.readouterr()
    run(timed, data, minutes=1.0, max_iters=20, init_from="resume")
    assert "raise --max_iters above that to train on" in capsys.readouterr().out
    script("train.py", "--init_from=resume", f"--out_dir={timed}", "--max_iters=20")
    assert len(rows(timed)) == 20
    with pytest.raises(UserError, match="give a larger --max_iters and no --minutes"):
        run(timed, data, minutes=1.0, init_from="resume")
    run(timed, data, minutes=2.0, init_from="resume", eval_only=True)  # no length matters


@pytest.mark.parametrize("every", [7, 50, 100, 10**9])
def test_steps_evaluations_and_samples_fill_the_minutes(tmp_path, data, every):
    s = small(tmp_path, data, eval_interval=every, sample_interval=20)

    def takes(n):
        evaluations = [it for it in range(n + 1) if it % every == 0 or it == n]
        samples = [it for it in range(n + 1) if it % 20 == 0 or it == n]
        return 0.5 * n + 3.0 * len(evaluations) + len(samples)

    n = budget.most_iterations(60.0, budget.Cost(0.5, 3.0, 1.0), s)
    assert takes(n) <= 60 < takes(n + 1)


def test_a_run_says_what_it_settled_and_how_to_make_it_again(tmp_path, data):
    auto = dict(dtype="auto", compile="auto", max_iters=1234, lr_decay_iters=1234, minutes=5.0, eval_interval=1000)
    record, cost = dict(dtype="bfloat16", compile=False, attention="sdpa"), budget.Cost(0.21, 1.2, 3.0)
    line = "minutes=5: 1,234 iterations of 0.21 s, and 3 evaluations of 1.2 s; the same run again: --max_iters=1234"
    line += " --lr_decay_iters=1234 --dtype=bfloat16 --compile=False"
    assert budget.decision(small(tmp_path, data, **auto), record, cost) == line
    line = budget.decision(small(tmp_path, data, **auto, sample_interval=2000), record, cost)
    assert ", and 2 rounds of samples of 3 s; the same" in line


@pytest.mark.usefixtures("at_most_12")
@pytest.mark.parametrize("warmup_iters", [11, 12, 23])
def test_a_run_that_would_never_leave_its_warm_up_says_so(tmp_path, data, capsys, warmup_iters):
    run(tmp_path, data, minutes=1.0, warmup_iters=warmup_iters, learning_rate=1.0)
    said = "warmup_iters=23 is not below max_iters=12: the learning rate rises to 50 % of its peak, and never falls"
    printed = capsys.readouterr().out
    assert ("is not below" in printed) == (warmup_iters > 11) and (said in printed) == (warmup_iters == 23)
    rates = [row["lr"] for row in rows(tmp_path)]
    assert (max(rates) < 1) == (warmup_iters > 11)


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
    assert "minutes=1e-06: 1 iteration of" in said and "minutes=1e-06 is too short: starting took " in said


def test_a_run_takes_about_its_minutes(tmp_path, data):
    began = time.perf_counter()
    run(tmp_path, data, minutes=0.05, eval_interval=100, dropout=0.1)
    assert 1 < time.perf_counter() - began < 12  # 3 s, on a machine whose load may change meanwhile
    assert len(rows(tmp_path)) > 1


@pytest.mark.usefixtures("at_most_12")
@pytest.mark.parametrize(
    ("factor", "said"), [(1.3, "minutes, 30 % more, because"), (0.7, "minutes, 30 % less, because"), (1.1, None)]
)
def test_a_run_that_missed_its_minutes_says_by_how_much(tmp_path, data, capsys, monkeypatch, factor, said):
    # load that came after the timing made a run late, and nothing said so
    clock, tell = time.perf_counter, budget.say_if_missed

    def later(run, began):
        monkeypatch.setattr(time, "perf_counter", lambda: began + factor * 60)
        tell(run, began)
        monkeypatch.setattr(time, "perf_counter", clock)

    monkeypatch.setattr(budget, "say_if_missed", later)
    run(tmp_path, data, minutes=1.0)
    last = capsys.readouterr().out.splitlines()[-1]
    assert (f"minutes=1: the run took {factor} {said}" in last) if said else last.startswith("ms per iteration")
    run(tmp_path, data, minutes=1.0, init_from="resume")  # its time is only a part of the whole
    assert "the run took" not in capsys.readouterr().out


def test_a_dry_run_says_what_would_be_settled_and_writes_nothing(tmp_path, data, capsys):
    run(tmp_path / "out", data, minutes=0.05, dry_run=True)
    said = capsys.readouterr().out
    n = said.split("--max_iters=")[1].split()[0]
    assert f"minutes=0.05: {int(n):,} iteration" in said and f": {n} steps of " in said
    assert not (tmp_path / "out").exists()


def test_peak_memory_leaves_the_timing_out(tmp_path, data, monkeypatch):
    order = []
    for module, name in ((budget, "_evaluation_s"), (train.memory, "reset_peak_memory"), (train, "training_loop")):
        call = getattr(module, name)
        noted = lambda *args, call=call, name=name: order.append(name) or call(*args)  # noqa: E731
        monkeypatch.setattr(module, name, noted)
    run(tmp_path, data, minutes=1e-6)
    assert order == ["_evaluation_s", "reset_peak_memory", "training_loop"]


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.nan, math.inf])
def test_minutes_that_no_run_can_take_are_refused(tmp_path, data, minutes):
    with pytest.raises(UserError, match=f"minutes={minutes} must be more than 0, and finite"):
        run(tmp_path, data, minutes=minutes)
