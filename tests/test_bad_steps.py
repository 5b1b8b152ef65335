"""Steps that are not finite: skipped, explained, and too many of them end a run."""

import itertools
import math
import shutil
from unittest import mock

import pytest
import torch

import train
from fusedgpt.data import dataset
from fusedgpt.data.dataloader import DataLoader
from fusedgpt.errors import UserError
from fusedgpt.parallel import distributed
from fusedgpt.training import nonfinite
from model import GPT
from tests.conftest import assert_same_bytes, checkpoint_of, rows, run, weights


def test_a_gradient_that_is_not_finite_is_named_and_survived(tmp_path, data, capsys, monkeypatch):
    # T25
    forward, calls = GPT.forward, []

    def poisoned(self, idx, targets=None, cache=None, logits=True):
        logits, loss = forward(self, idx, targets, cache, logits)
        if self.training:
            calls.append(None)
        return logits, loss * torch.nan if len(calls) == 6 and self.training else loss  # two were rehearsals

    monkeypatch.setattr(GPT, "forward", poisoned)
    run(tmp_path, data, max_iters=5)
    losses = [row["loss"] for row in rows(tmp_path)]
    assert losses[3] is None and all(map(math.isfinite, losses[:3] + losses[4:]))  # JSON has no NaN
    said = capsys.readouterr().out
    assert "iter 3: loss nan, gradient norm nan: step skipped, weights kept" in said
    assert "iter 3: not seen again when the step is repeated eagerly: suspect" in said
    assert all(torch.isfinite(w).all() for w in weights(tmp_path).values())


def test_a_bad_batch_is_named_with_its_place_and_its_first_tensors(tmp_path, data, capsys, monkeypatch):
    loader = DataLoader(data, dataset.read_meta(data), 16, 4, 1337, torch.device("cpu"))
    bad, _ = loader.train(iteration=3, micro_step=1)
    forward = torch.nn.Embedding.forward

    def embed(self, idx):
        return forward(self, idx) * (torch.nan if torch.equal(idx, bad) else 1)

    monkeypatch.setattr(torch.nn.Embedding, "forward", embed)
    run(tmp_path, data, max_iters=5, gradient_accumulation_steps=2)
    starts = ", ".join(map(str, loader.starts(3, 1)))
    place = f"in micro-step 1, whose windows begin at tokens {starts} of train"
    tensors = "transformer.wte, transformer.drop, transformer.h.0.ln_1"
    assert f"iter 3: first in outputs: {tensors}, {place}" in capsys.readouterr().out


@pytest.mark.parametrize("error", [UserError("a process is gone"), OSError("the data are gone")])  # as over NFS
def test_another_process_gone_saves_whatever_the_unread_steps_were(tmp_path, data, monkeypatch, error):
    # explaining a bad step needs the process that is gone, which used to end the run before it saved
    step, norm, calls = train.train_step, distributed.gradient_norm, itertools.count()
    spoilt = lambda model: norm(model) * (torch.nan if next(calls) == 3 else 1)  # noqa: E731

    def dies(state, *args):
        if state.iteration == 7:
            raise error
        return step(state, *args)

    monkeypatch.setattr(distributed, "gradient_norm", spoilt)
    monkeypatch.setattr(train, "train_step", dies)
    monkeypatch.setattr(nonfinite, "explain", mock.Mock(side_effect=UserError("so is the explanation")))
    with pytest.raises(type(error), match="gone"):
        run(tmp_path, data, log_interval=100, eval_interval=100)
    assert [row["iter"] for row in rows(tmp_path)] == list(range(7))
    assert checkpoint_of(tmp_path)["iter_num"] == 7


@pytest.mark.parametrize("most", [0, 3])
def test_more_than_max_bad_steps_in_a_row_end_the_run(done, small_run, data, monkeypatch, most):
    monkeypatch.setattr(distributed, "gradient_norm", lambda model: torch.tensor(torch.nan))
    ends = rf"{most + 1} steps in a row .* iteration {10 + most}: resume from .*ckpt\.pt, of iteration 10, with"
    with pytest.raises(UserError, match=ends):
        run(done, data, max_iters=100, max_bad_steps=most, init_from="resume", eval_interval=2)
    assert_same_bytes(weights(done), weights(small_run))
    assert "<b>Running" not in (done / "report.html").read_text()  # and it reloaded for ever


@pytest.fixture
def half_precision(tmp_path, finished):
    """A copy of a run of ten steps in float16, and the options of its continuation."""
    return shutil.copytree(finished("float16"), tmp_path / "out"), dict(dtype="float16", init_from="resume")


def test_in_float16_too_a_step_that_is_said_to_be_skipped_is(half_precision, data, monkeypatch):
    # finite gradients with a norm that overflows: the scaler, which saw no infinity, used to apply them unclipped
    (out, options), norm = half_precision, torch.tensor(math.inf)
    before = weights(out)
    monkeypatch.setattr(distributed, "gradient_norm", lambda model: norm)
    run(out, data, max_iters=13, **options)
    assert_same_bytes(weights(out), before)


def test_in_float16_an_overflow_lowers_the_scale(half_precision, data):
    out, options = half_precision
    saved = checkpoint_of(out)
    saved["scaler"]["scale"] = 2.0**60
    torch.save(saved, out / "ckpt.pt")
    run(out, data, max_iters=13, **options)
    assert checkpoint_of(out)["scaler"]["scale"] == 2.0**57
