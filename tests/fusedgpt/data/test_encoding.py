"""Text cut into pieces has the same tokens, and a run that stops anywhere goes on to the same ids."""

import json
import os
import pathlib
import sysconfig

import numpy as np
import pytest

from fusedgpt.data import encoding
from fusedgpt.data.encoding import fill, made, pieces
from fusedgpt.data.texts import Files
from fusedgpt.data.tokenizer import GPT2, Tokenizer
from fusedgpt.errors import UserError
from tests.conftest import why_no_bpe
from tests.fusedgpt.data.test_tokenizer import meta_of
from tests.launch import ROOT

SHAKESPEARE = ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt"
BYTES = {"tokenizer": "byte", "vocab_size": 257, "end_of_text": 256}
needs_bpe = pytest.mark.skipif(bool(why_no_bpe()), reason="GPT-2's BPE files are not here (set TIKTOKEN_CACHE_DIR)")


def real_texts():
    """Modules of the standard library, with line ends beside all kinds of characters, and a play."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    for name in ("argparse.py", "turtle.py", "typing.py"):
        yield (library / name).read_text(encoding="utf-8")[:200_000]
    if SHAKESPEARE.exists():
        yield SHAKESPEARE.read_text()[:200_000]
    yield "　　段落的第一行，没有空格。\n" * 500  # lines that begin with an ideographic space
    some = [*"aZs1½字é'\u0301_ \t\n\r\u3000.,!/、。，🙂", " a", "'s ", "\na", " 字"]
    yield "".join(np.random.default_rng(0).choice(some, 20_000))
    yield "line\r end \n\n  x\n漢字\nçà!\n/etc\n'tis\n\t5\n½\n_a\n" * 500


@needs_bpe
@pytest.mark.parametrize("run", [" ", "x", *(pytest.param(each, marks=pytest.mark.slow) for each in "\n!字9")])
def test_a_run_of_a_million_characters_can_be_encoded(run):
    # tiktoken: "Max stack size exceeded for backtracking", a traceback, after a million blanks and a letter
    text = "a\n" + run * 1_020_000 + "a"
    tokenizer = Tokenizer(GPT2)
    ids, _ = tokenizer.encode_texts([piece for piece, _ in pieces([(text, True)])])
    assert tokenizer.decode(ids.tolist()).decode() == text


@pytest.mark.parametrize(
    "name", ["r50k_base", *(pytest.param(each, marks=pytest.mark.slow) for each in ("cl100k_base", "o200k_base"))]
)
def test_no_pattern_of_tiktokens_joins_what_is_cut(monkeypatch, name):
    import regex
    from tiktoken_ext import openai_public

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})  # the patterns need no download
    pattern = regex.compile(getattr(openai_public, name)()["pat_str"])
    monkeypatch.setattr(encoding, "PIECE", 1)  # cut in all places where it is allowed
    for text in real_texts():
        cut = [piece for piece, _ in pieces([(text, True)])]
        assert len(cut) > 3
        assert [word for piece in cut for word in pattern.findall(piece)] == pattern.findall(text)


def test_pieces_do_not_depend_on_the_fragments_and_have_a_largest_length(monkeypatch):
    monkeypatch.setattr(encoding, "PIECE", 100)
    monkeypatch.setattr(encoding, "LONGEST_PIECE", 1000)
    text = "a line of words\n" * 60 + "x" * 5000 + "\nend"
    whole = list(pieces([(text, True), ("b", True)]))
    assert max(len(piece) for piece, _ in whole) == 1000
    digests = [digest for _, digest in whole if digest is not None]
    assert len(digests) == len(set(digests)) == 2 and whole[-1] == ("b", digests[1])
    for size in (1, 7, 999, 1001):
        fragments = [(text[at : at + size], False) for at in range(0, len(text), size)]
        assert list(pieces([*fragments, ("", True), ("b", True)])) == whole


class Stopped(Exception):
    pass


class Interrupted(Files):
    """A corpus that is cut off when it comes to a file."""

    at = None

    def read(self, path):
        if path.name == self.at:
            raise Stopped
        return super().read(path)


@pytest.fixture
def rows(tmp_path):
    """A folder with 300 documents in 30 files, and their ids."""
    texts = [f"document {n}\n" * (1 + n % 7) for n in range(300)]
    (tmp_path / "rows").mkdir()
    for n in range(30):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[10 * n : 10 * n + 10])
        (tmp_path / "rows" / f"{n:02}.jsonl").write_text("".join(lines))
    return tmp_path / "rows", [id for text in texts for id in (*text.encode(), 256)]


def filled(folder, corpus):
    """The documents of a corpus, and its ids."""
    folder.mkdir(exist_ok=True)
    documents = fill(folder, BYTES, corpus)
    whole = np.array([[0, documents["end"][-1]]])
    return documents, np.concatenate([*encoding.read(folder / "ids", "uint16", whole)]).tolist()


@pytest.mark.parametrize("tear", ["nothing", "ids", "documents"])
@pytest.mark.parametrize("batch", [500, 5000])
def test_a_run_that_stops_anywhere_goes_on_to_the_same_ids(tmp_path, monkeypatch, capsys, rows, tear, batch):
    monkeypatch.setattr(encoding, "BATCH", batch)
    monkeypatch.setattr(encoding, "PIECE", 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)  # what is read ahead
    text, want = rows
    folder, (whole, _) = tmp_path / "work", filled(tmp_path / "whole", Files([text]))
    for at in ("00.jsonl", "12.jsonl", "27.jsonl"):
        corpus = Interrupted([text])
        corpus.at = at
        with pytest.raises(Stopped):
            filled(folder, corpus)
        if tear != "nothing":  # killed while it was writing
            with open(folder / tear, "ab") as torn:
                torn.write(b'{"files": 999')
    capsys.readouterr()
    documents, ids = filled(folder, Files([text]))
    assert ids == want and np.array_equal(documents, whole)
    assert "continuing after" in capsys.readouterr().out
    assert filled(folder, Interrupted([text]))[1] == want  # it is complete: nothing is read


# the tokenizers that a prepare script can make, compared with the libraries that they come from

WORDS = "the quick brown fox jumps over the lazy dog, isn't it? 漢字 <|endoftext|>\n"


@pytest.fixture
def words(tmp_path):
    (tmp_path / "text.txt").write_text(WORDS * 200, encoding="utf-8")
    return Files([tmp_path / "text.txt"])


def bpe(*special):
    """A byte-level BPE of the library's own."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([WORDS] * 200, vocab_size=300, special_tokens=[*special], show_progress=False)
    return trained


