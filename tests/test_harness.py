"""lm-evaluation-harness on exported runs, without a network."""

import json
import math
import os
import pathlib
import sys
import types

import numpy as np
import pytest
import torch

import export
import harness
from fusedgpt.data import prepare
from fusedgpt.errors import UserError
from fusedgpt.interchange import tokenizer_json
from model import GPT
from tests.conftest import hugging_face, run
from tests.launch import ROOT, fails

BYTES = {"tokenizer": "byte", "vocab_size": 256}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the tasks used to be found in the project's folder alone
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture
def lm_eval(monkeypatch):
    """A stand-in for lm_eval, which takes seconds to import: what it was asked, and what it answers."""
    found = types.SimpleNamespace(answer=lambda: {"results": {"sonnets": 4.5}, "config": {}})

    def simple_evaluate(kind, model, **how):
        found.kind, found.model, found.how, found.folder = kind, model, how, os.getcwd()
        return found.answer()

    def task_manager(include_path, include_defaults=True):
        own = [file.stem for file in pathlib.Path(include_path).glob("*.yaml")]
        return types.SimpleNamespace(all_tasks=own + ["piqa"] * include_defaults)

    modules = {"lm_eval": dict(simple_evaluate=simple_evaluate), "lm_eval.tasks": dict(TaskManager=task_manager)}
    modules["lm_eval.utils"] = dict(handle_non_serializable=str, make_table="table of {results}".format_map)
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def of_bytes(folder, **more):
    """The folder of a random model in transformers' format that reads bytes."""
    meta = BYTES | more
    hugging_face(folder, n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=meta["vocab_size"])
    (folder / "meta.json").write_text(json.dumps(meta))
    tokenizer_json.save(tokenizer_json.tokenizer(meta, 8), folder)
    return folder


# AutoTokenizer splits texts as a Qwen does, so a Qwen of other words was given ids that it had never seen
@pytest.mark.parametrize(("more", "before"), [({}, ord("\n")), (dict(vocab_size=257, end_of_text=256), 256)])
def test_lm_eval_gets_the_models_own_tokenizer_and_the_id_before_a_text(more, before, lm_eval, tmp_path, capsys):
    harness.main(str(of_bytes(tmp_path / "hf", **more)), "scores.json", "sonnets", "piqa")
    assert lm_eval.kind == "hf" and lm_eval.how["tasks"] == ["sonnets", "piqa"] and lm_eval.folder == str(ROOT)
    tokenizer = lm_eval.model.pop("tokenizer")
    assert tokenizer("aé").input_ids == [*"aé".encode()]
    asked = {"pretrained": str(tmp_path / "hf"), "dtype": "float32", "prefix_token_id": before}
    assert lm_eval.model == asked
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores == {"results": {"sonnets": 4.5}, "config": {"model_args": asked}}  # a tokenizer is no JSON
    assert "table of {'sonnets': 4.5}\nwrote scores.json\n" in capsys.readouterr().out


def test_what_cannot_be_scored_is_one_sentence(lm_eval, exported, tmp_path):
    def fail():
        raise Exception("Missing [UNK] token from the vocabulary")

    # the characters of `exported` have no new line
    with pytest.raises(UserError, match="the training text has no"):
        harness.main(str(exported), "scores.json", "sonnets")
    lm_eval.answer = fail
    with pytest.raises(UserError, match=r"lm_eval cannot score .*hf on sonnets: Missing \[UNK\] token"):
        harness.main(str(of_bytes(tmp_path / "hf")), "scores.json", "sonnets")
    assert not (tmp_path / "scores.json").exists()
    assert "name a model, a file and tasks" in fails("harness.py")
    assert "has no model: write it with python export.py" in fails("harness.py", tmp_path, "scores.json", "sonnets")


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


@pytest.mark.slow
def test_bits_per_byte_are_our_own_loss(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    import datasets

    ids = np.frombuffer((ROOT / "model.py").read_bytes(), np.uint8)
    prepare.write(tmp_path / "data", {"train": [ids[:9000]], "val": [ids[9000:]]}, "model.py", "byte", 256)
    export.main(run(tmp_path / "run", tmp_path / "data", max_iters=30), tmp_path / "hf")
    harness.main("hf", "scores.json", "sonnets", "python_code")
    scores = json.loads((tmp_path / "scores.json").read_text())["results"]
    model = GPT.from_pretrained(tmp_path / "hf").eval()
    for task, by in (("sonnets", "paragraph"), ("python_code", "document")):
        file = str(ROOT / "eval" / f"{task}.txt")
        texts = datasets.load_dataset("text", data_files=file, sample_by=by, split="train")["text"]
        coded = [list(text.encode()) for text in texts]
        with torch.no_grad():
            loss = sum(nats(model, ids, before=ord("\n")) for ids in coded)
        want = loss / math.log(2) / sum(map(len, coded))
        assert 3 < want < 8 and scores[task]["bits_per_byte,none"] == pytest.approx(want, rel=1e-5)
    assert "|bits_per_byte" in capsys.readouterr().out
