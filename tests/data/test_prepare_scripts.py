"""The prepare scripts, on small local text, and the bins that they write."""

import email.message
import gzip
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from fusedgpt.data.tokenizer import Tokenizer
from tests import documents
from tests.fusedgpt.data.test_encoding import SHAKESPEARE, needs_bpe
from tests.launch import ROOT, fails, script


def prepared(name, tmp_path, *args):
    script(f"data/{name}/prepare.py", f"--out_dir={tmp_path}", *args)
    meta = json.loads((tmp_path / "meta.json").read_text())
    ids = {split: np.fromfile(tmp_path / f"{split}.bin", "<u2") for split in ("train", "val")}
    for split in ids:
        assert meta["tokens"][split] == len(ids[split])
        assert meta["sha256"][split] == hashlib.sha256((tmp_path / f"{split}.bin").read_bytes()).hexdigest()
    return meta, ids["train"], ids["val"]


def main_of(name, monkeypatch, *args):
    """The function `main` of a prepare script that is called with `args`."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, args)])
    return runpy.run_path(str(ROOT / "data" / name / "prepare.py"))["main"]


def test_python_stdlib_is_split_by_file(tmp_path, monkeypatch):
    for n in range(40):
        (tmp_path / f"m{n}.py").write_text(f"module_{n} = {n}\n" * 3)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    main_of("python_stdlib", monkeypatch, "--out_dir=~/out")()
    text = [(tmp_path / "out" / f"{split}.bin").read_bytes()[::2].decode() for split in ("train", "val")]
    modules = [set(re.findall(r"module_\d+", each)) for each in text]
    assert modules[0] | modules[1] == {f"module_{n}" for n in range(40)}
    assert all(modules) and not modules[0] & modules[1]


def test_shakespeare_char(tmp_path):
    (tmp_path / "text.txt").write_text("abcde" * 20, encoding="utf-8")
    meta, train, val = prepared("shakespeare_char", tmp_path, f"--input={tmp_path / 'text.txt'}")
    assert meta["itos"] == list("abcde") and meta["vocab_size"] == 5
    assert train.tolist() == [0, 1, 2, 3, 4] * 18 and val.tolist() == [0, 1, 2, 3, 4] * 2


@needs_bpe
@pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f"{SHAKESPEARE} is not here")
def test_shakespeares_counts_are_nanogpts(tmp_path):
    counts = {"shakespeare_char": (1_003_854, 111_540, 65), "shakespeare": (301_966, 36_059, 50_257)}
    for name, expected in counts.items():
        meta, train, val = prepared(name, tmp_path, f"--input={SHAKESPEARE}")
        assert (len(train), len(val), meta["vocab_size"]) == expected


@needs_bpe
@pytest.mark.parametrize("name", ["fineweb", "openwebtext"])
def test_documents_of_the_hub_keep_their_order_or_that_of_nanogpts_draw(tmp_path, monkeypatch, name):
    import datasets

    rows = [f"document number {n}: " + "word " * 5000 for n in range(60)]
    for n in range(3):  # a local folder of the hub's layout
        part = {"text": rows[20 * n : 20 * n + 20], "url": ["x"] * 20}
        parquet.write_table(pyarrow.table(part), tmp_path / f"{n:03}.parquet", row_group_size=100)
    main = main_of(name, monkeypatch, f"--out_dir={tmp_path / 'out'}")
    monkeypatch.setitem(main.__globals__, "PARQUET", f"{tmp_path}/*.parquet")
    main()
    if name == "openwebtext":
        split = datasets.Dataset.from_dict({"text": rows}).train_test_split(test_size=1, seed=2357, shuffle=True)
        rows = [*split["train"]["text"], *split["test"]["text"]]
    assert text_of(tmp_path / "out")[0] == "".join(f"{row}<|endoftext|>" for row in rows)


@pytest.mark.parametrize("name", ["fineweb", "openwebtext"])
def test_a_data_set_of_the_hub_is_of_one_commit(monkeypatch, name):
    # a preparation that is continued must find the same text
    assert re.search(r"@[0-9a-f]{40}/", main_of(name, monkeypatch).__globals__["PARQUET"])


def test_shakespeare_is_cut_before_it_is_tokenized(monkeypatch, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "to be or not"}\n{"text": "to be?\\n"}\n')  # rows were glued
    main = main_of("shakespeare", monkeypatch, tmp_path / "a.jsonl", f"--out_dir={tmp_path}")
    monkeypatch.setitem(main.__globals__, "Tokenizer", lambda meta: Tokenizer({"tokenizer": "byte", "vocab_size": 256}))
    main()
    assert np.fromfile(tmp_path / "val.bin", "<u2").tolist() == list(b"?\n")
    assert json.loads((tmp_path / "meta.json").read_text())["tokens"] == {"train": 18, "val": 2}


def test_bad_input_is_one_sentence(tmp_path):
    for name, raw in {"empty.txt": b"", "bom.txt": b"\xef\xbb\xbf", "rows.jsonl": b'{"text": ""}\n' * 99}.items():
        (tmp_path / name).write_bytes(raw)
    os.mkfifo(tmp_path / "fifo.txt")  # it used to be waited for without end
    for name, file, said in [
        ("text", "absent.txt", "absent.txt cannot be read: name a local file or folder"),
        ("shakespeare_char", "fifo.txt", "fifo.txt cannot be read: name a local file or folder"),
        ("shakespeare_char", "empty.txt", "holds no text"),
        ("shakespeare_char", "bom.txt", "holds no text"),
        ("shakespeare_char", "rows.jsonl", "holds no text"),  # made bins of ends of text alone
    ]:
        assert said in fails(f"data/{name}/prepare.py", f"--out_dir={tmp_path / 'out'}", tmp_path / file)
    assert not (tmp_path / "out" / "meta.json").exists()


def text_of(folder):
    meta = json.loads((folder / "meta.json").read_text())
    ids = np.concatenate([np.fromfile(folder / f"{split}.bin", "<u2") for split in ("train", "val")])
    return Tokenizer(meta).decode(ids.tolist()).decode(), meta["source"]


def test_input_txt_beside_a_copied_script_is_used(tmp_path):
    # as nanoGPT's users do; a copied script used to download Shakespeare and leave the text beside it unread
    mine = tmp_path / "project" / "data" / "mine"
    shutil.copytree(ROOT / "data" / "shakespeare_char", mine)
    shutil.copytree(ROOT / "fusedgpt", mine.parents[1] / "fusedgpt", ignore=shutil.ignore_patterns("__pycache__"))
    (mine / "input.txt").write_text("to be or not to be\n" * 20)
    done = script(str(mine / "prepare.py"))
    assert f"reading {mine / 'input.txt'}; --input=PATH takes another text" in done.stdout
    assert text_of(mine) == ("to be or not to be\n" * 20, "input.txt")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_memory_of_a_preparation_does_not_grow_with_the_text(tmp_path):
    # 200 MB of characters once took 3.6 GB
    document = json.dumps({"text": (ROOT / "model.py").read_text()}) + "\n"

    def peak_mb(megabytes):
        with open(tmp_path / "rows.jsonl", "w") as file:
            file.writelines(document for _ in range(round(1e6 * megabytes / len(document))))
        args = [f"--input={tmp_path / 'rows.jsonl'}", "--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"]
        child = subprocess.Popen([sys.executable, "data/text/prepare.py", *args], cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        assert status == 0
        return usage.ru_maxrss / 1e3

    assert peak_mb(120) - peak_mb(60) < 30


def test_a_folder_as_people_have_it_takes_one_command(tmp_path):
    # a page's source, base64 and rows without text were trained on, and each bad file cost a round
    docx, pypandoc = pytest.importorskip("docx"), pytest.importorskip("pypandoc")
    pytest.importorskip("pypdf")
    folder = tmp_path / "in"
    folder.mkdir()
    document = docx.Document()
    document.add_paragraph("Ein Absatz aus Word.")
    document.save(folder / "a.docx")
    pypandoc.convert_text("# Kapitel\n\nEin Satz aus dem Buch.", "epub", "markdown", outputfile=str(folder / "b.epub"))
    mail = email.message.EmailMessage()
    mail.set_content("Grüße aus Berlin", cte="base64")
    for name, raw in {
        "c.txt": "“Anführung” – Größe".encode("cp1252"),
        "d.pdf": documents.pdf(["Eine Seite.", None]),
        "e.txt": "道可道，非常道。".encode(),
        "f.eml": bytes(mail),
        "g.csv": b"id,text\n1,eine Zeile\n2,\n3,zwei\n",
        "h.txt.gz": gzip.compress(b"gepackt"),
        "i.html": b"<html><script>source</script><p>Eine <b>Seite</b> im Netz.</html>",
        "bad.docx": b"PK\3\4 cut",
        "photo.png": b"\x89PNG",
        "empty.txt": b"",
    }.items():
        (folder / name).write_bytes(raw)
    command = ["data/text/prepare.py", f"--input={folder}", "--tokenizer=char", f"--out_dir={tmp_path / 'out'}"]
    assert "bad.docx (ValueError: pandoc says: " in fails(*command)
    done = script(*command, "--skip_unreadable=True")
    assert done.stdout.endswith(f"train.py config/train_text_cpu.py --dataset={tmp_path / 'out'} --dropout=0.2\n")
    text, _ = text_of(tmp_path / "out")
    said = ["Ein Absatz aus Word.", "Ein Satz aus dem Buch.", "“Anführung” – Größe", "Eine Seite.", "道可道，非常道。"]
    said += ["Grüße aus Berlin", "eine Zeile<|endoftext|>", "zwei", "gepackt", "Eine Seite im Netz."]
    assert [each for each in said if each not in text] == []
    itos = json.loads((tmp_path / "out" / "meta.json").read_text())["itos"][:-1]
    assert set(itos) <= set("".join(said).replace("<|endoftext|>", "") + "Kapitel\n"), "foreign characters"
    for note in ("c.txt as cp1252", "1 rows without text", "1 files of other", "bad.docx (Val"):
        assert note in done.stdout, note
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    script(*command, "--skip_unreadable=True")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first
