"""Metas, which say what the ids of a data set mean: ours, nanoGPT's, and those of runs that go on."""

import json
import pickle
import shutil

import numpy as np
import pytest
import torch

from fusedgpt.data import tokenizer
from fusedgpt.data.dataset import check_same_ids, meta_of_checkpoint, read_meta
from fusedgpt.data.tokenizer import GPT2, Tokenizer
from fusedgpt.errors import UserError
from tests.conftest import Evil, random_data, run
from tests.fusedgpt.data.test_tokenizer import meta_of


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"itos": {0: "a"}, "stoi": Evil()}, "which is code"),  # T14: a pickle can run anything
        ({"vocab_size": 65, "itos": np.arange(65)}, r"(_reconstruct|_frombuffer), which is code"),
        ({"vocab_size": 10**30, "itos": {0: "a"}}, "vocab_size=1000000000000000000000000000000 must be"),
    ],
    ids=["code", "an array", "huge"],
)
def test_a_meta_pkl_runs_no_code(tmp_path, monkeypatch, content, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=rf"meta.pkl is damaged \(.*{reason}.*\): run a data"):
        read_meta(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_a_damaged_meta_is_named(tmp_path):
    # each used to be a traceback
    for text in ("{", "[" * 100_000, '{"vocab_size": 0}'):
        (tmp_path / "meta.json").write_text(text)
        with pytest.raises(UserError, match=r"meta\.json"):
            read_meta(tmp_path)


def test_data_that_were_never_prepared_here_are_not_taken_for_gpt2s(tmp_path):
    # a nanoGPT model of 65 characters was exported with GPT-2's tokenizer
    saved = {"config": {"dataset": str(tmp_path / "gone")}, "model_args": {"vocab_size": 65}}
    with pytest.raises(UserError, match=r"has 50257 ids, the model 65: put the meta\.pkl of its data there"):
        meta_of_checkpoint(saved)
    assert meta_of_checkpoint(saved | {"model_args": {"vocab_size": 50304}}) == GPT2
    with pytest.raises(UserError, match="is no folder"):  # Llama 3's, say
        meta_of_checkpoint(saved | {"model_args": {"vocab_size": 65536}})


ITOS = {i: chr(33 + i) for i in range(65)}
STOI = {c: i for i, c in ITOS.items()}
NUMPYS = {"vocab_size": np.int64(65), "itos": ITOS, "stoi": STOI}
GAPS = {i: c for i, c in ITOS.items() if i not in (3, 40)}


@pytest.mark.parametrize(
    ("pickled", "characters"),
    [
        (pickle.dumps({"vocab_size": 65}), None),
        (pickle.dumps(NUMPYS), ITOS),
        (pickle.dumps(NUMPYS, protocol=3).replace(b"numpy._core", b"numpy.core"), ITOS),
        (pickle.dumps({"vocab_size": 65, "stoi": STOI}), ITOS),
        (pickle.dumps({"vocab_size": 65, "itos": GAPS, "stoi": {c: i for i, c in GAPS.items()}}), GAPS),
        (pickle.dumps({"itos": {np.uint16(i): c for i, c in ITOS.items()}}), ITOS),
        (pickle.dumps({"itos": dict(enumerate(np.array([*STOI])))}), ITOS),  # no checkpoint of the run could be read
        (pickle.dumps({"vocab_size": 65, "itos": {i: i for i in range(65)}}), None),  # pixels, or moves of chess
    ],
    ids=["vocab_size alone", "an integer", "numpy 1's", "no itos", "gaps", "ids", "text of numpy's", "no text"],
)
def test_what_nanogpt_trains_on_is_read(tmp_path, pickled, characters):
    # nanoGPT's train.py reads vocab_size alone; each of these used to end the run
    (tmp_path / "meta.pkl").write_bytes(pickled)
    meta = read_meta(tmp_path)
    assert meta["vocab_size"] == 65 and type(meta["vocab_size"]) is int
    torch.save(meta, tmp_path / "ckpt.pt")
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True) == meta
    if characters:
        assert Tokenizer(meta).tokens == [characters[i].encode() if i in characters else None for i in range(65)]


def test_a_run_goes_on_with_its_own_ids_only(tmp_path, data):
    # a run used to go on in silence with data of another tokenizer, in which every id is another text
    run(tmp_path / "out", data, max_iters=5)
    meta = json.loads((data / "meta.json").read_text())
    for name, itos in (("same", meta["itos"]), ("more", [*meta["itos"], "é"]), ("other", meta["itos"][::-1])):
        random_data(tmp_path / name, len(itos), tokenizer="char", itos=itos)
    run(tmp_path / "out", tmp_path / "same", max_iters=6, init_from="resume")
    check_same_ids(read_meta(tmp_path / "more"), read_meta(data), pytest.fail)  # as far as both have ids
    with pytest.raises(UserError, match=r"stand for other texts than .* \(now char, then char\): prepare the data"):
        run(tmp_path / "out", tmp_path / "other", max_iters=7, init_from="resume")
    with pytest.raises(UserError, match="now byte, then char"):
        check_same_ids({"tokenizer": "byte", "vocab_size": 256}, read_meta(data), pytest.fail)
    check_same_ids({"tokenizer": "unknown", "vocab_size": 65}, read_meta(data), pytest.fail)


def test_pretrained_weights_go_on_with_their_own_ids_only(tmp_path, data, exported, capsys):
    # in silence, it gave 10.6 bits per byte in place of 2.95
    hf = shutil.copytree(exported, tmp_path / "hf")
    meta = json.loads((data / "meta.json").read_text())
    random_data(tmp_path / "other", 65, tokenizer="char", itos=meta["itos"][::-1])
    tuned = dict(init_from=str(hf), max_iters=1)
    with pytest.raises(UserError, match=r"stand for other texts than those that the weights were trained on"):
        run(tmp_path / "tuned", tmp_path / "other", **tuned)
    run(tmp_path / "tuned", data, **tuned)
    for file in ("meta.json", "tokenizer.json"):  # as transformers leaves the model if it saves it again
        (hf / file).unlink()
        run(tmp_path / "tuned", tmp_path / "other", **tuned)
        assert "was trained on the data's ids: it has no tokenizer for GPTs" in capsys.readouterr().out


def test_ids_of_files_that_cannot_be_downloaded_are_taken_to_be_the_same(monkeypatch):
    # otherwise a node without a network could not train
    monkeypatch.setattr(tokenizer, "tiktoken_bpe", lambda name: (_ for _ in ()).throw(UserError("no network")))
    said = []
    check_same_ids(GPT2, {"tokenizer": "byte", "vocab_size": 256}, said.append)
    assert said == ["cannot tell whether the weights were trained on the data's ids: no network"]


def test_two_forms_of_one_tokenizer_have_the_same_ids():
    one = meta_of("json")
    other = one | {"tokenizer_json": one["tokenizer_json"] | {"post_processor": one["tokenizer_json"]["pre_tokenizer"]}}
    assert other["tokenizer_json"] != one["tokenizer_json"]
    check_same_ids(other, one, pytest.fail)
