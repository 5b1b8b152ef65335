"""The prepare scripts, on small local text, and the bins that they write."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from fusedgpt.tokenizer import Tokenizer
from tests.conftest import ROOT, fails, script, why_no_bpe

SHAKESPEARE = ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt"
needs_bpe = pytest.mark.skipif(bool(why_no_bpe()), reason="GPT-2's BPE files are not here (set TIKTOKEN_CACHE_DIR)")
needs_shakespeare = pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f"{SHAKESPEARE} is not here")


def prepared(name, tmp_path, *args):
    script(f"data/{name}/prepare.py", f"--out_dir={tmp_path}", *args)
    meta = json.loads((tmp_path / "meta.json").read_text())
    ids = {split: np.fromfile(tmp_path / f"{split}.bin", "<u2") for split in ("train", "val")}
    for split in ids:
        assert meta["tokens"][split] == len(ids[split])
        assert meta["sha256"][split] == hashlib.sha256((tmp_path / f"{split}.bin").read_bytes()).hexdigest()
    return meta, ids["train"], ids["val"]


def test_python_stdlib(tmp_path):
    meta, train, val = prepared("python_stdlib", tmp_path)
    assert "CPython" in meta["source"] and "3." in meta["source"]  # whose library it is
    assert len(train) > 5_000_000 and 0.03 < len(val) / len(train) < 0.3
    text = Tokenizer(meta).decode(train.tolist()).decode(errors="replace")
    assert "def " in text and "\nimport " in text


def test_python_stdlib_of_a_folder_is_split_by_file(tmp_path):
    for n in range(40):
        (tmp_path / f"m{n}.py").write_text(f"module_{n} = {n}\n" * 3)
    meta, train, val = prepared("python_stdlib", tmp_path / "out", f"--input={tmp_path}")
    text = [Tokenizer(meta).decode(ids.tolist()).decode() for ids in (train, val)]
    modules = [{line.split()[0] for line in t.splitlines() if line} for t in text]
    assert modules[0] | modules[1] == {f"module_{n}" for n in range(40)}
    assert modules[1] and not modules[0] & modules[1]


def test_shakespeare_char(tmp_path):
    (tmp_path / "text.txt").write_text("abcde" * 20, encoding="utf-8")
    meta, train, val = prepared("shakespeare_char", tmp_path, f"--input={tmp_path / 'text.txt'}")
    assert meta["itos"] == list("abcde") and meta["vocab_size"] == 5
    assert train.tolist() == [0, 1, 2, 3, 4] * 18 and val.tolist() == [0, 1, 2, 3, 4] * 2


@needs_shakespeare
def test_shakespeare_char_counts_are_nanogpts(tmp_path):
    meta, train, val = prepared("shakespeare_char", tmp_path, f"--input={SHAKESPEARE}")
    assert (len(train), len(val), meta["vocab_size"]) == (1_003_854, 111_540, 65)


@needs_bpe
@needs_shakespeare
def test_shakespeare_counts_are_nanogpts(tmp_path):
    meta, train, val = prepared("shakespeare", tmp_path, f"--input={SHAKESPEARE}")
    assert (len(train), len(val), meta["vocab_size"]) == (301_966, 36_059, 50_257)


@needs_bpe
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_openwebtext_ends_each_document(tmp_path, suffix):
    documents = [f"document number {n}" for n in range(50)]
    file = tmp_path / f"text{suffix}"
    if suffix == ".txt":
        file.write_text("\n\n".join(documents))
    elif suffix == ".jsonl":
        file.write_text("".join(json.dumps({"text": d, "url": "x"}) + "\n" for d in documents))
    else:
        import datasets

        datasets.Dataset.from_dict({"text": documents}).to_parquet(file)
    meta, train, val = prepared("openwebtext", tmp_path / "out", f"--input={file}")
    decode = Tokenizer(meta).decode
    text = [decode(ids.tolist()).decode().split("<|endoftext|>") for ids in (train, val)]
    assert text[0][-1] == text[1][-1] == ""  # each document ends, the last one too
    assert len(text[1]) == 2
    assert sorted(t.strip() for t in text[0][:-1] + text[1][:-1]) == sorted(documents)


@pytest.mark.parametrize("name", ["python_stdlib", "shakespeare", "shakespeare_char", "openwebtext"])
def test_a_missing_input_is_named(name):
    assert "--input=/no/such/file does not exist" in fails(f"data/{name}/prepare.py", "--input=/no/such/file")


def test_text_that_is_too_short_or_no_text_is_named(tmp_path):
    (tmp_path / "short.txt").write_text("")
    out = f"--out_dir={tmp_path}"
    assert "too short" in fails("data/shakespeare_char/prepare.py", f"--input={tmp_path / 'short.txt'}", out)
    (tmp_path / "binary.txt").write_bytes(b"abc\xff\xfe")
    sentence = fails("data/shakespeare_char/prepare.py", f"--input={tmp_path / 'binary.txt'}", out)
    assert "not UTF-8 text" in sentence and "byte 3" in sentence
    (tmp_path / "both").mkdir()
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / "both" / name).write_text("")
    assert "files of one kind" in fails("data/openwebtext/prepare.py", f"--input={tmp_path / 'both'}", out)
    (tmp_path / "empty.jsonl").write_text("")
    assert "is empty" in fails("data/openwebtext/prepare.py", f"--input={tmp_path / 'empty.jsonl'}", out)
    (tmp_path / "bad.jsonl").write_text("{not json")
    assert "cannot read" in fails("data/openwebtext/prepare.py", f"--input={tmp_path / 'bad.jsonl'}", out)
    assert "is a folder" in fails("data/shakespeare_char/prepare.py", f"--input={tmp_path}", out)
    assert not (tmp_path / "meta.json").exists()


@pytest.mark.parametrize(
    ("texts", "found"),
    [(["one", None, "three"], "is string, with 1 null"), ([1, 2], "is int64, with 0 null"), ([None] * 2, "is null")],
    ids=["a null", "numbers", "nulls"],
)
def test_a_document_that_is_no_text_is_one_sentence(tmp_path, texts, found):
    # one null among the texts used to be forty lines of RemoteTraceback
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sentence = fails("data/openwebtext/prepare.py", f"--input={file}", f"--out_dir={tmp_path}")
    assert f"must have a text in each row: its column 'text' {found}" in sentence


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_is_no_text(tmp_path):
    # it used to be waited for without end
    os.mkfifo(tmp_path / "a.txt")
    os.mkfifo(tmp_path / "a.py")
    sentence = fails("data/shakespeare_char/prepare.py", f"--input={tmp_path / 'a.txt'}")
    assert "is a pipe or a device: write its content to a file" in sentence
    assert "files of one kind" in fails("data/openwebtext/prepare.py", f"--input={tmp_path}")
    assert "holds no .py files" in fails("data/python_stdlib/prepare.py", f"--input={tmp_path}")


# a copy of a script in a new folder of data/, with a text of one's own beside it, as nanoGPT's users do


def copied(name, tmp_path, raw):
    """data/mine in a copy of the project: a copy of data/`name`/prepare.py, and an input.txt of the bytes `raw`."""
    mine = tmp_path / "project" / "data" / "mine"
    mine.mkdir(parents=True)
    shutil.copy(ROOT / "data" / name / "prepare.py", mine)
    shutil.copytree(ROOT / "fusedgpt", mine.parents[1] / "fusedgpt", ignore=shutil.ignore_patterns("__pycache__"))
    (mine / "input.txt").write_bytes(raw)
    return mine


def text_of(folder):
    meta = json.loads((folder / "meta.json").read_text())
    ids = np.concatenate([np.fromfile(folder / f"{split}.bin", "<u2") for split in ("train", "val")])
    return Tokenizer(meta).decode(ids.tolist()).decode(), meta["source"]


@pytest.mark.parametrize("name", ["shakespeare_char", pytest.param("shakespeare", marks=needs_bpe)])
def test_input_txt_beside_a_copied_script_is_used_and_said(name, tmp_path):
    # --input alone: a copied script used to download Shakespeare and leave the text beside it unread
    mine = copied(name, tmp_path, b"to be or not to be\n" * 20)
    before = {f: f.read_bytes() for f in (ROOT / "data").rglob("*") if f.is_file() and f.suffix != ".pyc"}
    done = script(str(mine / "prepare.py"))
    assert f"reading {mine / 'input.txt'}, which is beside this script" in done.stdout
    assert text_of(mine) == ("to be or not to be\n" * 20, "input.txt")
    assert before == {f: f.read_bytes() for f in (ROOT / "data").rglob("*") if f.is_file() and f.suffix != ".pyc"}


@pytest.mark.parametrize("name", ["shakespeare_char", pytest.param("shakespeare", marks=needs_bpe)])
def test_input_wins_over_input_txt(name, tmp_path):
    mine = copied(name, tmp_path, b"the text beside the script " * 20)
    (tmp_path / "other.txt").write_text("the other text " * 20)
    done = script(str(mine / "prepare.py"), f"--input={tmp_path / 'other.txt'}")
    assert "input.txt" not in done.stdout
    assert text_of(mine) == ("the other text " * 20, "other.txt")


@pytest.mark.parametrize("name", ["shakespeare_char", pytest.param("shakespeare", marks=needs_bpe)])
def test_line_ends_are_those_of_text_mode(name, tmp_path):
    # nanoGPT opens its text in text mode: \r\n kept as two characters gave other ids and another vocabulary
    raw = "one\r\ntwo\rthree\n\r\n\r\rfour é\n".encode() * 20
    mine = copied(name, tmp_path, raw)
    want = (mine / "input.txt").read_text(encoding="utf-8")
    assert "\r" not in want
    script(str(mine / "prepare.py"))
    assert text_of(mine)[0] == want
    script(str(mine / "prepare.py"), f"--input={mine / 'input.txt'}", f"--out_dir={tmp_path / 'out'}")
    assert text_of(tmp_path / "out")[0] == want
