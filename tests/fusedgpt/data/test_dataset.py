"""Data folders: bins and the metas that say what their ids mean, ours and nanoGPT's."""

import json
import os
import pickle
import shutil
import sys

import numpy as np
import pytest
import torch

import export
import sample
from fusedgpt.data import prepare, tokenizer
from fusedgpt.data.dataset import TokenFile, check_same_ids, find_folder, read_meta, require_same_data
from fusedgpt.data.tokenizer import GPT2, Tokenizer
from fusedgpt.errors import UserError
from fusedgpt.interchange import tokenizer_json
from fusedgpt.machine import memory
from tests.conftest import Evil, rows, run, small, why_no_bpe
from tests.launch import ROOT, process


def drawn(out_dir, **settings):
    settings = {"start": "!", "num_samples": 8, "max_new_tokens": 40, "temperature": 50.0, "top_k": 0, **settings}
    sample.main(sample.Settings(out_dir=str(out_dir), device="cpu", dtype="float32", **settings))


# folders


def test_a_data_set_that_is_not_there_is_looked_for_among_ones_own(tmp_path):
    # only the scripts' data sets were listed
    for name in ("book/train.bin", "letters/train_0000.bin", "empty/notes.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).write_bytes(b"")
    near = r"did you mean book\? Otherwise name one of data/ \(book, letters, fineweb, "
    with pytest.raises(UserError, match=f"dataset='boko' is no folder: {near}"):
        find_folder(tmp_path, "boko")
    with pytest.raises(UserError, match=r"is no folder: name one of data/ \(book, letters, fineweb, "):
        find_folder(tmp_path, "nowhere")


# bins


def test_shards_are_one_stream(tmp_path):
    ids = np.arange(100, dtype="<u2")
    for n, part in enumerate(np.split(ids, [3, 10, 60])):
        part.tofile(tmp_path / f"train_{n:04}.bin")
    file = TokenFile(tmp_path, "train", {"vocab_size": 100})
    assert len(file) == 100
    for start, length in ((0, 100), (2, 9), (9, 2), (59, 41), (60, 1), (99, 1)):
        assert file.window(start, length).tolist() == list(range(start, start + length))


def test_a_shard_that_is_missing_between_others_is_named(tmp_path):
    # a copy that had failed for one shard was a shorter text
    for n in (1, 2, 5, 6):  # build-nanogpt's begin with 1: its shard 0 is for validation
        np.arange(10, dtype="<u2").tofile(tmp_path / f"train_{n:04}.bin")
    with pytest.raises(UserError, match=r"has train_0005.bin, but not train_0003.bin: copy it there"):
        TokenFile(tmp_path, "train", {"vocab_size": 100})
    for n in (5, 6):
        (tmp_path / f"train_{n:04}.bin").unlink()
    assert len(TokenFile(tmp_path, "train", {"vocab_size": 100})) == 20


def test_large_vocabularies_take_four_bytes(tmp_path):
    prepare.write(tmp_path, {"train": [[70_000, 1]], "val": [[2]]}, "big", tokenizer="byte", vocab_size=100_000)
    assert (tmp_path / "train.bin").stat().st_size == 8
    assert TokenFile(tmp_path, "train", read_meta(tmp_path)).window(0, 2).tolist() == [70_000, 1]


@pytest.mark.parametrize("name", ["meta.json", "meta.pkl", None])
def test_bins_of_a_large_vocabulary_are_four_bytes_if_nothing_says_their_dtype(tmp_path, name):
    # uint32 was read as uint16: twice as many ids, each of which was in the vocabulary
    ids = np.arange(70_000, 70_100)
    for split in ("train", "val"):
        ids.astype("<u4").tofile(tmp_path / f"{split}.bin")
    if name:
        meta = {"tokenizer": "unknown", "vocab_size": 100_277}
        (tmp_path / name).write_bytes(json.dumps(meta).encode() if "json" in name else pickle.dumps(meta))
    meta = read_meta(tmp_path, 100_277)
    assert TokenFile(tmp_path, "train", meta).window(0, 100).tolist() == ids.tolist()
    np.arange(1, 101, dtype="<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"read as uint32\. If it is uint16, say so in a meta\.json"):
        TokenFile(tmp_path, "train", meta).window(0, 9)
    assert TokenFile(tmp_path, "train", meta | {"dtype": "uint16"}).window(0, 3).tolist() == [1, 2, 3]


def test_bad_bins_are_named(tmp_path):
    meta = {"vocab_size": 50}
    with pytest.raises(UserError, match=r"train.bin does not exist.*prepare.py"):
        TokenFile(tmp_path, "train", meta)
    (tmp_path / "train.bin").write_bytes(b"\0" * 101)
    with pytest.raises(UserError, match=r"truncated.*101 bytes are 50.5 uint16 tokens"):
        TokenFile(tmp_path, "train", meta)
    np.full(50, 60, "<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"truncated.*50.0 uint16 tokens, not 80"):
        TokenFile(tmp_path, "train", {**meta, "tokens": {"train": 80}})
    (tmp_path / "train_backup.bin").write_bytes(b"")  # not a shard, whose name has four digits
    with pytest.raises(UserError, match="holds the id 60, but the vocabulary has 50"):
        TokenFile(tmp_path, "train", meta).window(0, 5)
    (tmp_path / "train_0000.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train.bin and train_0000.bin: which one counts"):
        TokenFile(tmp_path, "train", meta)


def test_the_shard_that_is_bad_is_named(tmp_path):
    # it was always the first one
    for n, id in enumerate((1, 60, 1)):
        np.full(10, id, "<u2").tofile(tmp_path / f"train_{n:04}.bin")
    with pytest.raises(UserError, match=r"train_0001.bin holds the id 60"):
        TokenFile(tmp_path, "train", {"vocab_size": 50}).window(5, 20)
    with pytest.raises(UserError, match=r"train_\*.bin is truncated.*60 bytes are 30.0 uint16 tokens, not 40"):
        TokenFile(tmp_path, "train", {"vocab_size": 50, "tokens": {"train": 40}})
    os.truncate(tmp_path / "train_0002.bin", 19)
    with pytest.raises(UserError, match=r"train_0002.bin is truncated.*59 bytes are 29.5 uint16 tokens"):
        TokenFile(tmp_path, "train", {"vocab_size": 50})


def compared(*folders):
    """What ranks with one of these folders each say when they compare their data."""
    ranks = []
    for folder in folders:
        meta = read_meta(folder)
        ranks.append(({split: TokenFile(folder, split, meta) for split in ("train", "val")}, meta))
    values = []
    for files, meta in ranks:
        require_same_data(files, meta, lambda value: values.append(value) or [value])
    require_same_data(*ranks[0], lambda value: values)


NODE = """
import os, sys
os.chdir(f"node-{os.environ['RANK']}")
from train import main, Settings
from fusedgpt.errors import one_sentence
with one_sentence():
    main(Settings(**eval(sys.argv[1])))
"""


def test_ranks_with_other_data_are_named(tmp_path, data):
    # nodes may have different copies, and nothing compared them: half of each step was another text
    for rank in range(2):
        shutil.copytree(data, tmp_path / f"node-{rank}" / "walk")
    (tmp_path / "run.py").write_text(NODE)
    settings = small(tmp_path / "out", "walk", gradient_accumulation_steps=2, max_iters=2)
    prefix = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = ["sh", "-c", f'cd {tmp_path} && exec "$@"', "sh", *prefix]
    bin = tmp_path / "node-1" / "walk" / "train.bin"
    np.fromfile(bin, "<u2")[::-1].tofile(bin)
    done = process("run.py", vars(settings), prefix=command, check=False, PYTHONPATH=str(ROOT))
    assert done.returncode != 0  # the status and the traceback are torchrun's
    assert (
        "error: rank(s) 1 of 2 have other data than rank 0 (train.bin): copy walk from the node of rank 0"
        in done.stderr
    )


@pytest.mark.parametrize("name", ["meta.json", "meta.pkl", None])
def test_data_of_one_size_are_told_apart_with_and_without_a_meta(tmp_path, name):
    # shards of 100 million tokens each have one size, and nanoGPT's metas no SHA-256
    walk = np.cumsum(np.random.default_rng(0).integers(-3, 4, 300_000)) % 65
    for n, ids in enumerate((walk, walk, walk[::-1])):
        options = dict(source=f"text {n}", tokenizer="char", vocab_size=65, itos=[chr(33 + i) for i in range(65)])
        prepare.write(tmp_path / str(n), {"train": [ids[:-9]], "val": [ids[-9:]]}, **options)
        if name != "meta.json":
            (tmp_path / str(n) / "meta.json").unlink()
        if name == "meta.pkl":
            (tmp_path / str(n) / name).write_bytes(pickle.dumps({"vocab_size": 65}))
    compared(tmp_path / "0", tmp_path / "1")
    with pytest.raises(
        UserError, match=r"^rank\(s\) 2, 3 of 4 have other data than rank 0 \(train.bin, val.bin\): copy"
    ):
        compared(tmp_path / "0", tmp_path / "1", tmp_path / "2", tmp_path / "2")


def test_the_same_ids_with_other_characters_are_other_data(tmp_path, data):
    other = shutil.copytree(data, tmp_path / "other")
    meta = json.loads((data / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"source": "where this node has it"}))
    compared(data, other)
    (other / "meta.json").write_text(json.dumps(meta | {"itos": meta["itos"][::-1]}))
    with pytest.raises(UserError, match=r"rank\(s\) 1 of 2 have other data than rank 0 \(what the ids mean\)"):
        compared(data, other)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_what_is_no_regular_file_is_named(tmp_path):
    # a FIFO used to be waited for for ever, and a folder gave a traceback
    os.mkfifo(tmp_path / "train.bin")
    (tmp_path / "val.bin").mkdir()
    (tmp_path / "test.bin").symlink_to("/dev/zero")
    for split in ("train", "val", "test"):
        with pytest.raises(UserError, match=f"{split}.bin is no regular file, but a folder, a pipe or a device"):
            TokenFile(tmp_path, split, {"vocab_size": 50})
    for name in ("meta.pkl", "meta.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} is no regular file"):
            read_meta(tmp_path)


def test_a_bin_that_shrinks_is_named(tmp_path):
    # it used to be a ValueError about shapes that cannot be broadcast
    np.arange(5000, dtype="<u2").tofile(tmp_path / "train.bin")
    file = TokenFile(tmp_path, "train", {"vocab_size": 5000})
    os.truncate(tmp_path / "train.bin", 2 * 4000)
    assert file.window(3990, 10)[-1] == 3999
    with pytest.raises(UserError, match=r"train.bin has become shorter while it was read"):
        file.window(3990, 11)


def gpt2_bins(folder, **ids):
    """A folder with neither meta: `train` and `val` are one id each, 200 times."""
    for split, id in ids.items():
        np.full(200, id, "<u2").tofile(folder / f"{split}.bin")
    return folder


def test_ids_that_only_nanogpts_padding_has_are_named_with_what_to_set(tmp_path):
    # the message did not say that nanoGPT's own default is 50304
    folder = gpt2_bins(tmp_path, train=50303, val=1)
    with pytest.raises(UserError, match=r"holds the id 50303.*no meta.json.*set --vocab_size=50304"):
        run(tmp_path / "out", folder, max_iters=1)
    assert len(rows(run(tmp_path / "out", folder, max_iters=1, vocab_size=50304))) == 1


@pytest.mark.parametrize(("id", "meta"), [(50304, None), (50300, {**GPT2, "tokens": {"train": 200, "val": 200}})])
def test_other_ids_that_are_too_large_are_another_tokenizers(tmp_path, id, meta):
    folder = gpt2_bins(tmp_path, train=id, val=1)
    if meta:
        (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="made with another tokenizer"):
        run(tmp_path / "out", folder, max_iters=1)


# metas


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"itos": {0: "a"}, "stoi": Evil()}, "which is code"),  # T14: a pickle can run anything
        ({"vocab_size": np.float64(65)}, "it holds a numpy float64, which is no whole number"),
        ({"vocab_size": 65, "itos": np.arange(65)}, r"(_reconstruct|_frombuffer), which is code"),
        ({"vocab_size": np.int64, "itos": {0: "a"}}, "numpy.int64, which is code"),
        ({"vocab_size": Evil()}, "system, which is code"),
        ([65], "has no attribute 'get'"),  # this one and the next used to be a loop until the memory is full
        ({"vocab_size": 10**30, "itos": {0: "a"}}, "vocab_size=1000000000000000000000000000000 must be"),
        ({"itos": {0: "\ud800"}}, "itos must hold characters of UTF-8"),
    ],
    ids=["code", "a float", "an array", "a type", "a command", "a list", "huge", "half a character"],
)
def test_a_meta_pkl_runs_no_code_and_numpys_integers_open_the_door_to_nothing_else(
    tmp_path, monkeypatch, content, reason
):
    # T14: to admit all of numpy's module for the sake of its integers would admit its functions too
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=rf"no nanoGPT meta.pkl \(.*{reason}.*\): run a data"):
        read_meta(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_nine_damaged_bytes_do_not_fill_the_memory(tmp_path):
    # pickle's C code makes room for 2**31 objects here: 17 GB, for a minute
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04}r\x00\x00\x00\x40.")
    before = memory.peak_memory(torch.device("cpu"))
    with pytest.raises(UserError, match=r"no nanoGPT meta\.pkl"):
        read_meta(tmp_path)
    assert memory.peak_memory(torch.device("cpu")) - before < 1 << 28


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,  # a RecursionError, and so on: each used to be a traceback
        '{"tokenizer": "byte", "vocab_size": 256, "tokens": []}',
        '{"tokenizer": "byte", "vocab_size": 256, "dtype": []}',
        '{"tokenizer": "unknown", "vocab_size": 0}',
        '{"tokenizer": "unknown", "vocab_size": 9, "end_of_text": "9"}',
    ],
    ids=lambda text: text[:60],
)
def test_a_damaged_meta_is_named(tmp_path, text):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(UserError, match=r"meta\.json"):
        read_meta(tmp_path)


