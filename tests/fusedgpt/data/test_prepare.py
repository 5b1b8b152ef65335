"""What the prepare scripts share: documents are split, and bins are written whole or not at all."""

import argparse
import functools
import itertools
import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest

from fusedgpt.data import corpus, dataset, encoding, make_tokenizer, prepare
from fusedgpt.data.corpus import Files
from fusedgpt.data.dataset import TokenFile, read_meta
from fusedgpt.errors import UserError
from tests.launch import FORKS


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_a_preparation_that_fails_keeps_the_old_one(tmp_path, monkeypatch, last):
    # val.bin was replaced before train.bin was on the disk
    options = dict(source="x", tokenizer="byte", vocab_size=256)
    prepare.write(tmp_path, {"train": [[1, 2]], "val": [[3]]}, **options)
    before, synced = {f.name: f.read_bytes() for f in tmp_path.iterdir()}, itertools.count(1)
    with pytest.raises(UserError, match="val split is empty"):
        prepare.write(tmp_path, {"train": [[9, 9]], "val": []}, **options)

    def fsync(file):
        if next(synced) >= last:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="Input/output"):
        prepare.write(tmp_path, {"train": [[9, 9]], "val": [[9]]}, **options)
    assert before == {f.name: f.read_bytes() for f in tmp_path.iterdir()}


@pytest.mark.parametrize("id", [2**16 + 5, 256, -1, -(2**16)])
def test_an_id_beyond_the_vocabulary_is_not_written(tmp_path, id):
    # 65541 became 5
    with pytest.raises(UserError, match=f"x has the id {id}: with vocab_size=256, ids are from 0 to 255"):
        prepare.write(tmp_path, {"train": [[1, id]], "val": [[255]]}, source="x", tokenizer="byte", vocab_size=256)
    assert not list(tmp_path.iterdir())


CHANGES = ("fsync", "replace", "rename", "unlink")


def killed_at(count, folder, splits):
    """Prepare `splits` in another process, which dies before its `count`-th change of the disk."""
    calls = itertools.count(1)

    def dying(call):
        def counted(*args, **kwargs):
            if next(calls) == count:
                os._exit(9)
            return call(*args, **kwargs)

        return counted

    for name in CHANGES:
        setattr(os, name, dying(getattr(os, name)))
    prepare.write(folder, splits, source="x", tokenizer="byte", vocab_size=256)
    os._exit(0)


def bins_of(folder):
    """What a run that starts now trains on: the bins, if it accepts them, and their meta."""
    meta = read_meta(folder)
    found = {split: TokenFile(folder, split, meta).window(0, 2).tolist() for split in ("train", "val")}
    return found, meta.get("tokenizer"), meta.get("sha256")


@pytest.mark.parametrize(
    "before", ["ours", *(pytest.param(each, marks=pytest.mark.slow) for each in ("nanoGPT's", "nothing"))]
)
def test_bins_of_two_preparations_are_never_taken_together(tmp_path, before):
    # a kill between renames left new bins of the same size under the old meta.json, and a run trained on them
    old, new = ({"train": [[n, n]], "val": [[n, n + 1]]} for n in (1, 5))
    found = {}
    for count in range(1, 100):
        folder = tmp_path / str(count)
        folder.mkdir()
        if before != "nothing":
            prepare.write(folder, old, source="x", tokenizer="byte", vocab_size=256)
        if before == "nanoGPT's":  # which means GPT-2's ids
            (folder / "meta.json").unlink()
        allowed = [bins_of(folder)] if before != "nothing" else []
        child = FORKS.Process(target=killed_at, args=(count, folder, new))
        child.start()
        child.join(60)
        try:
            found[count] = bins_of(folder)
        except UserError as error:
            found[count] = str(error)
        prepare.write(folder, new, source="x", tokenizer="byte", vocab_size=256)
        allowed.append(bins_of(folder))
        refused = isinstance(found[count], str) and ("interrupted" in found[count] or before == "nothing")
        assert found[count] in allowed or refused, f"stopped at change {count}: {found[count]}"
        assert sorted(os.listdir(folder)) == ["meta.json", "train.bin", "val.bin"]
        if child.exitcode == 0:
            break
    assert count > 6 and found[1] != found[count] and any("interrupted" in each for each in found.values())


def test_a_source_whose_name_is_no_utf8_is_written(tmp_path):
    # it was a traceback, after the bins were replaced
    splits = {"train": [[1, 2]], "val": [[3]]}
    prepare.write(tmp_path, splits, source=os.fsdecode(b"b\xffok.txt"), tokenizer="byte", vocab_size=256)
    assert json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))["source"] == "b?ok.txt"


def tokens(split):
    return {name: int(np.diff(ranges).sum()) for name, ranges in split.items()}


def test_a_single_document_is_split_as_nanogpt_does():
    for n in (100, 1_115_394, 12_345_677):
        assert prepare.draw(np.array([n]), 0.1)["val"].tolist() == [[int(0.9 * n), n]]


