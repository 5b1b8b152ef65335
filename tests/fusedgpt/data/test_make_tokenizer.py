"""The tokenizers that a prepare script can make, compared with the libraries that they come from."""

import json

import pytest

from fusedgpt.data import make_tokenizer
from fusedgpt.data.texts import Files
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.errors import UserError
from tests.fusedgpt.data.test_tokenizer import meta_of

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
    meta = make_tokenizer.of("train:300", text)
    ours, theirs = Tokenizer(meta), bpe()
    assert meta["vocab_size"] == 300 and ours.tokens[meta["end_of_text"]] == b"<|endoftext|>"
    plain = WORDS.replace("<|endoftext|>", "")
    assert ours.decode(ours.encode_text(WORDS).tolist()).decode() == WORDS
    assert [ours.tokens[id].decode() for id in ours.encode_text(plain[:40])] == [
        theirs.decode([id]) for id in theirs.encode(plain[:40]).ids
    ]
    assert make_tokenizer.of("train:300", text) == meta  # the same text gives the same tokenizer


@pytest.mark.parametrize("end", ["</s>", None])
def test_a_tokenizer_json_keeps_its_ids_and_its_end(tmp_path, text, end):
    # without an end, a tokenizer was given one more id, which its model does not have
    theirs = bpe()
    if not end:
        theirs = type(theirs)()
        theirs.train_from_iterator([WORDS] * 200, vocab_size=300, show_progress=False)
    theirs.save(str(tmp_path / "tokenizer.json"))
    meta = make_tokenizer.of(str(tmp_path / "tokenizer.json"), text)
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
        make_tokenizer.of(str(tmp_path / "lossy.json"), text)


UNKNOWN = ["gpt3", "json", "none.json", "train", "train:5", "train:x", "train:" + "9" * 5000, ""]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_tokenizer_is_one_sentence(name, text):
    with pytest.raises(UserError, match="--tokenizer="):
        make_tokenizer.of(name, text)


def test_characters_and_bytes_have_an_end_that_a_single_document_does_not_need(text):
    meta = make_tokenizer.of("char", text)
    assert meta["itos"] == [*sorted(set(WORDS)), "<|endoftext|>"]
    alone = make_tokenizer.without_end(meta)
    assert alone == {"tokenizer": "char", "vocab_size": len(set(WORDS)), "itos": sorted(set(WORDS))}
    assert make_tokenizer.without_end(make_tokenizer.of("byte", text)) == {"tokenizer": "byte", "vocab_size": 256}