def test_a_bpe_is_trained_as_the_library_trains_gpt2s(words):
    meta = made("train:300", words)
    ours, theirs = Tokenizer(meta), bpe("</s>")
    assert meta["vocab_size"] == 300 and ours.tokens[meta["end_of_text"]] == b"<|endoftext|>"
    plain = WORDS.replace("<|endoftext|>", "")
    assert ours.decode(ours.encode_text(WORDS).tolist()).decode() == WORDS
    assert [ours.tokens[id].decode() for id in ours.encode_text(plain[:40])] == [
        theirs.decode([id]) for id in theirs.encode(plain[:40]).ids
    ]
    assert made("train:300", words) == meta  # the same text gives the same tokenizer


@pytest.mark.parametrize("end", [["</s>"], ["<｜end▁of▁sentence｜>"], []])  # DeepSeek's texts ran together
def test_a_tokenizer_json_keeps_its_ids_and_its_end(tmp_path, words, end, capsys):
    # without an end, a tokenizer was given one more id, which its model does not have
    theirs, plain = bpe(*end), WORDS.replace("<|endoftext|>", "")
    theirs.save(str(tmp_path / "tokenizer.json"))
    meta = made(str(tmp_path / "tokenizer.json"), words)
    assert Tokenizer(meta).encode_text(plain).tolist() == theirs.encode(plain).ids
    assert meta["vocab_size"] == 300 and meta.get("end_of_text") == (0 if end else None)
    assert ("no id will end a document" in capsys.readouterr().out) == (not end)


BLANKS = dict(id=300, content="the", single_word=True, lstrip=True, rstrip=True, normalized=True, special=False)
FAULTS = {
    "blanks around an added token": {"added_tokens": [BLANKS]},
    "capitals": {"normalizer": {"type": "Lowercase"}},
    "line ends": {"pre_tokenizer": {"type": "Whitespace"}},
}


@pytest.mark.parametrize("lost", [*FAULTS, "a byte"])
def test_a_tokenizer_json_that_loses_text_is_refused(tmp_path, words, lost):
    # the bins lacked it, in silence
    content = meta_of("json")["tokenizer_json"]
    vocab = {name: id for name, id in content["model"]["vocab"].items() if name != "Ā"}
    content = content | FAULTS.get(lost, {"model": content["model"] | {"vocab": vocab}})
    (tmp_path / "lossy.json").write_text(json.dumps(content))
    said = "tokenizer_json is not byte-level" if lost == "line ends" else "does not give back every text: take"
    with pytest.raises(UserError, match=said):
        made(str(tmp_path / "lossy.json"), words)


@pytest.mark.parametrize("name", ["gpt3", "json", "none.json", "train:", "train:" + "9" * 5000])
def test_an_unknown_tokenizer_is_one_sentence(name, words):
    with pytest.raises(UserError, match=r"it can be byte|none.json cannot be used|be train:SIZE|tokenizer_json must"):
        made(name, words)