@pytest.mark.parametrize("shuffled", [False, True])
def test_documents_that_follow_each_other_are_one_range(shuffled):
    ends = np.cumsum([3, 0, 5, 2, 4, 1, 6, 2, 2, 5])
    documents = np.stack([np.append(0, ends[:-1]), ends], axis=1)
    order = np.random.default_rng(2357).permutation(10)  # held out: the first three
    for name, part in (("val", order[:3]), ("train", order[3:])):
        found = prepare.draw(ends, 0.3, shuffled)[name]
        ids = np.concatenate([np.arange(*each) for each in documents[part if shuffled else np.sort(part)]])
        assert np.array_equal(np.concatenate([np.arange(*each) for each in found]), ids)
        assert all(stop != start for (_, stop), (start, _) in itertools.pairwise(found.tolist()))


@pytest.mark.parametrize(("shuffled", "size"), [(False, 34), (True, 80)])
def test_a_draw_takes_little_memory_for_a_document(shuffled, size):
    # it took 58 bytes in order: 1 GB of rows of 60 bytes took more than 1 GB
    ends = np.arange(1, 10**6) * 60
    tracemalloc.start()
    try:
        prepare.draw(ends, 0.1, shuffled)
        assert tracemalloc.get_traced_memory()[1] < size * len(ends)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fraction", [0.0005, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("lengths", [[300_000], [300_000, 10, 10], [10] * 5 + [300_000], [20_000] * 15, [50] * 7])
def test_validation_can_always_be_evaluated(lengths, fraction):
    # 1.1 MB of text in a folder once had 48 tokens for validation, and a draw can hit the one large document
    split = tokens(prepare.draw(np.cumsum(lengths), fraction))
    share = max(fraction, min(0.1, 4096 / sum(lengths)))
    assert split["train"] + split["val"] == sum(lengths)
    assert share / 2.01 <= split["val"] / sum(lengths) <= 2.01 * share
    assert split["train"] / sum(lengths) >= (1 - share) / 2.01


@pytest.mark.parametrize("text", ["0", "1", "-0.1", "nan", "a tenth"])
def test_a_fraction_is_between_0_and_1(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not between 0 and 1"):
        prepare.fraction(text)


def test_local_texts_are_checked_before_bpe_files_are_downloaded(tmp_path, monkeypatch):
    # without a network, the error for an RTF was about BPE files, and only that of the next try about the RTF
    def offline(name):
        raise UserError("cannot load the BPE files")

    monkeypatch.setattr(make_tokenizer, "tiktoken_bpe", offline)
    (tmp_path / "a.txt").write_text(r"{\rtf1 text}")
    split = functools.partial(prepare.draw, fraction=0.1)
    with pytest.raises(UserError, match=r"rich text \(RTF\)"):
        prepare.prepare(Files([tmp_path / "a.txt"]), "gpt2", tmp_path / "out", split)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"the BPE files, or give .* --tokenizer=byte or --tokenizer=train:2048"):
        prepare.prepare(Files([tmp_path / "a.txt"]), "gpt2", tmp_path / "out", split)


def test_a_hub_data_set_is_downloaded_after_the_bpe_files(tmp_path, monkeypatch):
    def offline(name):
        raise UserError("cannot load the BPE files")

    monkeypatch.setattr(make_tokenizer, "tiktoken_bpe", offline)
    monkeypatch.setattr(corpus.Hub, "check", lambda hub: pytest.fail("it downloads the data set"))
    with pytest.raises(UserError, match="BPE files"):
        prepare.prepare(
            corpus.Hub("far", False, path="far"), "gpt2", tmp_path, functools.partial(prepare.draw, fraction=0.1)
        )


def test_what_an_interrupted_run_has_counts_with_another_max_tokens(tmp_path, monkeypatch):
    # the same command with --max_tokens used to delete hours of work on FineWeb
    monkeypatch.setattr(corpus, "CHECKED_FIRST", 0)  # as if the text were large
    monkeypatch.setattr(encoding, "BATCH", 500)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    rows = [json.dumps({"text": f"document {n}"}) for n in range(600)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, "{"]))  # interrupted at its end

    def prepared(**options):
        split = functools.partial(prepare.draw, fraction=0.1)
        prepare.prepare(Files([tmp_path / "rows.jsonl"]), "byte", tmp_path / "out", split, **options)

    with pytest.raises(UserError, match="cannot read after row 600"):
        prepared()
    monkeypatch.setattr(Files, "fragments", lambda files: pytest.fail("it has 1000 tokens already"))
    prepared(max_tokens=1000)
    assert 1000 <= sum(json.loads((tmp_path / "out" / "meta.json").read_text())["tokens"].values()) < 1020


def test_characters_are_in_nanogpts_meta_pkl_too_and_that_of_other_data_goes(tmp_path):
    # notebooks open it; nanoGPT took data that were prepared here for GPT-2's ids
    ids = [np.arange(3)]
    prepare.write(tmp_path, {"train": ids, "val": ids}, "text", "char", 4, itos=["a", "b", "é", None], end_of_text=3)
    kept = pickle.loads((tmp_path / "meta.pkl").read_bytes())
    assert kept == {"vocab_size": 4, "itos": {0: "a", 1: "b", 2: "é"}, "stoi": {"a": 0, "b": 1, "é": 2}}
    assert dataset.read_meta(tmp_path)["end_of_text"] == 3  # meta.json counts
    prepare.write(tmp_path, {"train": ids, "val": ids}, "text", "byte", 256)
    assert not (tmp_path / "meta.pkl").exists()
