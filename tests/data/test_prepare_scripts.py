"""The prepare scripts, on small local text, and the bins that they write."""

import hashlib
import json
import os
import re
import runpy
import shutil
import sys

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from fusedgpt import home
from fusedgpt.data import encoding, prepare
from fusedgpt.data.corpus import Files
from fusedgpt.data.encoding import Encoded
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.settings import Settings
from tests import documents
from tests.conftest import why_no_bpe
from tests.launch import FORKS, ROOT, fails, process, script, sentence

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


@pytest.mark.slow  # 10 MB; the next test has a small folder
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
    modules = [set(re.findall(r"module_\d+", each)) for each in text]
    assert modules[0] | modules[1] == {f"module_{n}" for n in range(40)}
    assert modules[1] and not modules[0] & modules[1]
    assert meta["source"] == f"{tmp_path.name} (40 files)"


def test_shakespeare_char(tmp_path):
    (tmp_path / "text.txt").write_text("abcde" * 20, encoding="utf-8")
    meta, train, val = prepared("shakespeare_char", tmp_path, f"--input={tmp_path / 'text.txt'}")
    assert meta["itos"] == list("abcde") and meta["vocab_size"] == 5
    assert train.tolist() == [0, 1, 2, 3, 4] * 18 and val.tolist() == [0, 1, 2, 3, 4] * 2


@needs_shakespeare
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("shakespeare_char", (1_003_854, 111_540, 65)),
        pytest.param("shakespeare", (301_966, 36_059, 50_257), marks=needs_bpe),
    ],
)
def test_shakespeares_counts_are_nanogpts(tmp_path, name, counts):
    meta, train, val = prepared(name, tmp_path, f"--input={SHAKESPEARE}")
    assert (len(train), len(val), meta["vocab_size"]) == counts


@needs_bpe
def test_openwebtext_is_split_and_ordered_as_datasets_does(tmp_path):
    import datasets

    rows = [f"document number {n}: " + "word " * 5000 for n in range(60)]
    (tmp_path / "text.txt").write_text("\n\n".join(rows))
    meta, train, val = prepared("openwebtext", tmp_path, f"--input={tmp_path / 'text.txt'}")
    split = datasets.Dataset.from_dict({"text": rows}).train_test_split(test_size=1, seed=2357, shuffle=True)
    decode = Tokenizer(meta).decode
    for ids, name in ((train, "train"), (val, "test")):
        text = decode(ids.tolist()).decode().split("<|endoftext|>")
        assert text.pop() == ""  # each document ends, the last one too
        assert text == list(split[name]["text"])


@needs_bpe
def test_fineweb_of_local_parquet_stops_at_max_tokens(tmp_path):
    rows = [f"document number {n} of many" for n in range(3000)]
    file = tmp_path / "text.parquet"
    parquet.write_table(pyarrow.table({"text": rows}), file)
    meta, train, val = prepared("fineweb", tmp_path / "all", f"--input={file}")
    assert meta["end_of_text"] == 50256 and 0.05 < len(val) / len(train) < 0.2  # 0.05 % of so few tokens tell nothing
    meta, train, val = prepared("fineweb", tmp_path / "some", f"--input={file}", "--max_tokens=100")
    text = Tokenizer(meta).decode([*train.tolist(), *val.tolist()]).decode()
    ended = text.split("<|endoftext|>")
    assert ended.pop() == "" and sorted(ended) == sorted(rows[: len(ended)])
    assert 100 <= len(train) + len(val) < 110


def asked(monkeypatch, name, *args):
    """What a script asks of prepare.prepare: (the arguments without a name, those with one)."""
    found = []
    monkeypatch.setattr(prepare, "prepare", lambda *args, **how: found.append((args, how)))
    monkeypatch.setattr(sys, "argv", ["prepare.py", *args])
    runpy.run_path(str(ROOT / "data" / name / "prepare.py"))["main"]()
    return found[0]


