"""Runs whose attention stays within documents, `mask=document`: trained, resumed, evaluated, refused."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from fusedgpt.data import prepare
from fusedgpt.errors import UserError
from tests.conftest import assert_same_bytes, checkpoint_of, rows, run, weights
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
    script(
        "train.py", *["--init_from=resume", f"--out_dir={half}", f"--dataset={stories}", "--max_iters=4"]
    )  # as a user would
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
    assert "evaluations have another text, mask or windows than before" in said
    best = checkpoint_of(tmp_path, "best.pt")
    evaluated = {row["iter"]: row["val_loss"] for row in rows(tmp_path, "eval") if row["iter"] >= 2}
    assert best["best_val_loss"] == min(evaluated.values()) == evaluated[best["iter_num"]]


def test_documents_that_end_with_another_id_are_refused(tmp_path, stories):
    # the data's id replaced the one that the weights were trained with, in silence
    run(tmp_path / "out", stories, mask="document", max_iters=1)
    other = shutil.copytree(stories, tmp_path / "data")
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"end_of_text": 64}))
    with pytest.raises(UserError, match="begin with the id 65, but in the data documents end with the id 64"):
        run(tmp_path / "out", other, mask="document", init_from="resume")
    run(tmp_path / "out", other, mask="causal", init_from="resume", max_iters=2)
