"""lm-evaluation-harness on exported runs, without a network."""

import json
import math
import os
import sys

import numpy as np
import pytest
import torch

import export
import harness
from fusedgpt.data import prepare
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.errors import UserError
from fusedgpt.runs import run_folder
from model import GPT
from tests.conftest import run
from tests.launch import ROOT, fails

pytest.importorskip("lm_eval")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the tasks used to be found in the project's folder alone
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """The exported folder of a run on bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    ids = np.frombuffer((ROOT / "model.py").read_bytes(), np.uint8)
    prepare.write(folder / "data", {"train": [ids[:9000]], "val": [ids[9000:]]}, "model.py", "byte", 256)
    export.main(run(folder / "run", folder / "data", max_iters=30), folder / "hf")
    return folder / "hf"


def nats(model, ids, before):
    """The summed loss of `ids` after the id `before`. Each window of block_size has as much context as it can hold."""
    S, total, read = model.config.block_size, 0.0, [before, *ids]
    for start in range(0, len(ids), S):
        end = min(start + S, len(ids))
        x = torch.tensor([read[max(0, end - S) : end]])
        y = torch.full_like(x, -1)
        y[0, start - end :] = torch.tensor(ids[start:end])
        total += (end - start) * model(x, y)[1].item()
    return total


def test_bits_per_byte_are_our_own_loss(of_bytes, tmp_path, capsys):
    import datasets

    harness.main(os.path.relpath(of_bytes), "scores.json", "sonnets", "python_code")
    scores = json.loads((tmp_path / "scores.json").read_text())["results"]
    model = GPT.from_pretrained(of_bytes).eval()
    for task, by in (("sonnets", "paragraph"), ("python_code", "document")):
        files = str(ROOT / "eval" / f"{task}.txt")
        texts = datasets.load_dataset("text", data_files=files, sample_by=by, split="train")["text"]
        coded = [list(text.encode()) for text in texts]
        with torch.no_grad():
            loss = sum(nats(model, ids, before=ord("\n")) for ids in coded)
        want = loss / math.log(2) / sum(map(len, coded))
        assert scores[task]["bits_per_byte,none"] == pytest.approx(want, rel=1e-5)
        assert 3 < want < 8
    assert "|bits_per_byte" in capsys.readouterr().out


def test_a_qwen2_reads_the_ids_that_it_was_trained_on(tmp_path):
    # AutoTokenizer splits texts as Qwen does, so a model of other words was given ids that it had never seen
    import datasets
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # across words
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    bpe.train_from_iterator(["Shall I compare thee to a summer's day?", "and often is the"] * 9, trainer)
    meta = {"tokenizer": "json", "vocab_size": 300, "tokenizer_json": json.loads(bpe.to_str())}
    ids = np.random.default_rng(0).integers(0, 300, 2000)
    prepare.write(tmp_path / "data", {"train": [ids[:1500]], "val": [ids[1500:]]}, "random", **meta)
    qwen2 = dict(position="rotary", norm="rmsnorm", mlp="swiglu", attention_bias="qkv")
    export.main(run(tmp_path / "run", tmp_path / "data", **qwen2), tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "qwen2"
    harness.main("hf", "scores.json", "sonnets")
    scores = json.loads((tmp_path / "scores.json").read_text())
    model, ours = GPT.from_pretrained(tmp_path / "hf").eval(), Tokenizer(meta)
    files = str(ROOT / "eval" / "sonnets.txt")
    texts = datasets.load_dataset("text", data_files=files, sample_by="paragraph", split="train")["text"]
    with torch.no_grad():
        loss = sum(nats(model, ours.encode(text), before=ours.encode("\n")[0]) for text in texts)
    want = loss / math.log(2) / sum(len(text.encode()) for text in texts)
    assert scores["results"]["sonnets"]["bits_per_byte,none"] == pytest.approx(want, rel=1e-5)
    assert "tokenizer" not in scores["config"]["model_args"]


def test_a_text_that_a_character_model_cannot_read_is_one_sentence(small_run, tmp_path):
    saved = run_folder.load_best(small_run)[0]
    saved["meta"]["itos"][0] = "\n"  # it has no 'b'
    torch.save(saved, tmp_path / "ckpt.pt")
    export.main(tmp_path, tmp_path / "hf")
    with pytest.raises(UserError, match=r"the character model in .* has no ids: take a task without"):
        harness.main(str(tmp_path / "hf"), str(tmp_path / "scores.json"), "sonnets")
    assert not (tmp_path / "scores.json").exists()


def test_without_lm_eval_it_is_one_sentence(of_bytes, monkeypatch):
    # this used to be a traceback
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"harness.py needs the package lm_eval: pip install 'lm_eval\[hf\]'"):
        harness.main(str(of_bytes), "scores.json", "sonnets")


def test_bad_arguments_are_one_sentence(tmp_path):
    assert "name a model, a file and tasks" in fails("harness.py")
    sentence = fails("harness.py", str(tmp_path), "scores.json", "sonnets")
    assert "has no model: write it with python export.py" in sentence