@pytest.mark.parametrize("name", ["fineweb", "openwebtext"])
def test_a_data_set_of_the_hub_is_of_one_commit(monkeypatch, name):
    # an interrupted preparation skips as much of the text as it has, which must not have changed meanwhile
    assert re.search(r"\b[0-9a-f]{40}\b", str(asked(monkeypatch, name)[0][0].key))


def test_documents_of_openwebtext_keep_the_order_of_the_draw(monkeypatch):
    (*_, split), how = asked(monkeypatch, "openwebtext")
    ends = np.arange(1, 61) * 5000
    assert how == {} and split(ends)["train"].tolist() == prepare.draw(ends, 0.0005, shuffled=True)["train"].tolist()
    assert split(ends)["train"].tolist() != sorted(split(ends)["train"].tolist())


def test_shakespeare_is_cut_before_it_is_tokenized_and_has_no_ends(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("to be or not")
    (halves, tokenizer, _, split), how = asked(monkeypatch, "shakespeare", f"--input={tmp_path / 'a.txt'}")
    assert (halves.share, tokenizer, how) == (0.9, "gpt2", {"ended": False})
    parts = {name: part.tolist() for name, part in split(np.array([9, 10])).items()}
    assert parts == {"train": [[0, 9]], "val": [[9, 10]]}


@pytest.mark.parametrize("name", sorted(f.parent.name for f in (ROOT / "data").glob("*/prepare.py")))
def test_a_missing_input_is_named(name):
    assert "--input=/no/such/file does not exist" in fails(f"data/{name}/prepare.py", "--input=/no/such/file")


def test_bad_input_is_one_sentence(tmp_path):
    contents = {"empty.txt": b"", "bom.txt": b"\xef\xbb\xbf", "short.txt": b"To be", "one/a.py": b"a = 1\n"}
    contents["rows.jsonl"] = b'{"text": ""}\n' * 99  # made bins of ends of text alone
    for name, raw in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    for name, args, said in [
        ("text", [], "give files or folders with --input=PATH"),
        ("fineweb", ["--max_tokens=0"], "--max_tokens=0 must be 1 or more"),
        ("shakespeare_char", ["empty.txt"], "holds no text"),
        ("shakespeare_char", ["bom.txt"], "holds no text"),
        ("text", ["rows.jsonl", "--tokenizer=byte"], "holds no text"),
        ("shakespeare_char", ["short.txt"], "short.txt is too short: of its 5 tokens, 1 would be in the val split"),
        ("shakespeare_char", ["."], "is a folder"),
        ("python_stdlib", [".", "."], "got 2 paths"),
        ("python_stdlib", ["one"], "has 1 .py files, none of them for val: give more, or only one, which is cut"),
    ]:
        args = [arg if arg.startswith("--") else tmp_path / arg for arg in args]
        assert said in fails(f"data/{name}/prepare.py", f"--out_dir={tmp_path / 'out'}", *args)
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.parametrize("typo", ["--tokenizer=gtp2", "--text_column=txet"])
def test_a_typo_leaves_an_interrupted_run_as_it_is(tmp_path, typo):
    # its ids were dropped before the typo was refused
    out, text = tmp_path / "out", tmp_path / "rows.jsonl"
    text.write_text('{"text": "a few words"}\n' * 3)
    work = out / ".prepare"
    work.mkdir(parents=True)
    encoded = Encoded(work, ["another job"])
    encoded.begin({"tokenizer": "byte", "vocab_size": 257, "end_of_text": 256})
    encoded.fill(Files([text]))
    before = {path.name: path.read_bytes() for path in work.iterdir()}
    assert len(before["ids"]) > 0
    fails("data/text/prepare.py", f"--input={text}", f"--out_dir={out}", "--tokenizer=byte", typo)
    assert {name: (work / name).read_bytes() for name in before} == before
    done = script("data/text/prepare.py", f"--input={text}", f"--out_dir={out}", "--tokenizer=byte")
    assert "starting anew: 36 tokens of an interrupted run" in done.stdout


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--input=", "no path was given"),  # --input="$UNSET" prepared whatever was there
        ("--out_dir=", "no path was given"),
        ("--encoding=klingon", "klingon is no encoding: it can be latin-1"),
        ("--encoding=hex", "hex is no encoding"),
        ("--skip_unreadable=yes", "yes is neither True nor False"),
    ],
)
def test_an_option_that_cannot_be_is_named(option, said, tmp_path):
    done = script("data/text/prepare.py", f"--input={tmp_path}", f"--out_dir={tmp_path}", option, check=False)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_is_no_text(tmp_path):
    # it used to be waited for without end
    os.mkfifo(tmp_path / "a.txt")
    os.mkfifo(tmp_path / "a.py")
    sentence = fails("data/shakespeare_char/prepare.py", f"--input={tmp_path / 'a.txt'}")
    assert "is a pipe or a device: write its content to a file" in sentence
    assert "holds no text" in fails("data/text/prepare.py", f"--input={tmp_path}")
    assert "holds no .py files" in fails("data/python_stdlib/prepare.py", f"--input={tmp_path}")


