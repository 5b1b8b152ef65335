"""A run that is stopped or killed and resumed is as if it had not been; and the content of checkpoints."""

import json
import math
import shutil
from unittest.mock import Mock

import pytest
import torch

import train
from fusedgpt import eager
from fusedgpt.errors import UserError
from fusedgpt.training import evaluation, samples
from tests.conftest import (
    LLAMA,
    ON_GPU_TOO,
    as_nanogpt_wrote,
    assert_same_bytes,
    checkpoint_of,
    flags,
    hugging_face,
    record,
    rows,
    run,
    small,
    tensors,
    weights,
)
from tests.launch import script


@pytest.mark.parametrize(("device", "dtype"), ON_GPU_TOO)
@pytest.mark.parametrize(
    "settings",
    [
        dict(attention="manual"),
        dict(optimizer="muon", schedule="wsd", lr_decay_iters=6),
        dict(LLAMA, optimizer="muon", recompute="block", loss="chunked", ema_decay=0.9),
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_three_steps_saved_and_three_more_are_six(tmp_path, data, settings, device, dtype):
    # T1: a resumed run used to replay the batches of iteration 0, with other dropout
    options = dict(dropout=0.1, device=device, dtype=dtype, deterministic=device == "cuda", eval_interval=3, **settings)
    whole = run(tmp_path / "whole", data, max_iters=6, **options)
    half = run(tmp_path / "half", data, max_iters=3, **options)
    run(half, data, max_iters=6, init_from="resume", **options)
    assert_same_bytes(tensors(checkpoint_of(half)), tensors(checkpoint_of(whole)))
    assert [row["loss"] for row in rows(half)] == [row["loss"] for row in rows(whole)]
    assert rows(half, "eval") == rows(whole, "eval")
    assert_same_bytes(weights(half, "best.pt"), weights(whole, "best.pt"))


def test_best_and_latest_are_separate(done, data):
    # T7: nanoGPT's one file is overwritten by a worse one
    best = {row["iter"]: row["val_loss"] for row in rows(done, "eval")}
    run(done, data, max_iters=15, init_from="resume", learning_rate=30.0, min_lr=30.0, warmup_iters=0)  # worse
    assert rows(done, "eval")[-1]["val_loss"] > min(best.values())
    assert best[checkpoint_of(done, "best.pt")["iter_num"]] == min(best.values())
    assert checkpoint_of(done)["iter_num"] == 15


@pytest.mark.parametrize(
    ("last", "message"),
    [(11, "the weights are not finite after 11 steps and were not saved"), (13, "diverged and ends after 13 steps")],
)
def test_a_run_that_diverged_is_not_saved(done, small_run, data, monkeypatch, capsys, last, message):
    # F3: a loss of NaN with weights that were still finite used to replace the last good checkpoint
    step = eager.AdamW.step

    def broken(self, *args, **kwargs):
        step(self, *args, **kwargs)
        self.param_groups[0]["params"][0].data[0, 0] = torch.inf if last == 11 else 1e30

    monkeypatch.setattr(eager.AdamW, "step", broken)
    with pytest.raises(UserError, match=f"{message}.*: resume from .*ckpt.pt, of iteration 10, with a lower"):
        run(done, data, init_from="resume", max_iters=last, eval_interval=4)
    assert_same_bytes(weights(done), weights(small_run))
    assert ("iteration 12 is not saved, because the run has diverged" in capsys.readouterr().out) == (last == 13)
    monkeypatch.undo()
    run(done, data, init_from="resume", max_iters=12)  # the advice works


def test_a_checkpoint_is_saved_before_the_evaluation(tmp_path, data, monkeypatch):
    # T7: a failing evaluation used to lose all steps since the previous one
    upcoming = iter((evaluation.evaluate, Mock(side_effect=RuntimeError("evaluation"))))

    def evaluate(*args):
        return next(upcoming)(*args)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    with pytest.raises(RuntimeError, match="evaluation"):
        run(tmp_path, data)
    assert checkpoint_of(tmp_path)["iter_num"] == 5


def test_always_save_checkpoint_off_saves_what_improved_and_the_end(tmp_path, data, monkeypatch):
    saved, save = [], train.Checkpoints.save

    def noted(self, state, val_loss):
        saved.append(state["iter_num"])
        save(self, state, val_loss)

    monkeypatch.setattr(train.Checkpoints, "save", noted)
    losses = iter([4.0, 3.0, 3.5, 2.0, 2.5])
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: {"train_loss": 0.0, "val_loss": next(losses)})
    run(tmp_path, data, max_iters=4, eval_interval=1, always_save_checkpoint=False)
    assert saved == [1, 3, 4]


def test_a_run_resumed_with_auto_keeps_its_kernel(tmp_path, data, monkeypatch):
    monkeypatch.setattr(train.tuning.choose, "fastest", lambda *_, **__: ("manual", {}))
    run(tmp_path, data, attention="auto", max_iters=1)
    monkeypatch.setattr(train.tuning.choose, "fastest", lambda *_, **__: ("math", {}))
    run(tmp_path, data, attention="auto", max_iters=2, init_from="resume")
    assert record(tmp_path)["attention"] == "manual"


def test_a_process_that_torchrun_restarted_resumes_its_own_run(tmp_path, data):
    # F2: the restarted process used to obey init_from=scratch and set its own run aside
    launch = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
    scratch = flags(small(tmp_path, data, init_from="scratch", max_iters=1))
    script("train.py", *scratch, **launch)
    for n, who in ((2, "TORCHELASTIC"), (3, "SLURM")):  # a job that was queued again has another torchrun, and lost all
        script("train.py", *scratch, f"--max_iters={n}", **launch | {f"{who}_RESTART_COUNT": "1"})
    assert len(rows(tmp_path)) == 3 and not list(tmp_path.glob("previous*"))
    script("train.py", *scratch, **launch | {"TORCHELASTIC_RUN_ID": "b"})  # another launch starts anew, as told
    assert len(rows(tmp_path)) == 1 and len(rows(tmp_path / "previous-1")) == 3


def test_auto_without_a_run_begins_as_the_config_says(done, data, tmp_path):
    # slurm/train.sh config/finetune_shakespeare.py trained a new GPT, without a word
    (tmp_path / "config.py").write_text("init_from = 'gpt2'\n")
    for out, found in ((tmp_path / "new", "gpt2"), (done, "resume")):
        given = [str(tmp_path / "config.py"), "--init_from=auto", f"--dataset={data}", f"--out_dir={out}"]
        assert train.read_settings(given).init_from == found
    assert train.read_settings(["--init_from=auto", f"--out_dir={tmp_path}"]).init_from == "scratch"


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_what_is_damaged_beside_a_good_checkpoint_does_not_block_resuming(done, data, name):
    (done / name).write_bytes(b'{"kind": "train", "iter": 0}\n\xff\xfe\x00')
    run(done, data, init_from="resume", max_iters=11)
    assert rows(done)[-1]["iter"] == 10 and record(done)["settings"]["max_iters"] == 11


def test_a_profile_is_printed_and_is_of_the_run_that_made_it(tmp_path, data, capsys):
    # the trace of an earlier run used to stay beside a new one
    run(tmp_path, data, profile=True, max_iters=1)
    assert "Self CPU time total" in capsys.readouterr().out
    old = (tmp_path / "trace.json").read_bytes()
    run(tmp_path, data, max_iters=1)
    assert (tmp_path / "previous-1" / "trace.json").read_bytes() == old
    assert not (tmp_path / "trace.json").exists()


def test_eval_only_evaluates_and_ends(done, data, tmp_path, capsys):
    # T6: with resume it used to train on
    before = {f.name: f.read_bytes() for f in done.iterdir()}
    said = script("train.py", *flags(small(done, data, init_from="resume", eval_only=True))).stdout
    assert f"step 10: train loss {rows(done, 'eval')[-1]['train_loss']:.4f}" in said
    assert "iter " not in said.replace("iterations", "")
    assert before == {f.name: f.read_bytes() for f in done.iterdir()}
    run(tmp_path / "new", data, eval_only=True)
    assert "the run reads it" not in capsys.readouterr().out  # it makes no step


def test_a_nanogpt_checkpoint_resumes(done, data):
    theirs = as_nanogpt_wrote(checkpoint_of(done))
    mask = torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)
    theirs["model"] |= {f"_orig_mod.transformer.h.{n}.attn.bias": mask for n in range(2)}
    assert theirs["model_args"]["vocab_size"] == 128  # nanoGPT knows of rows only
    torch.save(theirs, done / "ckpt.pt")
    run(done, data, max_iters=11, init_from="resume")
    assert rows(done, "eval")[-1]["val_loss"] < math.log(128) - 0.5  # of a new model with so many ids


