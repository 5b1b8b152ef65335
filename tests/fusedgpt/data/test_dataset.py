"""Data folders, their bins, and ranks that must have the same ones."""

import json
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


@pytest.mark.parametrize("meta", ["meta.json", "meta.pkl", None, "written here"])
def test_large_vocabularies_take_four_bytes(tmp_path, meta):
    # uint32 was read as uint16: twice as many ids, each of which was in the vocabulary
    ids, described = np.arange(70_000, 70_100), {"tokenizer": "unknown", "vocab_size": 100_277}
    if meta == "written here":
        prepare.write(tmp_path, {"train": [ids], "val": [ids]}, "big", tokenizer="byte", vocab_size=100_277)
    else:
        ids.astype("<u4").tofile(tmp_path / "train.bin")
        for name, raw in (("meta.json", json.dumps(described).encode()), ("meta.pkl", pickle.dumps(described))):
            if name == meta:
                (tmp_path / name).write_bytes(raw)
    assert TokenFile(tmp_path, "train", read_meta(tmp_path, 100_277)).window(0, 100).tolist() == ids.tolist()


U2 = np.arange(10, dtype="<u2").tobytes()


@pytest.mark.parametrize(
    ("files", "tokens", "said"),
    [
        ({}, None, r"train.bin does not exist.*prepare.py"),
        ({"train.bin": U2 + b"0"}, None, r"truncated.*21 bytes are 10.5 uint16 tokens"),
        ({"train.bin": U2}, 80, r"truncated.*10.0 uint16 tokens, not 80"),
        ({"train_0000.bin": U2, "train_0001.bin": U2[1:]}, None, "truncated.*39 bytes"),
        ({"train_0000.bin": U2, "train_0001.bin": U2}, 30, r"truncated.*20.0 uint16 tokens, not 30"),
        # it was always the first shard; a file of another name is none
        (
            {"train_0001.bin": U2, "train_0002.bin": U2[:-2] + b"\x3c\0", "train_backup.bin": b""},
            20,
            "train_0002.bin holds the id 60, but the vocabulary has 50: .* nanoGPT pads GPT-2's to 50304",
        ),
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

    def checked(whole=False):
        dataset.check_bins({"train": TokenFile(folder, "train", meta)}, meta, whole)

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
    os.utime(folder / "train.bin", ns=(times.st_mtime_ns, times.st_mtime_ns))
    checked()  # as old as before: only its SHA-256 tells
    with pytest.raises(UserError, match=wrong):
        run(tmp_path / "out", folder, max_iters=1, check_data=True)


@pytest.mark.parametrize("part", ["a text of the same length", "a longer text without a meta", "other characters"])
def test_ranks_with_other_data_are_named(tmp_path, part):
    # nodes may have different copies, and nothing compared them: half of each step was another text
    ranks, itos, ids = [], [chr(33 + i) for i in range(65)], np.arange(900) % 65
    for rank in range(3):
        folder, other = tmp_path / str(rank), rank == 2
        text = {"a text of the same length": ids[::-1], "a longer text without a meta": np.tile(ids, 2)}.get(part, ids)
        letters = itos[::-1] if other and part == "other characters" else itos
        options = dict(source=f"text {rank}", tokenizer="char", vocab_size=65, itos=letters)
        prepare.write(folder, {"train": [text if other else ids], "val": [ids]}, **options)
        if "without" in part:  # nanoGPT's
            for path in folder.glob("meta.*"):
                path.unlink()
        meta = read_meta(folder)
        ranks.append(({split: TokenFile(folder, split, meta) for split in ("train", "val")}, meta))
    values = []
    for files, meta in ranks:
        require_same_data(files, meta, lambda value: values.append(value) or [value])
    require_same_data(*ranks[0], lambda value: values[:2])
    with pytest.raises(UserError, match=rf"^rank\(s\) 2 of 3 have other data than rank 0: copy {tmp_path}"):
        require_same_data(*ranks[0], lambda value: values)
