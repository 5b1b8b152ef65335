"""Checkpoints from nanoGPT and to it, against its own code.

NANOGPT=path/to/its/clone python -m pytest tests/test_nanogpt.py
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import export
from fusedgpt.runs import checkpoint
from model import GPT
from tests.conftest import checkpoint_of, rows, run
from tests.launch import script

NANOGPT = os.environ.get("NANOGPT")
pytestmark = pytest.mark.skipif(not NANOGPT, reason="NANOGPT names no clone of nanoGPT")
IDX = torch.randint(0, 65, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def nanogpt():
    """nanoGPT's model.py."""
    spec = importlib.util.spec_from_file_location("nanogpts_model", pathlib.Path(NANOGPT) / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def clear(model):
    """Weights large enough to tell the two forms of GELU apart, and biases and LayerNorms away from 0 and 1."""
    torch.manual_seed(0)
    for p in model.parameters():
        p *= 5 if p.dim() > 1 else 1
        p += 0.1 * torch.randn_like(p) if p.dim() == 1 else 0
    return model


@torch.no_grad()
def assert_has_the_logits(saved, theirs):
    """Our model of the checkpoint `saved` has the logits of `theirs`; with GELU's tanh form it would have others."""
    want = theirs.eval()(IDX, IDX)[0]
    ours, tanh = (GPT.from_checkpoint(saved, **own).eval()(IDX, IDX)[0] for own in ({}, {"activation": "gelu_tanh"}))
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)
    assert (tanh - want).abs().max() > 1e-4


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_checkpoint_opens_here_and_goes_on(nanogpt, tmp_path, data, capsys, bias):
    args = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=bias, vocab_size=65, dropout=0.0)
    theirs = clear(nanogpt.GPT(nanogpt.GPTConfig(**args)))
    optimizer = theirs.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    theirs(IDX, IDX)[1].backward()
    optimizer.step()
    state = {"model": theirs.state_dict(), "optimizer": optimizer.state_dict(), "model_args": args}
    state |= {"iter_num": 1, "best_val_loss": torch.tensor(9.0), "config": {"dataset": str(data), "bias": bias}}
    torch.save(state, tmp_path / "ckpt.pt")
    assert_has_the_logits(checkpoint.load(tmp_path / "ckpt.pt"), theirs)
    run(tmp_path, data, init_from="resume", max_iters=3, learning_rate=1e-3)
    assert [row["iter"] for row in rows(tmp_path)] == [1, 2]
    assert capsys.readouterr().out.count(checkpoint.NANOGPTS_ACTIVATION) == 1


@pytest.mark.parametrize("bias", [True, False])
def test_our_checkpoint_opens_in_nanogpt(nanogpt, tmp_path, data, bias):
    run(tmp_path, data, vocab_multiple=1, activation="gelu", bias=bias, max_iters=60, learning_rate=3e-2)
    saved = checkpoint_of(tmp_path)
    theirs = nanogpt.GPT(nanogpt.GPTConfig(**saved["model_args"]))
    theirs.load_state_dict(saved["model"])
    optimizer = theirs.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu")
    optimizer.load_state_dict(saved["optimizer"])
    assert_has_the_logits(checkpoint.load(tmp_path / "ckpt.pt"), theirs)
    assert saved["iter_num"] == 60 and saved["best_val_loss"] < 9 and saved["config"]["dataset"] == str(data)


@pytest.mark.slow
def test_nanogpts_sample_py_draws_from_an_export(nanogpt, tmp_path, data):
    export.main(run(tmp_path / "run", data, activation="gelu"), tmp_path / "out", "nanogpt")
    # nanoGPT looks for meta.pkl in data/ of the folder where it runs
    for name in ("model.py", "sample.py", "configurator.py"):
        (tmp_path / name).symlink_to(pathlib.Path(NANOGPT).resolve() / name)
    meta = tmp_path / "data" / data.name / "meta.pkl"
    meta.parent.mkdir(parents=True)
    (tmp_path / "out" / "meta.pkl").rename(meta)
    flags = ["--out_dir=out", "--device=cpu", "--dtype=float32", "--num_samples=1", "--max_new_tokens=40", "--start=AB"]
    command = [sys.executable, "sample.py", *flags, "--top_k=1"]
    theirs = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True).stdout
    ours = script("sample.py", *flags[1:], f"--out_dir={tmp_path / 'run'}", "--temperature=0.0").stdout
    assert theirs.partition("...\n")[2].splitlines()[0] in ours