@pytest.mark.skipif(bool(why_no_bpe()), reason="GPT-2's BPE files are not here (set TIKTOKEN_CACHE_DIR)")
def test_ids_that_only_pad_gpt2s_are_no_error_in_sampling(tmp_path, capsys):
    # T15: GPT-2's BPE has no text for them, and used to fail on the first one drawn
    for split in ("train", "val"):
        np.tile([0, 50303], 200).astype("<u2").tofile(tmp_path / f"{split}.bin")
    out_dir = run(tmp_path / "out", tmp_path, max_iters=20, vocab_size=50304)
    capsys.readouterr()
    drawn(out_dir, start="!", temperature=0.0)  # "!" is id 0: 50303 is the likeliest to follow
    assert capsys.readouterr().out.count("\n---------------\n") == 1


# nanoGPT's meta.pkl, as other people's prepare scripts write it

ITOS = {i: chr(33 + i) for i in range(65)}
STOI = {c: i for i, c in ITOS.items()}
NUMPYS = {"vocab_size": np.int64(65), "itos": ITOS, "stoi": STOI}
GAPS = {i: c for i, c in ITOS.items() if i not in (3, 40)}


def nanogpts_folder(tmp_path, data, pickled):
    """The bins of `data` with a meta.pkl."""
    for name in ("train.bin", "val.bin"):
        shutil.copy(data / name, tmp_path)
    (tmp_path / "meta.pkl").write_bytes(pickled)
    return tmp_path


