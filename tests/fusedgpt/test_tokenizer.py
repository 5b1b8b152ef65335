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


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ([], "meta is a list"),
        ({"tokenizer": "char", "vocab_size": 2}, "itos must be a list of vocab_size=2 characters, got None"),
        ({"tokenizer": "char", "vocab_size": 2, "itos": ["a"]}, "itos must be a list"),
        ({"tokenizer": "char", "vocab_size": 2, "itos": ["a", 5]}, "characters of UTF-8 or null, got 5 for id 1"),
        ({"tokenizer": "char", "vocab_size": 1, "itos": ["\ud800"]}, r"got '\\ud800' for id 0"),
        ({"tokenizer": "byte", "vocab_size": 10**30}, "vocab_size=1000.* must be a whole number from 1"),
        ({"tokenizer": "byte", "vocab_size": 10**5000}, "vocab_size=<int> must be"),
        ({"tokenizer": "byte", "vocab_size": 0}, "vocab_size=0 must be"),
        ({"tokenizer": "byte", "vocab_size": -1}, "vocab_size=-1 must be"),
        ({"tokenizer": "byte", "vocab_size": True}, "vocab_size=True must be"),
        ({"tokenizer": ["char"], "vocab_size": 5}, "tokenizer .* is unknown"),
        ({"vocab_size": 5}, "tokenizer None is unknown"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_a_damaged_meta_is_one_sentence(meta, message):
    # each of these used to be a KeyError, a TypeError, a UnicodeEncodeError, or memory without end
    with pytest.raises(UserError, match=message):
        Tokenizer(meta)


def test_a_prompt_that_is_no_utf8_is_one_sentence():
    with pytest.raises(UserError, match=r"the prompt 'a\\udcff' cannot be written in UTF-8: change --start"):
        Tokenizer({"tokenizer": "byte", "vocab_size": 256}).encode("a\udcff")


def test_bytes_are_256_in_a_padded_vocabulary_too():
    # ids from 256 on used to be drawn, and then to end in a ValueError
    assert Tokenizer({"tokenizer": "byte", "vocab_size": 320}).vocab_size == 256
