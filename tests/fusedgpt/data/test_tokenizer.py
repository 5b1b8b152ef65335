"""Ids to text and back."""

import contextlib
import functools
import json
import pickle

import numpy as np
import pytest

from fusedgpt.data import tokenizer
from fusedgpt.data.texts import Files
from fusedgpt.data.tokenizer import GPT2, Tokenizer
from fusedgpt.errors import UserError
from fusedgpt.interchange import tokenizer_json
from tests.conftest import why_no_bpe

TEXT = "def f(x):\n    return 'é漢🙂'\n"


@functools.cache
def trained_bpe():
    """The tokenizer.json of a byte-level BPE of 300 ids, trained by the library."""
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(["def f(x): return x + x if x else f(x)"] * 9, trainer)
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


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_text_survives_the_round_trip(kind):
    one = Tokenizer(meta_of(kind))
    ids = one.encode(TEXT)
    assert b"".join(one.decode([i]) for i in ids).decode() == TEXT
    assert one.decode(ids).decode() == TEXT
    # fsdp ranks are sent the tokenizer, so it must not hold each thread's encodings, which cannot be pickled
    assert pickle.loads(pickle.dumps(one)).encode(TEXT) == ids


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_the_end_of_a_text_is_one_id_in_a_prompt_and_text_in_a_text(kind):
    one = Tokenizer(meta_of(kind))
    ids = one.encode(f"{TEXT}<|endoftext|>{TEXT}")
    assert ids == [*one.encode(TEXT), one.end_of_text, *one.encode(TEXT)]
    assert one.decode([one.end_of_text]) == b"<|endoftext|>"
    if kind != "char":  # which has no '<' here
        assert one.end_of_text not in (ids := one.encode_text("a<|endoftext|>").tolist())
        assert one.decode(ids) == b"a<|endoftext|>"


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_the_bytes_of_the_ids_add_up_to_the_text(kind):
    # bits per byte depend on it; half of a character counts its bytes, not those of a replacement
    one = Tokenizer(meta_of(kind))
    lengths = one.byte_lengths()
    assert len(lengths) == one.vocab_size and lengths[one.end_of_text] == 0
    assert lengths[one.encode(f"{TEXT}<|endoftext|>{TEXT}")].sum() == 2 * len(TEXT.encode())


@pytest.mark.parametrize("kind", tokenizer.KINDS)
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


def test_a_faster_pattern_has_the_same_ids_in_tiktokens_engine():
    import tiktoken

    meta_of("gpt2")  # tiktoken may change its pattern: preparing is slower than it could be
    assert tokenizer.tiktoken_bpe("gpt2")._pat_str == tokenizer.GPT2S_PATTERN
    parts = {"mergeable_ranks": tokenizer.tiktoken_bpe("gpt2")._mergeable_ranks, "special_tokens": {}}
    theirs = tiktoken.Encoding("theirs", pat_str=tokenizer.GPT2S_PATTERN, **parts)
    ours = tiktoken.Encoding("ours", pat_str=tokenizer.FASTER, **parts)
    for text in texts_that_meet_all_alternatives():
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)


def texts_that_meet_all_alternatives():
    """Random texts of letters, digits, marks, blanks and contractions, also of other scripts and cases."""
    characters = "aZſé漢ab1½٣_'’!/.,\u0301🙂 \t\n\r\u00a0\u3000\u0085"
    parts = [*characters, "'s", "'LL", "'ve ", "  ", "\n\n", "123", " a"]
    for seed in range(200):
        yield "".join(np.random.default_rng(seed).choice(parts, 300))
    yield from ("", " " * 999, "\n" * 999 + "a", "a" * 999 + "1" * 999, TEXT)


def test_unknown_characters_are_named_but_not_all_of_them():
    ab = Tokenizer({"tokenizer": "char", "vocab_size": 2, "itos": ["a", "b"]})
    with pytest.raises(UserError, match="the training text has no 'y', 'z': it has 'ab'"):
        ab.encode("abzy")
    with pytest.raises(UserError, match=r"has no ('.', ){6}\.\.\.: it has"):  # it was 10 kB of characters
        ab.encode("".join(map(chr, range(0x4E00, 0x5800))))


def test_missing_bpe_files_are_one_sentence(monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("no network")

    tokenizer.tiktoken_bpe.cache_clear()
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        tokenizer.tiktoken_bpe("gpt2")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ([], "vocab_size=None must be a whole number"),
        ({"tokenizer": "char", "vocab_size": 2, "itos": ["a"]}, "itos must be a list of 2 characters"),
        ({"tokenizer": "char", "vocab_size": 2, "itos": ["a", 5]}, "must hold characters or null, got 5"),
        ({"tokenizer": "byte", "vocab_size": 10**30}, "vocab_size=1000.* must be a whole number from 1"),
        ({"tokenizer": "byte", "vocab_size": 0}, "vocab_size=0 must be"),
        ({"tokenizer": ["char"], "vocab_size": 5}, "tokenizer .* is unknown: it can be .*'?o200k_base"),
        ({"tokenizer": "json", "vocab_size": 5}, "tokenizer_json must be an object, got None"),
        ({"tokenizer": "byte", "vocab_size": 257, "end_of_text": 257}, "end_of_text=257 must be an id below 257"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_a_damaged_meta_is_one_sentence(meta, message):
    # each of these used to be a KeyError, a TypeError, a UnicodeEncodeError, or memory without end
    with pytest.raises(UserError, match=message):
        Tokenizer(meta)


def model(**changes):
    return {"model": trained_bpe()["model"] | changes}


def vocab(**changes):
    return model(vocab=trained_bpe()["model"]["vocab"] | changes, merges=[])


def split_first(regex):
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, trained_bpe()["pre_tokenizer"]]}}


