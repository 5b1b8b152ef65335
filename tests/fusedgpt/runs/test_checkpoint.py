"""Checkpoints: whole, safe to load, and readable by others."""

import gc
import os
import pathlib
import pickle
import shutil

import pytest
import torch

from fusedgpt.dimensions import FAMILIES, GPTConfig
from fusedgpt.errors import UserError
from fusedgpt.runs import checkpoint
from model import GPT
from tests.conftest import Evil, checkpoint_of, run


def test_it_is_nanogpts_dict(small_run, tmp_path):
    saved = torch.load(small_run / "ckpt.pt", weights_only=True)
    assert {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"} <= saved.keys()
    # nanoGPT's GPTConfig takes no other argument than these
    wanted = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
    assert saved["model_args"].keys() == wanted
    own = {name: getattr(GPTConfig(), name) for name in FAMILIES}
    own = {name: value for name, value in own.items() if value is not None}
    assert saved["extra_model_args"] == {"vocab_multiple": 64, "activation": "gelu_tanh"} | own
    model = GPT.from_checkpoint(checkpoint.load(small_run / "ckpt.pt"))
    assert all(torch.equal(w, saved["model"][name]) for name, w in model.state_dict().items())
    assert saved["iter_num"] == 10 and saved["config"]["batch_size"] == 4
    # some are shared without the rest, and were "damaged"
    torch.save({key: saved[key] for key in ("model", "model_args", "extra_model_args")}, tmp_path / "ckpt.pt")
    GPT.from_checkpoint(checkpoint.load(tmp_path / "ckpt.pt"))


def test_a_notebook_opens_a_model_of_another_family_as_it_is_or_not_at_all(tmp_path, data):
    # GPT(GPTConfig(**model_args)) took all weights of a model with a window, and computed another one
    shape = dict(window=4, norm_eps=1e-3, window_pattern="SL", vocab_multiple=1, activation="gelu_tanh")
    saved = checkpoint_of(run(tmp_path, data, max_iters=1, **shape))
    model, idx = GPT(GPTConfig(**saved["model_args"])).eval(), torch.arange(32).view(2, 16)
    model.load_state_dict(saved["model"])
    whole = GPT.from_checkpoint(checkpoint.load(tmp_path / "ckpt.pt")).eval()
    with torch.no_grad():
        assert torch.equal(model(idx, idx)[0], whole(idx, idx)[0])
    assert saved["model_args"]["window"] == 4  # nanoGPT's GPTConfig takes no such argument


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"w": torch.zeros(2, dtype=torch.float64)}}, "weight w is not float32"),
        ({"model": None}, "is damaged or no checkpoint"),
    ],
)
def test_content_that_no_run_writes_is_one_sentence(small_run, tmp_path, change, message):
    torch.save(torch.load(small_run / "ckpt.pt", weights_only=True) | change, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=message):
        checkpoint.load(tmp_path / "ckpt.pt")


def test_a_fifo_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "ckpt.pt")  # opening it would wait for ever
    with pytest.raises(UserError, match="is no file"):
        checkpoint.load(tmp_path / "ckpt.pt")


def optimizer_of(model):
    return model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda o: o["state"][0].update(exp_avg=torch.zeros(3)), "does not fit the model: a tensor is missing, or"),
        (lambda o: o["state"][1].update(exp_avg_sq=o["state"][1]["exp_avg_sq"].double()), "does not fit the model"),
        (lambda o: o["state"][2].pop("step"), "does not fit the model"),
        (lambda o: o["state"].clear(), "does not fit the model"),
        (lambda o: o["param_groups"].pop(), "weights, and this model.py trains"),
    ],
)
def test_optimizer_state_that_does_not_fit_is_refused_before_it_is_used(small_run, spoil, message):
    # F5: an exp_avg of three numbers ended in SIGSEGV in AdamW's fused kernel
    saved = checkpoint.load(small_run / "ckpt.pt")
    optimizer = optimizer_of(GPT.from_checkpoint(saved))
    spoil(saved["optimizer"])
    with pytest.raises(UserError, match=message):
        checkpoint.restore_optimizer(saved, optimizer)
    assert not optimizer.state


def test_what_was_loaded_outlives_its_file(small_run, tmp_path):
    # tensors are mapped from the file
    shutil.copyfile(small_run / "ckpt.pt", tmp_path / "ckpt.pt")
    saved = checkpoint.load(tmp_path / "ckpt.pt")
    optimizer = optimizer_of(GPT.from_checkpoint(saved))
    checkpoint.restore_optimizer(saved, optimizer)
    del saved
    gc.collect()
    maps = pathlib.Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()


def test_it_runs_no_code(tmp_path, monkeypatch):
    # T14
    monkeypatch.chdir(tmp_path)
    pathlib.Path("ckpt.pt").write_bytes(pickle.dumps({"model": Evil()}, protocol=2))
    torch.save({"model": Evil()}, "best.pt")
    for name in ("ckpt.pt", "best.pt"):
        with pytest.raises(UserError, match="damaged"):
            checkpoint.load(name)
    assert not (tmp_path / "pwned").exists()
