"""Reading what a run left, for figures."""

import json
import math

import numpy as np
import pytest

from fusedgpt.errors import UserError
from fusedgpt.runs.metrics import Line, LoggedRun, above, losses_at, read_metrics, thinned, view


def run_of(folder, lines, **record):
    """The run of a folder with these `lines` in metrics.jsonl (texts as they are) and this run.json."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    (folder / "run.json").write_text(json.dumps(record))
    return LoggedRun(folder)


def step(n, loss=2.0, **more):
    return {"kind": "train", "iter": n, "loss": loss, **more}


def evaluation(n, loss=2.0, **more):
    return {"kind": "eval", "iter": n, "train_loss": loss, "val_loss": loss, **more}


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    sample = {"kind": "sample", "iter": 3, "prompt": "a", "text": "b"}
    run = run_of(tmp_path, ['{"kind": "train", "iter": 1', step(4, loss=2.5, lr=None), sample, {}, '{"kind": "tr'])
    assert run.train["iter"].tolist() == [4] and run.train["loss"].tolist() == [2.5]
    assert np.isnan(run.train["lr"]).all() and np.isnan(run.train["ms"]).all()
    assert run.samples == [sample] == read_metrics(tmp_path, "sample")
    with pytest.raises(UserError, match="name the folder of a run"):
        LoggedRun(tmp_path / "nowhere")


def test_losses_are_those_of_the_iteration(tmp_path):
    run_of(tmp_path, [step(5), evaluation(5, 3.0), evaluation(6, 2.0, val_bits_per_byte=1.25), evaluation(7, None)])
    assert losses_at(tmp_path, 5) == {"validation loss": "3.0000"}
    assert losses_at(tmp_path, 6) == {"validation loss": "2.0000", "validation bits per byte": "1.2500"}
    assert losses_at(tmp_path, 7) == losses_at(tmp_path, 8) == losses_at(tmp_path / "nowhere", 5) == {}


def test_what_some_steps_return_is_a_line_of_those_steps(tmp_path):
    # its figure was empty, and pages said that it was not finite
    lines = [step(0, probe=1.0), step(1), step(2, probe=None), step(3), step(4, probe=3.0), step(5)]
    (line,) = run_of(tmp_path, lines[::-1]).lines("probe")
    assert line.iters.tolist() == [0, 4] and line.values.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, None])
def test_run_json_may_be_damaged(tmp_path, text):
    run_of(tmp_path, [step(0)])
    (tmp_path / "run.json").unlink() if text is None else (tmp_path / "run.json").write_text(text)
    assert LoggedRun(tmp_path).record == {} and np.isnan(LoggedRun(tmp_path).position(np.zeros(1), "tokens")).all()


def test_an_axis_of_tokens_or_time_says_what_was_done_before_a_step(tmp_path):
    # iteration n is after n steps: its loss is that of weights which have seen n steps
    run = run_of(tmp_path, [step(0, ms=1000), step(1, ms=None), step(2, ms=3000)], tokens_per_step=8)
    iters = np.array([0, 1, 2, 3])
    assert run.position(iters, "iterations").tolist() == [0, 1, 2, 3]
    assert run.position(iters, "tokens").tolist() == [0, 8, 16, 24]
    assert run.position(iters, "time").tolist() == [0, 1, 1, 4]
    assert run_of(tmp_path, [evaluation(0)]).position(np.zeros(1), "time").tolist() == [0]
    # a copied checkpoint went on: a run from iteration 1000 was drawn as if it had seen no token before
    branch = run_of(tmp_path, [step(1000), step(1003)], tokens_per_step=8)
    assert branch.position(np.array([0, 1000, 1001, 1002, 1004]), "tokens").tolist() == [0, 8000, 8008, 8016, 8032]


def test_bits_per_byte_of_training_steps_follow_from_the_evaluations(tmp_path):
    ratio = 1 / math.log(2) / 4  # a token of four bytes
    told = dict(train_bits_per_byte=3.0 * ratio, val_bits_per_byte=0.75)
    run = run_of(tmp_path, [evaluation(0, None), evaluation(1, 0.0), evaluation(2, 3.0, **told), step(2, 2.0)])
    training, validation = run.lines("bits_per_byte")
    assert training.values == pytest.approx([2.0 * ratio])
    assert validation.values[-1] == 0.75 and np.isnan(validation.values[:-1]).all()
    assert math.isnan(run_of(tmp_path, [evaluation(0), step(1)]).bits_per_byte_of_a_nat)


def test_the_first_steps_and_a_spike_leave_the_view():
    # the loss falls from 10.8 to 6 in the first steps, then from 3.4 to 3.3: an axis with all of it shows nothing
    iters = np.arange(1000.0)
    loss = 3.3 + 0.1 * (1 - iters / 1000) + 7.4 * np.exp(-iters / 20)
    loss[500], loss[700] = 40.0, np.nan
    validation = Line("validation", iters[::250], loss[::250])
    low, high = view([Line("training", iters, loss), Line("validation", iters[[0, 250]], loss[[0, 250]])], "loss")
    assert 3.2 < low < 3.3 and 3.4 < high < 3.6
    assert above([validation], (low, high)) == 40 and above([validation], (0, 41)) is None  # a figure says so
    assert view([validation], "loss")[1] > 40  # no evaluation is cut off
    assert view([Line("training", iters[:10], loss[:10])], "loss")[1] > 10.8  # a short run is shown whole
    assert view([Line("training", iters, np.full(1000, np.nan))], "loss") == (0, 1)
    assert view([Line("training", iters, 0 * iters)], "memory") == (0, 1)
    assert view([Line("training", iters, 5.0 + 0 * iters)], "tokens_per_s")[0] == 0  # ratios are compared by heights
    assert view([], "loss") == (0, 1)


@pytest.mark.parametrize("count", [1, 2, 1000, 1001, 1999, 10_007])
def test_thinned_values_keep_the_extremes_and_a_gap_where_there_was_one(count):
    values = np.random.default_rng(0).normal(size=count)
    if count > 1000:
        values[count // 3 : count // 2] = np.nan
        values[count // 4], values[count // 5], values[count - 7] = 99.0, -99.0, np.nan
    kept = thinned(values)
    assert (np.diff(kept) > 0).all() and kept[0] == 0 and kept[-1] == count - 1 and len(kept) <= 1500
    assert np.nanmin(values[kept]) == np.nanmin(values) and np.nanmax(values[kept]) == np.nanmax(values)
    if count > 1000:
        assert np.isnan(values[kept]).any() and count - 7 in kept
    assert len(thinned(np.full(count, np.nan))) <= 1500