HOSTILE = {
    "no [UNK]": model(type="WordLevel", unk_token="[UNK]"),
    "an id beyond any vocabulary": vocab(a=2**24),
    "a prefix longer than a token": model(continuing_subword_prefix="#" * 50),
    "a pattern without end": split_first("(x+x+)+y|(.*)*b"),
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
    # panics of Rust, which are no Exceptions, passed every handler; ids beyond the model's were an IndexError of it;
    # one export took forever
    file, content = tmp_path / "tokenizer.json", trained_bpe() | HOSTILE[what]
    file.write_text(json.dumps(content))
    meta = {"tokenizer": "json", "vocab_size": 300, "tokenizer_json": content, "end_of_text": 0}
    with pytest.raises(UserError):
        used(meta)
    with pytest.raises(UserError):
        used(tokenizer.made(str(file), None))
    with pytest.raises(UserError):
        used(tokenizer_json.own(str(tmp_path))[0])
    with contextlib.suppress(UserError):
        tokenizer_json.tokenizer(meta, 16)


# the tokenizers that a prepare script can make, compared with the libraries that they come from

WORDS = "the quick brown fox jumps over the lazy dog, isn't it? 漢字 <|endoftext|>\n"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(WORDS * 200, encoding="utf-8")
    return Files([tmp_path / "text.txt"])


def bpe():
    """A byte-level BPE of the library's own."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([WORDS] * 200, vocab_size=300, special_tokens=["</s>"], show_progress=False)
    return trained


def test_a_bpe_is_trained_as_the_library_trains_gpt2s(text):
    meta = tokenizer.made("train:300", text)
    ours, theirs = Tokenizer(meta), bpe()
    assert meta["vocab_size"] == 300 and ours.tokens[meta["end_of_text"]] == b"<|endoftext|>"
    plain = WORDS.replace("<|endoftext|>", "")
    assert ours.decode(ours.encode_text(WORDS).tolist()).decode() == WORDS
    assert [ours.tokens[id].decode() for id in ours.encode_text(plain[:40])] == [
        theirs.decode([id]) for id in theirs.encode(plain[:40]).ids
    ]
    assert tokenizer.made("train:300", text) == meta  # the same text gives the same tokenizer


def test_a_bpe_is_trained_on_the_first_characters_however_long_a_document_is(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "SAMPLE", 60)
    monkeypatch.setattr(tokenizer, "PIECE", 20)
    (tmp_path / "rows.jsonl").write_text('{"text": "0123456789"}\n' * 20)
    (tmp_path / "text.txt").write_text("a" * 200)
    assert [*tokenizer._sample(Files([tmp_path / "rows.jsonl"]))] == ["0123456789"] * 6
    assert [*tokenizer._sample(Files([tmp_path / "text.txt"]))] == ["a" * 20] * 3


@pytest.mark.parametrize("end", ["</s>", None])
def test_a_tokenizer_json_keeps_its_ids_and_its_end(tmp_path, text, end):
    # without an end, a tokenizer was given one more id, which its model does not have
    theirs = bpe()
    if not end:
        theirs = type(theirs)()
        theirs.train_from_iterator([WORDS] * 200, vocab_size=300, show_progress=False)
    theirs.save(str(tmp_path / "tokenizer.json"))
    meta = tokenizer.made(str(tmp_path / "tokenizer.json"), text)
    plain = WORDS.replace("<|endoftext|>", "")
    assert Tokenizer(meta).encode_text(plain).tolist() == theirs.encode(plain).ids
    assert meta["vocab_size"] == 300
    if end:
        assert Tokenizer(meta).tokens[meta["end_of_text"]].decode() == end
    else:
        assert "end_of_text" not in meta


BLANKS = dict(id=300, content="the", single_word=True, lstrip=True, rstrip=True, normalized=True, special=False)
FAULTS = {
    "capitals": {"normalizer": {"type": "Lowercase"}},
    "blanks at a beginning": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
    "blanks around an added token": {"added_tokens": [BLANKS]},
    "line ends": {"pre_tokenizer": {"type": "Whitespace"}},
}


@pytest.mark.parametrize("lost", [*FAULTS, "a byte"])
def test_a_tokenizer_json_that_loses_text_is_refused(tmp_path, text, lost):
    # the bins lacked it, in silence
    content = meta_of("json")["tokenizer_json"]
    vocab = {name: id for name, id in content["model"]["vocab"].items() if name != "Ā"}
    content = content | FAULTS.get(lost, {"model": content["model"] | {"vocab": vocab}})
    (tmp_path / "lossy.json").write_text(json.dumps(content))
    said = "tokenizer_json is not byte-level" if lost == "line ends" else "does not give back every text"
    with pytest.raises(UserError, match=said):
        tokenizer.made(str(tmp_path / "lossy.json"), text)


UNKNOWN = ["gpt3", "json", "none.json", "train", "train:5", "train:x", "train:" + "9" * 5000, ""]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_tokenizer_is_one_sentence(name, text):
    with pytest.raises(UserError, match="--tokenizer="):
        tokenizer.made(name, text)


def test_characters_and_bytes_have_an_end_that_a_single_document_does_not_need(text):
    meta = tokenizer.made("char", text)
    assert meta["itos"] == [*sorted(set(WORDS)), "<|endoftext|>"]
    alone = tokenizer.without_end(meta)
    assert alone == {"tokenizer": "char", "vocab_size": len(set(WORDS)), "itos": sorted(set(WORDS))}
    assert tokenizer.without_end(tokenizer.made("byte", text)) == {"tokenizer": "byte", "vocab_size": 256}
