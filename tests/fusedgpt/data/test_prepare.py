"""What the prepare scripts share: documents are split, and bins are written whole or not at all."""

import hashlib
import itertools
import os
import pickle

import numpy as np
import pytest

from fusedgpt.data import dataset, prepare
from fusedgpt.data.encoding import DOCUMENT
from fusedgpt.errors import UserError


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_a_preparation_that_fails_keeps_the_old_one(tmp_path, monkeypatch, last):
    # val.bin was replaced before train.bin was on the disk
    options = dict(source="x", tokenizer="byte", vocab_size=256)
    prepare.write(tmp_path, {"train": [[1, 2]], "val": [[3, 3]]}, **options)
    before, synced = {f.name: f.read_bytes() for f in tmp_path.iterdir()}, itertools.count(1)

    def fsync(file):
        if next(synced) >= last:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="Input/output"):
        prepare.write(tmp_path, {"train": [[9, 9]], "val": [[9, 9]]}, **options)
    assert before == {f.name: f.read_bytes() for f in tmp_path.iterdir()}


def test_a_long_text_is_proposed_without_dropout(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the data are: not in data/text
    prepare.write("text", {"train": [[0] * 300_000], "val": []}, "x", "byte", 256, "config/train_text_cpu.py")
    assert f"train_text_cpu.py --dataset={tmp_path}/text\n" in capsys.readouterr().out.replace("'", "")


def test_an_id_beyond_the_vocabulary_is_not_written(tmp_path):
    for id in (2**16 + 5, 256, -1):  # the first became 5
        with pytest.raises(UserError, match=f"x has ids from .*{id}.*: vocab_size is 256"):
            prepare.write(tmp_path, {"train": [[1, id]], "val": [[255]]}, source="x", tokenizer="byte", vocab_size=256)


def test_bins_of_two_preparations_are_never_taken_together(tmp_path, monkeypatch):
    # a kill between renames left new bins of the same size under the old meta.json, and a run trained on them
    options, replace = dict(source="x", tokenizer="byte", vocab_size=256), os.replace
    prepare.write(tmp_path, {"train": [[1, 2]], "val": [[3, 3]]}, **options)

    def killed(source, target):
        replace(source, target)
        if target.name == "val.bin":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare.write(tmp_path, {"train": [[9, 8]], "val": [[8, 9]]}, **options)
    meta = dataset.read_meta(tmp_path)
    files = {split: dataset.TokenFile(tmp_path, split, meta) for split in dataset.SPLITS}
    with pytest.raises(UserError, match=r"is not the file that meta\.json describes"):
        dataset.check_bins(files, meta, whole=False)


def of(lengths, texts=None):
    """Documents of so many ids; each has a text of its own, or that of `texts`."""
    found = np.zeros(len(lengths), DOCUMENT)
    found["end"] = np.cumsum(lengths)
    for n, text in enumerate(texts or map(str, range(len(lengths)))):
        found["digest"][n] = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return found


def chosen(split, documents):
    """The numbers of the documents for validation."""
    starts = np.append(0, documents["end"][:-1])
    return [n for n, start in enumerate(starts) if any(first <= start < last for first, last in split["val"])]


def test_a_single_document_is_split_as_nanogpt_does():
    for n in (100, 1_115_394, 12_345_677):
        assert prepare.by_text(of([n]), 0.1)["val"].tolist() == [[int(0.9 * n), n]]
    assert len(chosen(prepare.as_nanogpt(each := of([3000] * 2200), 0.0005), each)) == 2  # as `datasets` rounds


def test_a_document_keeps_its_split_when_others_come():
    # 12 of 20 documents for validation had been trained on after one file more
    texts = [f"text {n}" for n in range(2000)]
    before, after = of([100] * 2000, texts), of([100] * 3003, [f"new {n}" for n in range(1003)] + texts)
    first, then = (chosen(prepare.by_text(each, 0.1), each) for each in (before, after))
    assert [n + 1003 for n in first] == [n for n in then if n >= 1003] and 150 < len(first) < 250


@pytest.mark.parametrize("fraction", [0.0005, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("lengths", [[300_000], [300_000, 10, 10], [10] * 5 + [300_000], [20_000] * 15, [50] * 7])
def test_validation_can_always_be_evaluated(lengths, fraction):
    # 1.1 MB of text in a folder once had 48 tokens for validation, and a draw can hit the one large document
    split = {name: int(np.diff(ranges).sum()) for name, ranges in prepare.by_text(of(lengths), fraction).items()}
    share = max(fraction, min(0.1, 4096 / sum(lengths)))
    assert split["train"] + split["val"] == sum(lengths)
    assert share / 2.01 <= split["val"] / sum(lengths) <= 2.01 * share
    assert split["train"] / sum(lengths) >= (1 - share) / 2.01


def test_characters_are_in_nanogpts_meta_pkl_too_and_that_of_other_data_goes(tmp_path):
    # notebooks open it; nanoGPT took data that were prepared here for GPT-2's ids
    ids = [np.arange(3)]
    prepare.write(tmp_path, {"train": ids, "val": ids}, "text", "char", 4, itos=["a", "b", "é", None], end_of_text=3)
    kept = pickle.loads((tmp_path / "meta.pkl").read_bytes())
    assert kept == {"vocab_size": 4, "itos": {0: "a", 1: "b", 2: "é"}, "stoi": {"a": 0, "b": 1, "é": 2}}
    assert dataset.read_meta(tmp_path)["end_of_text"] == 3  # meta.json counts
    prepare.write(tmp_path, {"train": ids, "val": ids}, "text", "byte", 256)
    assert not (tmp_path / "meta.pkl").exists()