def test_a_resumed_run_takes_up_the_scaler_and_the_best_loss(tmp_path, finished, data):
    # T7: neither of them used to be restored
    out = shutil.copytree(finished("float16"), tmp_path / "out")
    saved = checkpoint_of(out)
    saved["scaler"]["scale"], saved["best_val_loss"], saved["best_iter"] = 1234.0, 0.0, 5
    torch.save(saved, out / "ckpt.pt")
    (out / "best.pt").unlink()
    run(out, data, max_iters=11, init_from="resume", dtype="float16")
    assert checkpoint_of(out)["scaler"]["scale"] == 1234.0
    assert not (out / "best.pt").exists()  # no loss is below 0


def test_the_evaluation_at_the_end_of_a_run_stays_if_the_run_trains_on(tmp_path, data, monkeypatch):
    # it vanished from metrics.jsonl unless the end was at an interval, though best.pt was its state
    monkeypatch.setattr(samples, "NEW_TOKENS", 3)
    options = dict(eval_interval=2, sample_interval=2, sample_prompts="!")
    run(tmp_path, data, max_iters=3, **options)
    before = rows(tmp_path, "eval")
    for end, evaluated in ((5, [0, 2, 3, 4, 5]), (5, [0, 2, 3, 4, 5]), (6, [0, 2, 3, 4, 5, 6])):
        run(tmp_path, data, max_iters=end, init_from="resume", **options)
        for kind in ("eval", "sample"):
            assert [row["iter"] for row in rows(tmp_path, kind)] == evaluated
    assert rows(tmp_path, "eval")[:3] == before and [row["iter"] for row in rows(tmp_path)] == [*range(6)]


def test_finetuning_starts_from_hugging_face_weights(tmp_path, data, capsys):
    hugging_face(tmp_path / "hf", n_layer=1, n_head=2, n_embd=64, n_positions=32, vocab_size=101)
    meta = json.loads((data / "meta.json").read_text()) | {"sha256": {"train": "0", "val": "0"}}
    (tmp_path / "hf" / "meta.json").write_text(json.dumps(meta))
    run(tmp_path / "out", data, init_from=str(tmp_path / "hf"), max_iters=1, learning_rate=1e-3)
    out = capsys.readouterr().out
    assert "resuming" not in out
    assert "n_layer=1, as in the weights of init_from=" in out
    saved = checkpoint_of(tmp_path / "out")
    assert saved["model_args"]["block_size"] == 16  # cropped
    assert saved["model"]["transformer.wte.weight"].shape == (128, 64)
    assert (saved["model"]["transformer.wte.weight"][101:] == 0).all()
