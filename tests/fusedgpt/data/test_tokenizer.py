"""Ids to text and back."""

import contextlib
import functools
import json
import pickle

import numpy as np
import pytest

from fusedgpt.data import encoding, tokenizer
from fusedgpt.data.tokenizer import GPT2, Tokenizer
from fusedgpt.errors import UserError
from fusedgpt.interchange import tokenizer_json
from tests.conftest import why_no_bpe

KINDS = ("gpt2", "char", "byte", "json")
TEXT = "def f(x):\n    return 'é漢🙂'\n"


@functools.cache
def trained_bpe():
    """The tokenizer.json of a byte-level BPE of 300 ids, trained by the library."""
    import tokenizers

    bpe, text = tokenizers.ByteLevelBPETokenizer(), ["def f(x): return x + x if x else f(x)"] * 9
    bpe.train_from_iterator(text, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    return json.loads(bpe.to_str())


def meta_of(kind):
    if kind == "gpt2" and (reason := why_no_bpe()):
        pytest.skip(reason)
    itos = [*sorted(set(TEXT)), "<|endoftext|>"]
    return {"tokenizer": kind} | {
        "byte": {"vocab_size": 257, "end_of_text": 256},
        "char": {"vocab_size": len(itos), "itos": itos, "end_of_text": len(itos) - 1},
        "gpt2": GPT2,
        "json": {"vocab_size": 300, "tokenizer_json": trained_bpe(), "end_of_text": 0},
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_text_survives_the_round_trip(kind):
    one = Tokenizer(meta_of(kind))
    ids = one.encode(TEXT)
    assert b"".join(one.decode([i]) for i in ids).decode() == TEXT
    assert one.decode(ids).decode() == TEXT
    # fsdp ranks are sent the tokenizer, so it must not hold each thread's encodings, which cannot be pickled
    assert pickle.loads(pickle.dumps(one)).encode(TEXT) == ids
    # bits per byte depend on lengths; half of a character counts its bytes, not those of a replacement
    lengths = one.byte_lengths()
    assert len(lengths) == one.vocab_size and lengths[one.end_of_text] == 0
    assert lengths[one.encode(f"{TEXT}<|endoftext|>{TEXT}")].sum() == 2 * len(TEXT.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_text_is_one_id_in_a_prompt_and_text_in_a_text(kind):
    one = Tokenizer(meta_of(kind))
    ids = one.encode(f"{TEXT}<|endoftext|>{TEXT}")
    assert ids == [*one.encode(TEXT), one.end_of_text, *one.encode(TEXT)]
    assert one.decode([one.end_of_text]) == b"<|endoftext|>"
    if kind != "char":  # which has no '<' here
        assert one.end_of_text not in (ids := one.encode_text("a<|endoftext|>").tolist())
        assert one.decode(ids) == b"a<|endoftext|>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [(), ("a<|endoftext|>b",), ("<|endoftext|><|endoftext|>", "<|endof")])
def test_the_ids_of_texts_that_are_encoded_together_are_those_of_each(kind, more):
    # tiktoken gets them as one text: spaces at their edges must not join, and a text may contain the separator
    texts = [TEXT, "", " ", "  \n", "x", " x", "<|", "|>", "", *more, TEXT * 9, ""]
    meta = meta_of(kind)
    if kind == "char":
        meta["itos"] = [*sorted(set("".join(texts))), "<|endoftext|>"]
        meta["vocab_size"] = len(meta["itos"])
        meta["end_of_text"] = meta["vocab_size"] - 1
    one = Tokenizer(meta)
    ids, ends = one.encode_texts(texts)
    assert [part.tolist() for part in np.split(ids, ends)[:-1]] == [one.encode_text(text).tolist() for text in texts]
    assert len(ids) == ends[-1]


def test_an_id_that_only_pads_has_no_text():
    meta_of("gpt2")  # skips without tiktoken's files
    padded = Tokenizer(GPT2 | {"vocab_size": 50304})  # T15: the first id without text that was drawn ended sampling
    assert padded.decode([0, 50303]).decode() == "!\ufffd"


def test_what_a_prompt_cannot_have_is_named():
    with pytest.raises(UserError, match=r"text has no 'c', ('.', ){5}\.\.\.: change"):  # all were 10 kB of characters
        Tokenizer({"tokenizer": "char", "vocab_size": 2, "itos": ["a", "b"]}).encode("".join(map(chr, range(97, 999))))
    with pytest.raises(UserError, match=r"the prompt 'a\\udcff' cannot be written in UTF-8: change it"):
        Tokenizer({"tokenizer": "byte", "vocab_size": 256}).encode("a\udcff")


def test_missing_bpe_files_are_one_sentence(monkeypatch):
    import tiktoken

    tokenizer.tiktoken_bpe.cache_clear()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: (_ for _ in ()).throw(ConnectionError("no network")))
    with pytest.raises(UserError, match=r"^cannot load the BPE files .*TIKTOKEN_CACHE_DIR"):
        Tokenizer(tokenizer.GPT2).encode("a")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ([], "vocab_size=None must be a whole number"),
        ({"tokenizer": "char", "vocab_size": 2, "itos": ["a"]}, "itos must be a list of 2 characters"),
        ({"tokenizer": ["char"], "vocab_size": 5}, "tokenizer .* is unknown: it can be .*'?o200k_base"),
        ({"tokenizer": "byte", "vocab_size": 257, "end_of_text": 257}, "end_of_text=257 must be an id below 257"),
    ],
)
def test_a_damaged_meta_is_one_sentence(meta, message):
    # each of these used to be a KeyError, a TypeError, a UnicodeEncodeError, or memory without end
    with pytest.raises(UserError, match=message):
        Tokenizer(meta)


ENDLESS = {"type": "Split", "pattern": {"Regex": "(x+x+)+y|(.*)*b"}, "behavior": "Isolated", "invert": False}
HOSTILE = {
    "no ids": {"model": trained_bpe()["model"] | {"vocab": {}, "merges": []}, "added_tokens": []},
    "a prefix longer than a token": {"model": trained_bpe()["model"] | {"continuing_subword_prefix": "#" * 50}},
    "a pattern without end": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [ENDLESS, trained_bpe()["pre_tokenizer"]]}
    },
    "no model": {"model": None},
}


def used(meta):
    ours = Tokenizer(meta)
    ours.byte_lengths()
    for text in (TEXT, "x" * 50):
        ids = ours.encode(text)
        assert all(0 <= id < ours.vocab_size for id in ids)
        ours.decode(ids)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_tokenizer_json_is_one_sentence(what, tmp_path):
    # panics of Rust, which are no Exceptions, passed every handler; ids beyond the model's raised in it or took forever
    file, content = tmp_path / "tokenizer.json", trained_bpe() | HOSTILE[what]
    file.write_text(json.dumps(content))
    meta = {"tokenizer": "json", "vocab_size": 300, "tokenizer_json": content, "end_of_text": 0}
    with pytest.raises(UserError):
        used(meta)
    with pytest.raises(UserError):
        used(encoding.made(str(file), None))
    with pytest.raises(UserError):
        used(tokenizer_json.own(str(tmp_path))[0])
    with contextlib.suppress(UserError):
        tokenizer_json.tokenizer(meta, 16)
