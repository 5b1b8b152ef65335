"""Ids to text and back."""

import pytest

from fusedgpt import tokenizer
from fusedgpt.errors import UserError
from fusedgpt.tokenizer import GPT2, Tokenizer
from tests.conftest import why_no_bpe

TEXT = "def f(x):\n    return 'é漢🙂'\n"


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2"])
def test_text_survives_the_round_trip(kind):
    if kind == "gpt2" and (reason := why_no_bpe()):
        pytest.skip(reason)
    meta = {
        "byte": {"vocab_size": 256},
        "char": {"vocab_size": len(set(TEXT)), "itos": sorted(set(TEXT))},
        "gpt2": GPT2,
    }[kind]
    one = Tokenizer({**meta, "tokenizer": kind})
    ids = one.encode(TEXT)
    assert b"".join(one.decode([i]) for i in ids).decode() == TEXT
    assert one.decode(ids).decode() == TEXT


def test_gpt2s_end_of_text_is_one_id():
    if reason := why_no_bpe():
        pytest.skip(reason)
    assert Tokenizer(GPT2).encode("<|endoftext|>") == [50256]


def test_an_unknown_character_is_named():
    with pytest.raises(UserError, match="the training text has no 'z'"):
        Tokenizer({"tokenizer": "char", "vocab_size": 2, "itos": ["a", "b"]}).encode("abz")


def test_missing_bpe_files_are_one_sentence(monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("no network")

    tokenizer.gpt2_bpe.cache_clear()
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        tokenizer.gpt2_bpe()
