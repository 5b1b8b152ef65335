"""Data folders, their bins, and ranks that must have the same ones."""

import contextlib
import functools
import json
import os
import pickle
import shutil
from unittest import mock

import numpy as np
import pytest

from fusedgpt.data import dataset, prepare
from fusedgpt.data.dataset import TokenFile, find_folder, read_meta, require_same_data
from fusedgpt.data.tokenizer import GPT2
from fusedgpt.errors import UserError
from tests.conftest import flags, rows, run, small
from tests.launch import ranks


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


def test_a_bin_that_is_not_the_one_of_its_meta_is_named(tmp_path, data, monkeypatch):
    # a run trained on bins of the same size that somebody had replaced
    folder = shutil.copytree(data, tmp_path / "data")
    meta, said = read_meta(folder), []

    def checked(whole=False):
        dataset.check_bins({"train": TokenFile(folder, "train", meta)}, meta, whole, said.append)

    checked(whole=True)
    ids, times = np.fromfile(folder / "train.bin", "<u2"), (folder / "train.bin").stat()
    os.utime(folder / "train.bin")  # a copy is newer, and the same
    checked()
    ids[[0, -1]] = ids[[-1, 0]]
    ids[5] ^= 1
    ids.tofile(folder / "train.bin")
    wrong = r"train\.bin is not the file that meta\.json describes: its SHA-256 is [0-9a-f]{12}…, not"
    with pytest.raises(UserError, match=wrong):
        run(tmp_path / "out", folder, max_iters=1)
    monkeypatch.setattr(dataset, "CHECKED_AT_ONCE", 10)
    checked()
    assert said == [f"{folder}/train.bin is newer than its meta.json: --check_data=True tells whether it is the same"]
    os.utime(folder / "train.bin", ns=(times.st_mtime_ns, times.st_mtime_ns))
    checked()  # as old as before: only its SHA-256 tells
    with pytest.raises(UserError, match=wrong):
        run(tmp_path / "out", folder, max_iters=1, check_data=True)


@contextlib.contextmanager
def on_a_node(nodes):
    """In this rank, each data set is that of its node."""
    own = nodes / os.environ["RANK"]
    with mock.patch.object(dataset, "find_folder", lambda root, name: own / name):
        yield


def test_ranks_with_other_data_are_named(tmp_path, data):
    # nodes may have different copies, and nothing compared them: half of each step was another text
    for rank in range(2):
        shutil.copytree(data, tmp_path / str(rank) / "walk")
    bin = tmp_path / "1" / "walk" / "train.bin"
    np.fromfile(bin, "<u2")[::-1].tofile(bin)
    os.utime(bin, (0, 0))  # as old as it says: its SHA-256 is not looked at
    settings = flags(small(tmp_path / "out", "walk", gradient_accumulation_steps=2, max_iters=2))
    done = ranks(2, "train.py", *settings, inside=functools.partial(on_a_node, tmp_path), check=False)
    assert done.returncode == 1
    assert f"error: rank(s) 1 of 2 have other data than rank 0 (train.bin): copy {tmp_path}" in done.stderr


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
    said = r"^rank\(s\) 2, 3 of 4 have other data than rank 0 \(train.bin, val.bin\): copy"
    with pytest.raises(UserError, match=said):
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