@pytest.mark.parametrize(
    ("pickled", "characters"),
    [
        (pickle.dumps({"vocab_size": 65}), None),
        (pickle.dumps(NUMPYS), ITOS),
        (pickle.dumps(NUMPYS, protocol=3).replace(b"numpy._core", b"numpy.core"), ITOS),
        (pickle.dumps({"vocab_size": 65, "stoi": STOI}), ITOS),
        (pickle.dumps({"vocab_size": 65, "itos": GAPS, "stoi": {c: i for i, c in GAPS.items()}}), GAPS),
        (pickle.dumps({"itos": {np.uint16(i): c for i, c in ITOS.items()}}), ITOS),
    ],
    ids=["vocab_size alone", "numpy's integer", "numpy 1's", "stoi without itos", "gaps", "ids that are numpy's"],
)
def test_what_nanogpt_trains_on_is_read(tmp_path, pickled, characters):
    # nanoGPT's train.py reads vocab_size alone; each of these used to end the run
    (tmp_path / "meta.pkl").write_bytes(pickled)
    meta = read_meta(tmp_path)
    assert meta["vocab_size"] == 65 and type(meta["vocab_size"]) is int
    if characters:
        assert Tokenizer(meta).tokens == [characters[i].encode() if i in characters else None for i in range(65)]