def text_of(folder):
    meta = json.loads((folder / "meta.json").read_text())
    ids = np.concatenate([np.fromfile(folder / f"{split}.bin", "<u2") for split in ("train", "val")])
    return Tokenizer(meta).decode(ids.tolist()).decode(), meta["source"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shakespeare_char", []),
        pytest.param("shakespeare", [], marks=needs_bpe),
        ("text", ["--tokenizer=byte"]),
    ],
)
def test_input_txt_beside_a_copied_script_is_used_unless_input_names_another(name, options, tmp_path):
    # as nanoGPT's users do; a copied script used to download Shakespeare and leave the text beside it unread
    mine = tmp_path / "project" / "data" / "mine"
    mine.mkdir(parents=True)
    shutil.copy(ROOT / "data" / name / "prepare.py", mine)
    shutil.copytree(ROOT / "fusedgpt", mine.parents[1] / "fusedgpt", ignore=shutil.ignore_patterns("__pycache__"))
    (mine / "input.txt").write_text("to be or not to be\n" * 20)
    before = {f: f.read_bytes() for f in (ROOT / "data").rglob("*") if f.is_file() and f.suffix != ".pyc"}
    done = script(str(mine / "prepare.py"), *options)
    assert f"reading {mine / 'input.txt'}, which is beside this script" in done.stdout
    assert text_of(mine) == ("to be or not to be\n" * 20, "input.txt")
    assert before == {f: f.read_bytes() for f in (ROOT / "data").rglob("*") if f.is_file() and f.suffix != ".pyc"}
    (tmp_path / "other.txt").write_text("the other text " * 20)
    done = script(str(mine / "prepare.py"), f"--input={tmp_path / 'other.txt'}", *options)
    assert "input.txt" not in done.stdout
    assert text_of(mine) == ("the other text " * 20, "other.txt")


def test_text_takes_files_and_folders_in_their_order_with_an_end_after_each(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.md").write_text("second " * 40)
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps({"body": "first " * 40}) + "\n")
    (tmp_path / "in" / "c.png").write_text("left out")
    (tmp_path / "in" / "d.txt").write_text("")
    (tmp_path / "last.txt").write_text("third")
    args = [f"--input={tmp_path / 'in'}", tmp_path / "last.txt", "--text_column=body"]
    for _ in range(2):  # the second time the folder has a meta.json, which is no text
        done = script("data/text/prepare.py", *args, "--tokenizer=char", f"--out_dir={tmp_path / 'in'}")
        assert "left out: 1 empty files" in done.stdout and "1 .png" in done.stdout
        end = "<|endoftext|>"
        assert text_of(tmp_path / "in")[0] == "first " * 40 + end + "second " * 40 + end + "third" + end
        meta = json.loads((tmp_path / "in" / "meta.json").read_text())
        assert meta["itos"][-1] == end and meta["end_of_text"] == meta["vocab_size"] - 1
        assert not (tmp_path / "in" / ".prepare").exists()


