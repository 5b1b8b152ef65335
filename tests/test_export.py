"""A run as a Hugging Face GPT-2, and an outside GPT-2 as a run."""

import functools
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch

import export
from fusedgpt.data import prepare
from fusedgpt.data.dataset import read_meta
from fusedgpt.errors import UserError
from fusedgpt.runs import run_folder
from model import GPT
from tests.conftest import as_nanogpt_wrote, checkpoint_of, random_data, rows, run
from tests.fusedgpt.data.test_tokenizer import meta_of
from tests.kill_points import killed_before
from tests.launch import ROOT, fails, script


def test_export_has_the_same_logits_without_padding(small_run, exported):
    # T18
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
    # only the owner could read the weights, and a server under another user was refused
    assert len({file.stat().st_mode for file in exported.iterdir()}) == 1
    assert theirs.transformer.wte.weight.shape == (65, 32)
    ours = GPT.from_checkpoint(run_folder.load_best(small_run)[0]).eval()
    idx = torch.randint(0, 65, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(idx, idx)[0][..., :65]
        torch.testing.assert_close(theirs(idx).logits, logits, rtol=1e-5, atol=1e-5)
        back = GPT.from_pretrained(exported).eval()
        torch.testing.assert_close(back(idx, idx)[0], logits, rtol=1e-5, atol=1e-5)


def test_the_pipeline_of_transformers_continues_a_text_as_sample_py_does(small_run, exported):
    # it used to read the prompt as nothing, and to stop at the 65th character
    from transformers import pipeline

    generate = pipeline("text-generation", model=str(exported), device="cpu")
    theirs = generate("!aA", max_new_tokens=10, do_sample=False)[0]["generated_text"]
    ask = ["--device=cpu", "--dtype=float32", "--start=!aA", "--temperature=0", "--max_new_tokens=10"]
    for source in (f"--out_dir={small_run}", f"--init_from={exported}"):  # in the run's own characters
        ours = script("sample.py", source, *ask).stdout.splitlines()[1]
        assert theirs == ours and len(theirs) == 13
    # transformers' default of 256 new tokens used to end in an IndexError: the model has 16 positions
    assert len(generate("!")[0]["generated_text"]) == 16
    assert generate.model.generation_config.eos_token_id is None


def test_the_card_says_what_the_run_says(small_run, exported):
    card = (exported / "README.md").read_text()
    record = json.loads((small_run / "run.json").read_text())
    best = min(row["val_loss"] for row in rows(small_run, "eval") if row["iter"])
    said = dict(re.findall(r"^\| (.+) \| (.+) \|$", card, re.M))
    assert said["validation loss"] == f"{best:.4f}" and said["tokenizer"] == "char, 65 ids"
    assert said["trained on"] == record["environment"]["device"] and "data set" in said
    assert "pipeline_tag: text-generation\nlibrary_name: transformers\ntags: [gpt2, fusedgpt]\n---\n" in card
    assert "attention" not in said


def test_an_export_warns_of_no_id_that_it_lacks(small_run, tmp_path):
    # transformers complained of GPT-2's ids, which no file has
    assert "token_id" not in script("export.py", small_run, tmp_path / "hf").stderr


def test_an_export_replaces_nothing(done, tmp_path):
    # a README.md was gone without a word; a link in a run from elsewhere led to an export, which was replaced
    (mine := tmp_path / "mine").mkdir()
    (mine / "README.md").write_text("mine")
    (done / "hf").symlink_to(mine)
    (done / "nanogpt").symlink_to(tmp_path / "nowhere")
    for place in (mine, done / "hf", done / "nanogpt", mine / "README.md"):
        assert f"{place} is there already: remove it, or name another folder" in fails("export.py", done, place)
    assert [file.read_text() for file in mine.iterdir()] == ["mine"] and not (tmp_path / "nowhere").exists()


def test_an_export_for_nanogpt_says_another_gelu(small_run, tmp_path):
    done = script("export.py", small_run, tmp_path / "DATA", "--format=nanogpt")
    assert f"python sample.py --out_dir={tmp_path / 'DATA'}\n" in done.stdout  # the data's name stood in the path
    assert "nanoGPT computes activation=gelu, and this model was trained with gelu_tanh" in done.stdout
    assert done.stderr == ""  # transformers drew bars
    assert {file.name for file in tmp_path.glob("*/*")} == {"README.md", "ckpt.pt", "meta.pkl"}


def test_what_another_run_has_is_in_its_export(tmp_path, capsys):
    # dropout used to be GPT-2's 0.1, whatever the run had, and the end of a text the last id
    folder = export_of_bytes(tmp_path, dropout=0.25, activation="gelu", bias=True, mask="document")
    # GPT-2 attends across documents, and whoever loads the folder was not told
    card = (folder / "README.md").read_text()
    assert "| attention | within documents in training, across them in GPT-2: give it one at a time |" in card
    config = json.loads((folder / "config.json").read_text())
    assert {config[name] for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")} == {0.25}
    assert config["n_ctx"] == config["n_positions"]  # without it, llama.cpp's converter ends in a KeyError
    assert config["activation_function"] == "gelu" and config["eos_token_id"] == config["bos_token_id"] == 256
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 256
    # the example asked for 100 new tokens, more than a model of 16 positions has
    (example,) = re.findall(r"```python\n(.*?)```", card, re.S)
    capsys.readouterr()
    exec(example.replace("PATH_OR_HUB_ID", str(folder)))
    assert capsys.readouterr().out.startswith("The")


def test_a_llama_is_exported_as_one(tmp_path):
    # transformers 4 does not read rope_parameters: it would take theta 10000, without a word
    from transformers import AutoModelForCausalLM

    llama = dict(position="rotary", rope_theta=500.0, rope_scaling=4.0, rope_context=8, norm="rmsnorm", mlp="swiglu")
    folder = export_of_bytes(tmp_path, **llama, n_kv_head=1, n_inner=40, tie_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    assert config["rope_scaling"]["factor"] == 4.0 and config["rope_scaling"]["rope_type"] == "llama3"
    card, theirs = (folder / "README.md").read_text(), AutoModelForCausalLM.from_pretrained(folder)
    assert "A Llama that was trained with fusedGPT." in card and "tags: [llama, fusedgpt]" in card
    assert f"| parameters | {sum(p.numel() for p in theirs.parameters()):,} |" in card
    with pytest.raises(UserError, match=r"which makes a GPT-2, does not know position=rotary"):
        export.main(tmp_path / "run", tmp_path / "nanogpt", "nanogpt")


def export_of_bytes(folder, **settings):
    """The folder that export.py wrote of another run, in bytes."""
    of_bytes = random_data(folder / "data", **meta_of("byte"))
    export.main(run(folder / "run", of_bytes, max_iters=2, **settings), folder / "hf")
    return folder / "hf"


def contents(folder):
    return folder.exists() and {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_export_that_was_killed_can_be_repeated(small_run, exported, tmp_path):
    # 13 of 16 kills left half an export. Here some of the kill points
    for number in range(2, 100, 7):
        (folder := tmp_path / str(number)).mkdir()
        change = killed_before(number, functools.partial(export.main, small_run, folder / "hf"), folder)
        assert contents(folder / "hf") in (False, contents(exported)), change
        if not (folder / "hf").exists():
            export.main(small_run, folder / "hf")
        assert list(folder.iterdir()) == [folder / "hf"] and contents(folder / "hf") == contents(exported)
        if not change:
            break
    assert number > 7  # it was killed in all that it does


def test_an_export_that_fails_leaves_nothing(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "model_card", lambda *args: pathlib.Path(tmp_path, "none").read_text())
    with pytest.raises(OSError, match="No such file"):
        export.main(small_run, tmp_path / "hf")
    assert [*tmp_path.iterdir()] == []


def of_nanogpt(run, folder, dataset):
    """A folder with the checkpoint of a run as nanoGPT wrote it."""
    saved = as_nanogpt_wrote(checkpoint_of(run))
    saved["config"]["dataset"] = dataset
    torch.save(saved, folder / "ckpt.pt")
    return folder


def test_a_model_that_another_program_would_compute_otherwise_is_not_exported(small_run, tmp_path, monkeypatch):
    # with ReLU² in one line of model.py, an export was another model, without a word: logits off by 0.07
    monkeypatch.setattr("model._gelu", lambda x, form: x.relu() ** 2)
    with pytest.raises(UserError, match="the logits of GPT-2 in transformers differ from those of this model by up to"):
        export.main(small_run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_nanogpt_checkpoint_is_exported_with_the_tokenizer_of_its_data(small_run, data, tmp_path, capsys):
    # its folder used to have no meta.json, so that sample.py took its ids for GPT-2's
    export.main(of_nanogpt(small_run, tmp_path, str(data)), tmp_path / "hf")
    assert read_meta(tmp_path / "hf")["itos"] == read_meta(data)["itos"]
    assert GPT.from_pretrained(tmp_path / "hf").config.activation == "gelu"
    # which used to be assumed in silence; the remedy for an older one is what the sentence says
    assert "activation_function gelu_new in the config.json of its export" in capsys.readouterr().out
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"activation_function": "gelu_new"}))
    assert GPT.from_pretrained(tmp_path / "hf").config.activation == "gelu_tanh"


def test_a_nanogpt_checkpoint_without_its_data_is_exported_and_says_what_is_missing(small_run, tmp_path, capsys):
    export.main(of_nanogpt(small_run, tmp_path, "nowhere"), tmp_path / "hf")
    assert not (tmp_path / "hf" / "meta.json").exists()
    assert re.search("no tokenizer is written: .*nowhere.* put the meta.pkl of its data there", capsys.readouterr().out)
    assert (tmp_path / "hf" / "model.safetensors").exists() and not (tmp_path / "hf" / "tokenizer.json").exists()


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
def test_bits_per_byte_of_make_eval_are_our_own_loss(tmp_path):
    pytest.importorskip("lm_eval")
    import datasets

    ids = np.frombuffer((ROOT / "model.py").read_bytes(), np.uint8)
    prepare.write(tmp_path / "data", {"train": [ids[:9000]], "val": [ids[9000:]]}, "model.py", "byte", 256)
    export.main(run(tmp_path / "run", tmp_path / "data", max_iters=30), tmp_path / "run" / "hf")
    asked = ["make", "-n", "eval", f"RUN={tmp_path / 'run'}", "FIRST=10"]
    made = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    (command,) = (shlex.split(line)[1:] for line in made.splitlines() if "lm_eval" in line)
    subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | {"HF_DATASETS_OFFLINE": "1"}, check=True)
    (scores,) = (tmp_path / "run").glob("lm_eval_*.json")
    texts = datasets.load_dataset("text", data_files=f"{ROOT}/eval/sonnets.txt", sample_by="paragraph")["train"]["text"]
    model, coded = GPT.from_pretrained(tmp_path / "run" / "hf").eval(), [list(text.encode()) for text in texts]
    with torch.no_grad():
        want = sum(nats(model, ids, before=ord("\n")) for ids in coded) / math.log(2) / sum(map(len, coded))
    found = json.loads(scores.read_text())["results"]["sonnets"]["bits_per_byte,none"]
    assert 3 < want < 8 and found == pytest.approx(want, rel=1e-5)