def test_without_itos_a_run_trains_and_sampling_says_what_is_missing(tmp_path, data):
    # it used to be "no nanoGPT meta.pkl: 'itos'"
    folder = nanogpts_folder(tmp_path, data, pickle.dumps({"vocab_size": 65}))
    with pytest.raises(UserError, match=r"meta.pkl has no itos .*sampling needs itos"):
        drawn(run(tmp_path / "out", folder, max_iters=1))


def test_ids_without_a_character_are_counted_and_shown(tmp_path, data, capsys):
    folder = nanogpts_folder(tmp_path, data, pickle.dumps({"vocab_size": 65, "itos": GAPS}))
    out_dir = run(tmp_path / "out", folder, max_iters=1)
    capsys.readouterr()
    drawn(out_dir)
    _, said, text = capsys.readouterr().out.split("\n", 2)
    assert "no character for 2 ids, such as 3" in said
    assert [len(t) for t in text.split("\n---------------\n")] == [41] * 8 + [0]
    assert set(text) - {"\n", "-"} <= {*GAPS.values(), "\ufffd"} and "\ufffd" in text
    with pytest.raises(UserError, match="the training text has no '\\$'"):  # id 3
        drawn(out_dir, start="$")


def test_a_meta_json_without_characters_trains_and_says_what_sampling_needs(tmp_path):
    # export.py writes one for a run on a meta.pkl that has vocab_size only; it used to be called damaged
    meta = {"tokenizer": "unknown", "vocab_size": 65}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert read_meta(tmp_path) == meta
    with pytest.raises(UserError, match="sampling needs itos"):
        Tokenizer(read_meta(tmp_path))