def test_a_killed_preparation_goes_on_and_leaves_the_same_bytes(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("To be, or not to be.\n" * 5000)
    command = ["data/text/prepare.py", f"--input={tmp_path / 'text.txt'}", "--tokenizer=char"]
    monkeypatch.setattr(encoding, "BATCH", 10_000)
    monkeypatch.setattr(encoding, "PIECE", 5_000)
    script(*command, f"--out_dir={tmp_path / 'whole'}")
    killed = tmp_path / "killed"
    child = FORKS.Process(target=die_in_a_batch, args=([*command, f"--out_dir={killed}"], 3))
    child.start()
    child.join(60)
    assert child.exitcode == 9 and not (killed / "train.bin").exists()
    assert "continuing after" in script(*command, f"--out_dir={killed}").stdout
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def die_in_a_batch(command, batches):
    """Run a script that is killed after its ids of some batches were written, before the step that says so."""
    encoding.BATCH, encoding.PIECE = 10_000, 5_000
    write, written = Encoded._write_step, []

    def dying(encoded, step):
        written.append(step)
        if len(written) > batches:
            os._exit(9)
        write(encoded, step)

    Encoded._write_step = dying
    script(*command)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not shutil.which("taskset"), reason="needs a command that limits the cores")
def test_the_memory_of_a_preparation_does_not_grow_with_the_text():
    two_cores = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:2])), sys.executable]
    peaks = []
    for megabytes in (20, 120):
        said = process("tests/prepare_speed.py", megabytes, "byte", 0, prefix=two_cores).stdout
        peaks.append([json.loads(line)["peak_mb"] for line in said.splitlines()])
    # 200 MB of characters once took 3.6 GB
    assert len(peaks[0]) == 2 and all(more - less < 30 for less, more in zip(*peaks, strict=True))  # of 100 more


BODY = "word {0} " * 5
PAGE = "<html><head><script>source {0}</script></head><nav>source {0}</nav><p>" + BODY + "</html>"
GOOD = {  # each says "word NAME"
    "a.txt": lambda body, page: body.encode(),
    "d.html": lambda body, page: page.encode(),
    "page saved.txt": lambda body, page: page.encode(),
    "h.csv": lambda body, page: f'id,text\n1,"{body}"\n'.encode(),
    "mail.csv": lambda body, page: f"subject,body\nsource,{body}\n".encode(),
    "l.txt.zst": lambda body, page: zstandard.compress(body.encode()),
    "notepad.txt": lambda body, page: body.encode("utf-16"),
    "old windows.txt": lambda body, page: f"{body}é".encode("cp1252"),
    "m.docx": lambda body, page: documents.docx([body]),
    "o.epub": lambda body, page: documents.epub([("1.xhtml", page, "")]),
    "p.pdf": lambda body, page: documents.pdf([body, None]),
}
BAD = {"no text.docx": documents.docx(["a"])[:99], "rows.jsonl": b'{"text": "source rows.jsonl"}\n{'}
BAD |= {"really old.txt": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99)}
LEFT_OUT = {"photo.png": b"\x89PNG", "old.doc": b"\xd0\xcf\x11\xe0", "all.zip": b"PK\3\4", ".hidden.txt": b"source"}
LEFT_OUT |= {"empty.txt": b"", "program.exe": b"MZ"}


