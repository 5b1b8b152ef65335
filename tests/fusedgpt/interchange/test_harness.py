"""What the model in training answers lm_eval, beside lm_eval's own model on the export."""

import contextlib
from unittest import mock

import numpy as np
import pytest
import torch

from fusedgpt.data import prepare
from fusedgpt.parallel.distributed import Ranks
from model import GPT
from tests.conftest import checkpoint_of, flags, rows, small
from tests.launch import ranks

BYTES = {"tokenizer": "byte", "vocab_size": 256}


def test_answers_are_those_of_transformers(exported, monkeypatch):
    # padding to the right, a context beyond block_size, a continuation of one id, and one that fills the context
    harness = pytest.importorskip("fusedgpt.interchange.harness")
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr(harness, "TaskManager", mock.MagicMock())  # reads thousands of files
    theirs = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=1, prefix_token_id=10)
    model = GPT.from_pretrained(exported)
    ours = harness.Scorer("none", model, contextlib.nullcontext(), BYTES, Ranks(), batch_size=24)
    S, text = model.config.block_size, [n * n % 65 for n in range(99)]
    requests = [(None, text[:a], text[a : a + b]) for a, b in ((3, 9), (S + 5, 2), (1, S))]
    greedy = model.eval().generate(torch.tensor([text[:4]]), 3, temperature=0)[0, 4:].tolist()
    requests += [(None, text[:4], greedy), (None, text[:4], greedy[:1])]
    want = theirs._loglikelihood_tokens([(("", str(n)), *each[1:]) for n, each in enumerate(requests)])
    found = ours._loglikelihood_tokens(requests)
    assert [each[0] for each in found] == pytest.approx([each[0] for each in want], rel=1e-4)
    assert [each[1] for each in found] == [each[1] for each in want] and found[-1][1]
    # of an answer longer than block_size only the end was scored, and two of one end were equal; lm_eval refuses it
    parts = [(None, text[:at], text[at : at + S]) for at in (4, 4 + S, 4 + 2 * S)]
    (whole,) = ours._loglikelihood_tokens([(None, text[:4], text[4 : 4 + 3 * S])])
    assert whole[0] == pytest.approx(sum(each[0] for each in ours._loglikelihood_tokens(parts)), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_two_ranks_logs_the_scores_of_its_model(tmp_path):
    # python_code is one text, which cannot be divided
    harness, ids = pytest.importorskip("fusedgpt.interchange.harness"), np.arange(30000, dtype=np.uint8)
    prepare.write(tmp_path / "data", {"train": [ids[:9000]], "val": [ids[9000:]]}, "model.py", "byte", 256)
    for tasks in ("sonnets", "sonnets, python_code"):
        s = small(tmp_path / tasks, tmp_path / "data", eval_tasks=tasks, max_iters=2, gradient_accumulation_steps=2)
        ranks(2, "train.py", *flags(s))
        model = GPT.from_checkpoint(checkpoint_of(s.out_dir))
        scorer = harness.Scorer(tasks, model, contextlib.nullcontext(), BYTES, Ranks(), batch_size=8)
        assert scorer.scores([15]) is None  # a signal has come
        scores = scorer.scores(())
        (*_, row) = rows(s.out_dir, "score")
        assert row.pop("kind") and len(row) > 2 and row == pytest.approx(scores | {"iter": 2}, rel=1e-5)