def test_a_run_goes_on_with_its_own_ids_only(tmp_path, data):
    # a run used to go on in silence with data of another tokenizer, in which every id is another text
    run(tmp_path / "out", data, max_iters=5)
    meta = json.loads((data / "meta.json").read_text())
    for name, itos in (("same", meta["itos"]), ("more", [*meta["itos"], "é"]), ("other", meta["itos"][::-1])):
        ids = np.arange(2000) % 65
        own = dict(tokenizer="char", vocab_size=len(itos), itos=itos)
        prepare.write(tmp_path / name, {"train": [ids], "val": [ids]}, name, **own)
    run(tmp_path / "out", tmp_path / "same", max_iters=6, init_from="resume")
    check_same_ids(read_meta(tmp_path / "more"), read_meta(data), print)  # as far as both have ids
    with pytest.raises(UserError, match=r"stand for other texts than .* \(each with other tokens\): prepare the data"):
        run(tmp_path / "out", tmp_path / "other", max_iters=7, init_from="resume")
    with pytest.raises(UserError, match="now byte, then char"):
        check_same_ids({"tokenizer": "byte", "vocab_size": 256}, read_meta(data), print)
    check_same_ids({"tokenizer": "unknown", "vocab_size": 65}, read_meta(data), print)


def test_pretrained_weights_go_on_with_their_own_ids_only(tmp_path, data, capsys):
    # in silence, it gave 10.6 bits per byte in place of 2.95
    run(tmp_path / "out", data, max_iters=5)
    export.main(tmp_path / "out", tmp_path / "hf")
    meta = json.loads((data / "meta.json").read_text())
    ids = np.arange(2000) % 65
    own = dict(tokenizer="char", vocab_size=65, itos=meta["itos"][::-1])
    prepare.write(tmp_path / "other", {"train": [ids], "val": [ids]}, "other", **own)
    tuned = dict(init_from=str(tmp_path / "hf"), max_iters=1)
    with pytest.raises(UserError, match=r"stand for other texts than those that the weights were trained on"):
        run(tmp_path / "tuned", tmp_path / "other", **tuned)
    run(tmp_path / "tuned", data, **tuned)
    (tmp_path / "hf" / "meta.json").unlink()  # as transformers leaves the model if it saves it again
    capsys.readouterr()
    run(tmp_path / "tuned", tmp_path / "other", **tuned)
    assert "were trained on the data's ids: tokenizer_json is not byte-level" in capsys.readouterr().out
    (tmp_path / "hf" / "tokenizer.json").unlink()
    run(tmp_path / "tuned", tmp_path / "other", **tuned)
    assert "the data's ids: it has no tokenizer.json and no meta.json" in capsys.readouterr().out


def test_ids_of_files_that_cannot_be_downloaded_are_taken_to_be_the_same(monkeypatch):
    # otherwise a node without a network could not train
    monkeypatch.setattr(tokenizer, "tiktoken_bpe", lambda name: (_ for _ in ()).throw(UserError("no network")))
    said = []
    check_same_ids(GPT2, {"tokenizer": "byte", "vocab_size": 256}, said.append)
    assert said == ["cannot tell whether the weights were trained on the data's ids: no network"]
    with pytest.raises(UserError, match=r"no tokenizer\.json of `tokenizers`"):
        check_same_ids({"tokenizer": "json", "vocab_size": 9, "tokenizer_json": {}}, GPT2, said.append)


def test_two_forms_of_one_tokenizer_have_the_same_ids():
    if reason := why_no_bpe():
        pytest.skip(reason)
    theirs = json.loads(tokenizer_json.tokenizer(GPT2, 1024).backend_tokenizer.to_str())
    check_same_ids({"tokenizer": "json", "vocab_size": 50257, "tokenizer_json": theirs}, GPT2, print)
