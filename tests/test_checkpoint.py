"""Checkpoints: whole, safe to load, and readable by others."""

import json
import pickle

import pytest
import torch

import train
from model import GPT, GPTConfig
from parts import checkpoint
from parts.errors import UserError
from tests.conftest import fails, script, small
from tests.test_tokens import Evil


@pytest.fixture(scope="module")
def run(tmp_path_factory, data):
    out_dir = tmp_path_factory.mktemp("run")
    train.main(small(out_dir, data))
    return out_dir


def test_it_is_nanogpts_dict(run):
    saved = torch.load(run / "ckpt.pt", weights_only=True)
    assert {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"} <= saved.keys()
    wanted = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
    assert wanted <= saved["model_args"].keys()
    GPT(GPTConfig(**saved["model_args"])).load_state_dict(saved["model"])
    assert saved["iter_num"] == 10 and saved["config"]["batch_size"] == 4


def test_cut_short_anywhere_it_is_named(run, tmp_path):
    whole = (run / "ckpt.pt").read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "ckpt.pt").write_bytes(whole[:length])
        with pytest.raises(UserError, match="is damaged or no checkpoint of a GPT"):
            checkpoint.load(tmp_path / "ckpt.pt")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (tmp_path / "ckpt.pt").write_bytes(flipped)
    with pytest.raises(UserError, match="checksum"):
        checkpoint.load(tmp_path / "ckpt.pt")
    torch.save({"something": "else"}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="is damaged or no checkpoint"):
        checkpoint.load(tmp_path / "ckpt.pt")


def test_it_runs_no_code(tmp_path, monkeypatch):
    # T14
    monkeypatch.chdir(tmp_path)
    with open("ckpt.pt", "wb") as file:
        pickle.dump({"model": Evil()}, file, protocol=2)
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load("ckpt.pt")
    torch.save({"model": Evil()}, "ckpt.pt")
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load("ckpt.pt")
    assert not (tmp_path / "pwned").exists()


def test_keep_leaves_a_copy_that_the_next_save_does_not_touch(tmp_path):
    checkpoint.save(tmp_path / "ckpt.pt", {"n": 1})
    checkpoint.keep(tmp_path / "ckpt.pt", tmp_path / "best.pt")
    checkpoint.save(tmp_path / "ckpt.pt", {"n": 2})
    assert [torch.load(tmp_path / f)["n"] for f in ("ckpt.pt", "best.pt")] == [2, 1]
    checkpoint.keep(tmp_path / "ckpt.pt", tmp_path / "best.pt")
    assert torch.load(tmp_path / "best.pt")["n"] == 2


def test_export_has_the_same_logits_without_padding(run, tmp_path):
    # T18
    from transformers import GPT2LMHeadModel

    script("-m", "parts.export", str(run), str(tmp_path / "hf"))
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert theirs.transformer.wte.weight.shape == (65, 32)
    saved = checkpoint.load(checkpoint.of_run(run))
    ours = GPT(GPTConfig(**saved["model_args"])).eval()
    ours.load_state_dict(saved["model"])
    idx = torch.randint(0, 65, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(idx, idx)[0][..., :65]
        torch.testing.assert_close(theirs(idx).logits, logits, rtol=1e-5, atol=1e-5)
        back = GPT.from_pretrained(tmp_path / "hf").eval()
        torch.testing.assert_close(back(idx, idx)[0], logits, rtol=1e-5, atol=1e-5)
    assert "name a run and a folder" in fails("-m", "parts.export")
    sampled = script(
        "sample.py", f"--init_from={tmp_path / 'hf'}", "--start=!", "--num_samples=1", "--max_new_tokens=5"
    )
    assert len(sampled.stdout.splitlines()[0]) == 6  # in the run's own characters
    (tmp_path / "file").write_text("")
    assert "is a file" in fails("-m", "parts.export", str(run), str(tmp_path / "file"))


def test_the_curve_of_runs_is_drawn(run, tmp_path):
    script("-m", "parts.curve", str(run), str(run))
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "metrics.jsonl does not exist" in fails("-m", "parts.curve", str(tmp_path))
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "eval"
