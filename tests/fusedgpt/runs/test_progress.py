"""What a run says about itself, and how long it will take."""

import dataclasses
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from fusedgpt.runs import progress
from fusedgpt.runs.run import Run
from fusedgpt.settings import Settings
from fusedgpt.training import evaluation
from tests.conftest import checkpoint_of, flags, run, small
from tests.launch import script


def test_a_pipe_gets_whole_lines_and_no_bar(tmp_path, data):
    # lines were broken at the COLUMNS of the environment, or at 80; and how long a run takes stood in the bar alone
    s = small(tmp_path, data, max_iters=20, log_interval=100, sample_prompts="def \n")
    done = script("train.py", *flags(s), COLUMNS="40")
    said, lines = done.stdout.splitlines(), progress.settings_lines(s)
    assert said[: len(lines)] == lines and max(map(len, lines)) > 80
    text = "\n".join(lines)
    assert "block_size=16, n_layer=2" in text and "beta1" not in text  # only what is not the default
    assert "sample_prompts='def \\n'" in text  # a line end would look like another line
    assert progress.settings_lines(Settings()) == ["settings other than the defaults:", "  none"]
    assert "\r" not in done.stdout and done.stderr == ""
    assert sum("estimate: " in line for line in said) == 1  # after a few steps, even if none of them has a line


def test_a_run_says_how_often_it_reads_its_text():
    s = Settings(max_iters=600, gradient_accumulation_steps=2, batch_size=8, block_size=128)
    said = "the training text has 350,000 tokens; the run reads it 3.51 times"
    assert progress.reading_line(s, 350_000, 660_000) == said


def test_a_run_that_will_learn_its_text_by_heart_says_so():
    # without dropout, 20 kB of characters, read 23 times, ended at 3.7 bits per byte in place of 2.8
    s = Settings(max_iters=200, gradient_accumulation_steps=1, batch_size=16, block_size=128)
    words = "too often without"
    assert progress.reading_line(s, 18_000, 402_176).endswith("reads it 22.8 times: too often without --dropout=0.2")
    assert words not in progress.reading_line(dataclasses.replace(s, dropout=0.2), 18_000, 402_176)
    assert words not in progress.reading_line(dataclasses.replace(s, max_iters=80), 18_000, 402_176)
    assert words not in progress.reading_line(s, 18_000, 17_000)  # as GPT-2 on OpenWebText, which reads it 33 times


def rows(val, train):
    return [{"iter": 100 * n, "train_loss": b, "val_loss": a} for n, (a, b) in enumerate(zip(val, train))]


def lesson(val, train):
    return "".join(progress.lesson(rows(val, train)))


OVERFITTED = [4.9, 4.2, 4.09, 4.1, 4.13, 4.15], [4.8, 4.0, 3.6, 3.2, 2.9, 2.7]


def test_a_run_that_overfits_says_so():
    # three times the iterations ended at a higher loss, and not a word was said
    assert lesson(*OVERFITTED) == (
        "the lowest validation loss was 4.0900, at iteration 200. Since then it rose to 4.1500, and the training loss"
        " fell from 3.6000 to 2.7000: the run overfits. Fewer steps, --dropout=0.2 or more text help;"
        " sample.py takes best.pt"
    )
    assert "overfits" not in lesson(*(losses[:4] for losses in OVERFITTED))  # it rose once, and by little
    assert not progress.overfits(rows(*OVERFITTED), last=5)  # it did for 3 evaluations
    assert lesson([3.0], [3.0]) == "" == lesson([None, 3.0], [3.0, 3.0])


def test_noise_is_not_taken_for_overfitting():
    # 1,000 runs whose loss falls to a plateau, with noise of half a per cent at each of 12 evaluations
    random, steps = np.random.default_rng(0), np.arange(12)
    curves = 2 + np.exp(-steps / 2) + 0.01 * random.standard_normal((1000, 2, 12))
    flat = [rows(val.tolist(), (train - 0.005 * steps).tolist()) for val, train in curves]
    assert sum(map(progress.overfits, flat)) < 50
    assert sum(any(progress.overfits(each[:n], last=5) for n in steps[1:]) for each in flat) < 50  # by patience
    rising = curves + np.array([0.02, -0.04])[:, None] * np.maximum(0, steps - 5)
    assert sum("overfits" in lesson(val.tolist(), train.tolist()) for val, train in rising) > 950


