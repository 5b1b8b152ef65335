"""Text cut into pieces has the same tokens, and a run that stops anywhere goes on to the same ids."""

import json
import os
import pathlib
import sysconfig
import threading

import numpy as np
import pytest

from fusedgpt.data import encoding
from fusedgpt.data.encoding import Encoded, on_all_cores, pieces
from fusedgpt.data.texts import Files
from fusedgpt.data.tokenizer import GPT2, Tokenizer
from tests.conftest import why_no_bpe
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
    yield "An article. It has paragraphs, and between any two an empty line.\n\n" * 500
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


@pytest.fixture
def two_cores(monkeypatch):
    """Pretend to have two cores, on which depends how many items are taken ahead."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)


def test_results_keep_their_order_and_items_are_taken_only_a_few_ahead(two_cores):
    # a pool's own map would read the whole text before the first result
    taken, release = [], threading.Event()

    def wait_for_later_ones(n):
        release.wait(10)
        return n

    results = on_all_cores(wait_for_later_ones, (taken.append(n) or n for n in range(1000)))
    threading.Timer(0.1, release.set).start()
    assert next(results) == 0
    assert len(taken) <= 2 * 2 + 1
    assert list(results) == list(range(1, 1000))


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


def filled(folder, corpus, max_tokens=None):
    folder.mkdir(exist_ok=True)
    encoded = Encoded(folder, BYTES)
    encoded.fill(corpus, max_tokens)
    return encoded


def ids_of(encoded, max_tokens=None):
    return np.concatenate([*encoded.read(np.array([[0, encoded.documents(max_tokens)["end"][-1]]]))]).tolist()


@pytest.mark.parametrize("tear", ["nothing", "ids", "documents"])
@pytest.mark.parametrize("batch", [500, 5000])
def test_a_run_that_stops_anywhere_goes_on_to_the_same_ids(tmp_path, monkeypatch, capsys, rows, two_cores, tear, batch):
    monkeypatch.setattr(encoding, "BATCH", batch)
    monkeypatch.setattr(encoding, "PIECE", 20)
    text, want = rows
    folder, whole = tmp_path / "work", filled(tmp_path / "whole", Files([text]))
    for at in ("00.jsonl", "12.jsonl", "27.jsonl"):
        corpus = Interrupted([text])
        corpus.at = at
        with pytest.raises(Stopped):
            filled(folder, corpus)
        if tear != "nothing":  # killed while it was writing
            with open(folder / tear, "ab") as torn:
                torn.write(b'{"files": 999')
    capsys.readouterr()
    encoded = filled(folder, Files([text]))
    assert ids_of(encoded) == want and np.array_equal(encoded.documents(), whole.documents())
    assert "continuing after" in capsys.readouterr().out
    assert ids_of(filled(folder, Interrupted([text]))) == want  # it is complete: nothing is read


def test_max_tokens_ends_with_a_document(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(encoding, "BATCH", 500)
    for max_tokens in (5000, 8000):  # an interrupted run is continued whatever its --max_tokens was
        ids = ids_of(filled(tmp_path / "work", Files([rows[0]]), max_tokens=max_tokens), max_tokens)
        assert max_tokens <= len(ids) < max_tokens + 100 and ids == rows[1][: len(ids)] and ids[-1] == 256
        assert 256 not in ids[max_tokens - 1 : -1]
    assert ids_of(filled(tmp_path / "work", Files([rows[0]]))) == rows[1]
