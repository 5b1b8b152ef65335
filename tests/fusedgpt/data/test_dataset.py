"""Data folders, their bins, and ranks that must have the same ones."""

import os
import pickle
import shutil

import numpy as np
import pytest

from fusedgpt.data import dataset, prepare
from fusedgpt.data.dataset import TokenFile, read_meta, require_same_data
from fusedgpt.errors import UserError
from tests.conftest import run


def test_shards_are_one_stream(tmp_path):
    ids = np.arange(100, dtype="<u2")
    for n, part in enumerate(np.split(ids, [3, 10, 60])):
        part.tofile(tmp_path / f"train_{n:04}.bin")
    file = TokenFile(tmp_path, "train", {"vocab_size": 100})
    assert len(file) == 100
    for start, length in ((0, 100), (2, 9), (9, 2), (59, 41), (60, 1), (99, 1)):
        assert file.window(start, length).tolist() == list(range(start, start + length))


@pytest.mark.parametrize("meta", ["meta.json", "meta.pkl", None])
def test_large_vocabularies_take_four_bytes(tmp_path, meta):
    # uint32 was read as uint16: twice as many ids, each of which was in the vocabulary
    ids = np.arange(70_000, 70_100)
    prepare.write(tmp_path, {"train": [ids], "val": [ids]}, "big", tokenizer="byte", vocab_size=100_277)
    if meta != "meta.json":
        (tmp_path / "meta.json").unlink()
    if meta == "meta.pkl":
        (tmp_path / meta).write_bytes(pickle.dumps({"vocab_size": 100_277}))
    assert TokenFile(tmp_path, "train", read_meta(tmp_path, 100_277)).window(0, 100).tolist() == ids.tolist()


U2 = np.arange(10, dtype="<u2").tobytes()


@pytest.mark.parametrize(
    ("files", "tokens", "said"),
    [
        ({}, None, r"train.bin does not exist.*prepare.py"),
        ({"train.bin": U2 + b"0"}, None, r"train.bin is truncated.* 21 bytes, not 20"),
        ({"train.bin": U2}, 80, r"truncated.* 20 bytes, not 160"),
        ({"train_0000.bin": U2 + b"0", "train_0001.bin": U2[1:]}, None, "truncated.* 40 bytes"),
        ({"train_0001.bin": U2, "train_0002.bin": b"\x3c\0" * 10}, 20, "train_0002.bin holds the id 60, but the voc"),
    ],
)
def test_bad_bins_are_named(tmp_path, files, tokens, said):
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    meta = {"vocab_size": 50} | ({"tokens": {"train": tokens}} if tokens else {})
    with pytest.raises(UserError, match=said):
        TokenFile(tmp_path, "train", meta).window(0, 20)


def test_a_bin_that_is_not_the_one_of_its_meta_is_named(tmp_path, data):
    # a run trained on bins of the same size that somebody had replaced
    folder = shutil.copytree(data, tmp_path / "data")
    meta = read_meta(folder)

    def checked():
        dataset.check_bins({"train": TokenFile(folder, "train", meta)}, meta, whole=False)

    ids, times = np.fromfile(folder / "train.bin", "<u2"), (folder / "train.bin").stat()
    os.utime(folder / "train.bin")  # a copy is newer, and the same
    checked()
    ids[5] ^= 1
    ids.tofile(folder / "train.bin")
    os.utime(folder / "train.bin", ns=(2 * times.st_mtime_ns,) * 2)  # two files can be of one tick of the clock
    wrong = r"train\.bin is not the file that meta\.json describes, its SHA-256 is [0-9a-f]{12}…: run a data"
    with pytest.raises(UserError, match=wrong):
        run(tmp_path / "out", folder, max_iters=1)
    os.utime(folder / "train.bin", ns=(times.st_mtime_ns, times.st_mtime_ns))
    checked()  # as old as before: only its SHA-256 tells
    with pytest.raises(UserError, match=wrong):
        run(tmp_path / "out", folder, max_iters=1, check_data=True)


def test_ranks_with_other_data_are_named(tmp_path):
    # nodes may have different copies, and nothing compared them: half of each step was another text
    ids = np.arange(900) % 65

    def described(rank, meta=None, others=()):
        meta, values = meta or read_meta(tmp_path / str(rank)), []
        files = {"train": TokenFile(tmp_path / str(rank), "train", meta)}
        require_same_data(files, meta, lambda value: values.append(value) or [value, *others])
        return values[0]

    for rank, text in enumerate((ids, ids, ids[::-1], np.tile(ids, 2))):
        prepare.write(tmp_path / str(rank), {"train": [text], "val": [ids]}, f"text {rank}", "byte", vocab_size=256)
    assert described(0) == described(1) != described(2)
    nanogpts = {"vocab_size": 256}  # without a SHA-256
    assert described(0, nanogpts) == described(2, nanogpts) != described(3, nanogpts)
    with pytest.raises(UserError, match=rf"^rank\(s\) 2 of 3 have other data than rank 0: copy {tmp_path / '0'}"):
        described(0, others=[described(1), described(2)])