def test_patience_ends_a_run_that_overfits(tmp_path, data, monkeypatch, capsys):
    losses = iter(zip(*OVERFITTED))
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: dict(zip(("val_loss", "train_loss"), next(losses))))
    run(tmp_path, data, max_iters=10, eval_interval=1, patience=2)
    assert "the run overfits, and patience=2 ended it. Fewer" in capsys.readouterr().out
    assert checkpoint_of(tmp_path)["iter_num"] == 5  # and not 4, where the rise was below a per cent


@pytest.mark.parametrize(
    ("done", "evaluation_s", "changes", "begins", "ends"),
    [
        (10, 60.0, {}, "7 min", "90 steps of 2 s, and 4 evaluations of 60 s"),  # at 30, 60, 90, 100
        (30, 60.0, {}, "6.33 min", "70 steps of 2 s, and 4 evaluations of 60 s"),  # the one at 30 is still to come
        (99, 60.0, {}, "62 s", "1 step of 2 s, and 1 evaluation of 60 s"),
        # a resumed run said that its evaluations take 0 s before its first evaluation
        (0, 0.0, {}, "3.33 min", "100 steps of 2 s, and 5 evaluations, not timed yet"),
        (0, 1.0, dict(max_iters=10**12, eval_interval=0), "2.31e+07 days", "1,000,000,000,000 steps of 2 s"),
        (1, 1.0, dict(sample_interval=50), "6.7 min", "4 evaluations of 1 s, and 2 samplings of 100 s"),
    ],
)
def test_the_estimate_counts_what_is_left(tmp_path, data, done, evaluation_s, changes, begins, ends):
    s = small(tmp_path, data, **dict(max_iters=100, eval_interval=30) | changes)
    line = progress.Cost.of([9e4] * 3 + [2e3] * 3, evaluation_s, 100.0).estimate(done, s)
    assert line.startswith(f"estimate: {begins}, until ") and line.endswith(ends)


@pytest.mark.parametrize(
    ("done", "reported"), [(4, False), (8, True), (50, True), (51, True), (99, False), (100, True)]
)
def test_a_step_is_reported_for_a_line_a_sample_an_evaluation_or_the_end(tmp_path, data, done, reported):
    s = small(tmp_path, data, max_iters=100, eval_interval=50, log_interval=50, sample_interval=8)
    assert progress.is_reported(done, s) == reported


def test_after_the_last_step_nothing_is_estimated_and_the_times_say_of_how_many_steps_they_are(tmp_path, data, capsys):
    # the estimate was of "0 steps", and the p10 and p90 of a single step looked like those of many
    run(tmp_path, data, max_iters=progress.STEPS_OF_AN_ESTIMATE, log_interval=100, lr_decay_iters=6)
    said = capsys.readouterr().out
    assert "estimate: " not in said and re.search(r"ms per iteration: median .*, of 1 step after the first", said)


def test_mfu_is_a_share_of_the_peak_of_all_devices():
    # of one alone, a run on 8 devices would use 8 times its share
    steps = [{"lr": 0.1, "loss": 2.0, "grad_norm": 1.0}], set()
    device = SimpleNamespace(read=lambda: [100.0], device=torch.device("cpu"))
    state = SimpleNamespace(clock=device, results=SimpleNamespace(read=lambda: steps), step_ms=[], iteration=1)
    state.evaluation_s = state.samples_s = 0.0
    record = {"tokens_per_step": 1000, "mfu": {"flops_per_token": 1e6, "peak_flops": 1e12}, "world_size": 8}
    logger = mock.MagicMock()
    run = Run(Settings(), state, None, range(1), None, {}, None, mock.Mock(), logger, record)
    run.report()
    ((metrics,), _) = logger.iteration.call_args
    assert metrics["tokens_per_s"] == 10_000 and metrics["mfu"] == pytest.approx(1e10 / 8e12)
