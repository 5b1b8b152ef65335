"""Samples of a run while it trains."""

import signal

import pytest
import torch

from fusedgpt.errors import UserError
from fusedgpt.training import evaluation, samples
from fusedgpt.training.samples import Prompts
from tests.conftest import LLAMA, assert_same_bytes, rows, run, weights

META = {"tokenizer": "char", "vocab_size": 65, "itos": [chr(33 + i) for i in range(65)]}


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """A sample has 20 tokens, more than a window."""
    monkeypatch.setattr(samples, "NEW_TOKENS", 20)


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["GPT-2", "Llama"])
def test_samples_are_logged_and_change_nothing_else(tmp_path, data, family):
    # a model that stayed in evaluation, or drew for a sample from a stream of training, would take other steps
    settings = dict(max_iters=5, dropout=0.2, **family)
    run(tmp_path / "without", data, **settings)
    # a byte order mark, as Notepad writes it, was a part of the first prompt
    (tmp_path / "prompts.txt").write_text("!!\n#$%\n", encoding="utf-8-sig")
    run(tmp_path / "with", data, **settings, sample_interval=3, sample_prompts=f"FILE:{tmp_path / 'prompts.txt'}")
    found = rows(tmp_path / "with", "sample")
    assert [(row["iter"], row["prompt"]) for row in found] == [(n, p) for n in (0, 3, 5) for p in ("!!", "#$%")]
    assert all(len(row["text"]) == 20 for row in found)
    assert found[0]["text"] != found[-2]["text"]
    assert_same_bytes(weights(tmp_path / "with"), weights(tmp_path / "without"))


def test_a_sample_that_ends_within_a_character_loses_no_byte(monkeypatch):
    drawn = torch.tensor([*"a漢".encode()[:-1]])
    monkeypatch.setattr(samples.generate, "new_tokens", lambda *_: drawn)
    prompts = Prompts("a", {"tokenizer": "byte", "vocab_size": 256})
    assert prompts._continued(None, [0], torch.device("cpu"), seed=0) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("where", ["evaluate", "sample"])
@pytest.mark.parametrize("at", [1, 2])  # in the middle, and at the end
def test_a_signal_around_an_evaluation_loses_no_sample(tmp_path, data, monkeypatch, where, at):
    # the run left after one more step, and that round of samples was never drawn: 6 of 6
    module, calls = {"evaluate": evaluation, "sample": samples.Prompts}[where], []
    plain = getattr(module, where)

    def stopped(*args):
        calls.append(plain(*args))
        if len(calls) == at + 1:
            signal.raise_signal(signal.SIGTERM)
        return calls[-1]

    how = dict(max_iters=4, eval_interval=2, sample_interval=2, sample_prompts="!")
    whole = run(tmp_path / "whole", data, **how)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        patch.setattr(module, where, stopped)
        run(tmp_path / "out", data, **how)
    run(tmp_path / "out", data, **how, init_from="resume")
    for kind in ("sample", "eval"):
        assert rows(tmp_path / "out", kind) == rows(whole, kind)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "has no prompt"),
        ("ä", "--sample_prompts='ä' cannot be used: the training text has no 'ä'"),  # who gave none has the default
    ],
)
def test_prompts_that_cannot_be_used_are_one_sentence(prompts, message):
    with pytest.raises(UserError, match=message):
        Prompts(prompts, META)
