"""Ids to text and back, and the metas that say how."""

import json
import os
import pickle

import pytest

from parts import tokens
from parts.errors import UserError
from parts.tokens import Tokenizer

TEXT = "def f(x):\n    return 'é漢🙂'\n"


def bpe_is_here():
    try:
        tokens.gpt2_bpe()
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2"])
def test_text_survives_the_round_trip(kind):
    if kind == "gpt2" and (reason := bpe_is_here()):
        pytest.skip(reason)
    meta = {"byte": {"vocab_size": 256}, "char": {"vocab_size": 9, "itos": sorted(set(TEXT))}, "gpt2": tokens.GPT2}[
        kind
    ]
    tokenizer = Tokenizer({**meta, "tokenizer": kind})
    ids = tokenizer.encode(TEXT)
    assert b"".join(tokenizer.decode([i]) for i in ids).decode() == TEXT
    assert tokenizer.decode(ids).decode() == TEXT


def test_gpt2s_end_of_text_is_one_id():
    if reason := bpe_is_here():
        pytest.skip(reason)
    assert Tokenizer(tokens.GPT2).encode("<|endoftext|>") == [50256]


def test_an_unknown_character_is_named():
    with pytest.raises(UserError, match="the training text has no 'z'"):
        Tokenizer({"tokenizer": "char", "vocab_size": 2, "itos": ["a", "b"]}).encode("abz")


def test_nanogpts_meta_pkl_is_read(tmp_path):
    itos = dict(enumerate("abc"))
    meta = {"vocab_size": 3, "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert Tokenizer(tokens.read_meta(tmp_path)).encode("cab") == [2, 0, 1]


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_a_meta_pkl_runs_no_code(tmp_path, monkeypatch):
    # T14: a pickle can run anything
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": {0: "a"}, "stoi": Evil()}))
    with pytest.raises(UserError, match="which is code"):
        tokens.read_meta(tmp_path)
    assert not (tmp_path / "pwned").exists()
    (tmp_path / "meta.pkl").write_bytes(b"garbage")
    with pytest.raises(UserError, match=r"no nanoGPT meta\.pkl"):
        tokens.read_meta(tmp_path)


def test_without_a_meta_it_is_gpt2s(tmp_path):
    assert tokens.read_meta(tmp_path) == tokens.GPT2


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"tokenizer": "word", "vocab_size": 5})])
def test_a_damaged_meta_is_named(tmp_path, text):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(UserError, match=r"meta\.json|'word'"):
        tokens.read_meta(tmp_path)


def test_missing_bpe_files_are_one_sentence(monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("no network")

    tokens.gpt2_bpe.cache_clear()
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        tokens.gpt2_bpe()
