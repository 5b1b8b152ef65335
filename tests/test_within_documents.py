"""Runs whose attention stays within documents, `mask=document`: trained, resumed, evaluated, refused."""

import re

import numpy as np
import pytest
import torch

from fusedgpt.data import prepare
from tests.conftest import again, assert_same_bytes, checkpoint_of, rows, run, weights
from tests.launch import script


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """A data folder of short documents: 65 ids, and one that ends each of them, after some ten tokens."""
    folder, rng = tmp_path_factory.mktemp("stories"), np.random.default_rng(0)
    ids = np.cumsum(rng.integers(-3, 4, 23_000)) % 65
    ids[rng.random(23_000) < 0.1] = 65
    meta = dict(tokenizer="char", vocab_size=66, itos=[*(chr(33 + i) for i in range(65)), None], end_of_text=65)
    prepare.write(folder, {"train": [ids[:20_000]], "val": [ids[20_000:]]}, "stories", **meta)
    return folder


def test_a_run_within_documents_goes_on_so_and_can_be_evaluated_otherwise(tmp_path, stories, capsys):
    whole = run(tmp_path / "whole", stories, mask="document", max_iters=4)
    half = run(tmp_path / "half", stories, mask="document", max_iters=2)
    script("train.py", *again(half, "--max_iters=4"))  # as a user would
    assert_same_bytes(weights(half), weights(whole))
    within = rows(whole, "eval")[-1]["val_loss"]
    capsys.readouterr()
    for mask, differs in (("document", False), ("causal", True)):
        run(whole, stories, init_from="resume", eval_only=True, mask=mask)
        found = float(re.search(r"val loss ([\d.]+)", capsys.readouterr().out)[1])
        assert (abs(found - within) > 2e-4) == differs, mask


@pytest.mark.parametrize(("mask", "then"), [("causal", "document"), ("document", "causal")])
def test_another_mask_begins_the_best_loss_anew(tmp_path, stories, capsys, mask, then):
    # a loss across documents stayed the best of a run that had gone on within them: best.pt was never replaced
    run(tmp_path, stories, mask=mask, max_iters=2)
    saved = checkpoint_of(tmp_path) | {"best_val_loss": 0.0, "best_iter": 1}
    torch.save(saved, tmp_path / "ckpt.pt")
    capsys.readouterr()
    run(tmp_path, stories, init_from="resume", mask=then, max_iters=4, eval_interval=1)
    said = capsys.readouterr().out
    assert f"resuming with mask='{then}'; it was '{mask}'" in said
    assert "evaluations have another text, mask or windows (eval_iters x batch_size)" in said
    best = checkpoint_of(tmp_path, "best.pt")
    evaluated = {row["iter"]: row["val_loss"] for row in rows(tmp_path, "eval") if row["iter"] >= 2}
    assert best["best_val_loss"] == min(evaluated.values()) == evaluated[best["iter_num"]]


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_flex_trains_within_documents_as_manual_does(tmp_path, stories, compile):
    options = dict(n_head=1, n_embd=64, block_size=256, device="cuda", dtype="bfloat16", max_iters=30, mask="document")
    losses = {}
    for attention in ("manual", "flex"):
        torch.compiler.reset()
        losses[attention] = rows(run(tmp_path / attention, stories, attention=attention, compile=compile, **options))
    assert losses["flex"][-1]["loss"] == pytest.approx(losses["manual"][-1]["loss"], rel=0.02)
    assert losses["flex"][0]["loss"] == pytest.approx(losses["manual"][0]["loss"], rel=1e-3)