def test_a_folder_of_every_kind_of_file_takes_two_rounds(tmp_path):
    # each bad file cost a round, a PDF's and a page's source were text, and the advice for a .docx was UTF-8
    pytest.importorskip("pypdf")
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    good = {name: raw(BODY.format(name), PAGE.format(name)) for name, raw in GOOD.items()}
    for name, raw in (good | BAD | LEFT_OUT).items():
        (folder / name).write_bytes(raw)
    (folder / "link.txt").symlink_to(folder / "a.txt")
    command = ["data/text/prepare.py", f"--input={folder}", "--tokenizer=byte", f"--out_dir={out}"]
    done = script(*command, check=False)
    said = done.stdout.splitlines()
    assert done.returncode == 1 and "5 of 15 files cannot be read, for the reasons above" in sentence(done.stderr)
    bad = ["mail.csv", "no text.docx", "old windows.txt", "really old.txt", "rows.jsonl"]
    reasons = [line for line in said if line.startswith("unreadable: ")]
    assert [name for name in bad for line in reasons if f"/{name}" in line] == bad and len(reasons) == len(bad)
    assert "--text_column=mail.csv:body" in reasons[0] and "--encoding=cp1252" in reasons[2]
    others = next(line for line in said if line.startswith("left out: 4 files of other kinds"))
    assert "(1 .doc, 1 .exe, 1 .png, 1 .zip): save .doc" in others
    assert "left out: 1 empty files" in said
    options = ["--skip_unreadable=True", "--encoding=cp1252", "--text_column=mail.csv:body"]
    done = script(*command, *options)
    text, _ = text_of(out)
    assert "source" not in text and "PDF" not in text and "<" not in text.replace("<|endoftext|>", "")
    for name in GOOD:  # a.txt has a link
        assert text.count(f"word {name} " * 4) == 1 + (name == "a.txt"), name
    meta = json.loads((out / "meta.json").read_text())
    assert meta["skipped"]["files"] == 3 and "no text.docx" in meta["skipped"]["reasons"][0]
    assert sum(line.startswith("skipped: ") for line in done.stdout.splitlines()) == 3
    assert "left out: 1 of the 2 pages of" in done.stdout and "as HTML, which it is by its content" in done.stdout
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    script(*command, *options)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (
            "shakespeare_char",
            "config/train_shakespeare_cpu.py --dataset=FOLDER (with a GPU config/train_shakespeare_char.py)",
        ),
        pytest.param("shakespeare", "config/finetune_shakespeare.py --dataset=FOLDER", marks=needs_bpe),
        pytest.param("openwebtext", "config/train_gpt2.py --dataset=FOLDER", marks=needs_bpe),
        pytest.param("fineweb", "config/train_gpt2.py --dataset=FOLDER", marks=needs_bpe),
        ("python_stdlib", "config/quickstart.py --dataset=FOLDER"),
        ("text", "config/train_text_cpu.py --dataset=FOLDER"),
    ],
)
def test_a_preparation_ends_with_the_command_that_trains_on_it(name, command, tmp_path):
    out, tokenizer = tmp_path / "an out", ["--tokenizer=byte"] * (name == "text")
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 20)
    done = script(f"data/{name}/prepare.py", f"--input={tmp_path / 'a.txt'}", f"--out_dir={out}", *tokenizer)
    assert done.stdout.splitlines()[-1] == f"next: python train.py {command}".replace("FOLDER", f"'{out}'")
    config = runpy.run_path(str(ROOT / re.search(r"config/\S+\.py", command)[0]))
    assert config.get("dataset", Settings.dataset) == ("openwebtext" if name == "fineweb" else name)


def test_the_next_command_names_a_data_set_that_the_config_file_does_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(home, "ROOT", tmp_path)
    for folder, want in [(tmp_path / "data" / "text", ""), (tmp_path / "data" / "book", " --dataset=book")]:
        prepare.say_next(folder, "config/train_text_cpu.py", "text")
        assert capsys.readouterr().out == f"next: python train.py config/train_text_cpu.py{want}\n"
    monkeypatch.setattr(home, "INSTALLED", True)
    prepare.say_next(tmp_path, "config/train_text_cpu.py", "text")
    assert capsys.readouterr().out == f"next: fusedgpt train config/train_text_cpu.py --dataset={tmp_path}\n"
