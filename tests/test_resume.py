"""A run that is stopped or killed and resumed is as if it had not been; and the content of checkpoints."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch

import train
from fusedgpt import eager
from fusedgpt.data import prepare
from fusedgpt.errors import UserError
from fusedgpt.runs import checkpoint
from fusedgpt.training import evaluation
from tests.conftest import (
    LLAMA,
    ON_GPU_TOO,
    as_nanogpt_wrote,
    as_we_wrote_before_activation,
    as_we_wrote_before_families,
    assert_same_bytes,
    checkpoint_of,
    flags,
    hugging_face,
    rows,
    run,
    small,
    tensors,
    wait_for,
    weights,
)
from tests.launch import fails, script, sentence


@pytest.mark.parametrize(("device", "dtype"), ON_GPU_TOO)
@pytest.mark.parametrize(
    "settings",
    [
        dict(attention="sdpa"),
        dict(attention="manual"),
        dict(optimizer="muon", schedule="wsd", lr_decay_iters=20),
        dict(LLAMA, optimizer="muon", recompute="block", loss="chunked"),
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_ten_steps_saved_and_ten_more_are_twenty(tmp_path, data, settings, device, dtype):
    # T1: a resumed run used to replay the batches of iteration 0, with other dropout
    options = dict(dropout=0.1, device=device, dtype=dtype, deterministic=device == "cuda", **settings)
    whole = run(tmp_path / "whole", data, max_iters=20, **options)
    half = run(tmp_path / "half", data, max_iters=10, **options)
    run(half, data, max_iters=20, init_from="resume", **options)
    assert_same_bytes(tensors(checkpoint_of(half)), tensors(checkpoint_of(whole)))
    assert [row["loss"] for row in rows(half)] == [row["loss"] for row in rows(whole)]
    assert rows(half, "eval") == rows(whole, "eval")
    assert_same_bytes(weights(half, "best.pt"), weights(whole, "best.pt"))


def test_best_and_latest_are_separate(tmp_path, data):
    # T7: nanoGPT's one file is overwritten by a worse one
    run(tmp_path, data, max_iters=20)
    best = {row["iter"]: row["val_loss"] for row in rows(tmp_path, "eval")}
    early = checkpoint_of(tmp_path)
    run(tmp_path, data, max_iters=30, init_from="resume", learning_rate=30.0, min_lr=30.0, warmup_iters=0)  # worse
    assert rows(tmp_path, "eval")[-1]["val_loss"] > min(best.values())
    kept = checkpoint_of(tmp_path, "best.pt")
    assert best[kept["iter_num"]] == min(best.values())
    assert checkpoint_of(tmp_path)["iter_num"] == 30
    assert early["iter_num"] == 20


def test_a_new_run_sets_the_old_one_aside(tmp_path, data, capsys):
    # a new run that was killed early used to resume as the old one
    run(tmp_path, data)
    old = weights(tmp_path)
    run(tmp_path, data, max_iters=2, seed=2)
    assert f"an earlier run in {tmp_path} was moved to {tmp_path / 'previous-1'}" in capsys.readouterr().out
    assert_same_bytes(weights(tmp_path / "previous-1"), old)
    assert len(rows(tmp_path)) == 2 and len(rows(tmp_path / "previous-1")) == 10


def test_best_is_of_the_whole_run_across_a_resume(tmp_path, data):
    # a checkpoint written before its evaluation used to know only the previous evaluation
    run(tmp_path, data, max_iters=7, eval_interval=5)
    for name in ("ckpt.pt", "best.pt"):
        assert checkpoint_of(tmp_path, name)["best_val_loss"] == rows(tmp_path, "eval")[-1]["val_loss"]


@pytest.mark.parametrize(
    ("last", "message"),
    [(11, "the weights are not finite after 11 steps and were not saved"), (20, "diverged and ends after 20 steps")],
)
def test_a_run_that_diverged_is_not_saved(tmp_path, data, monkeypatch, capsys, last, message):
    # F3: a loss of NaN with weights that were still finite used to replace the last good checkpoint
    run(tmp_path, data)
    before = weights(tmp_path)
    step = eager.AdamW.step

    def broken(self, *args, **kwargs):
        step(self, *args, **kwargs)
        self.param_groups[0]["params"][0].data[0, 0] = torch.inf if last == 11 else 1e30

    monkeypatch.setattr(eager.AdamW, "step", broken)
    with pytest.raises(UserError, match=f"{message}.*: resume from .*ckpt.pt, of iteration 10, with a lower"):
        run(tmp_path, data, init_from="resume", max_iters=last)
    assert_same_bytes(weights(tmp_path), before)
    assert ("iteration 15 is not saved, because the run has diverged" in capsys.readouterr().out) == (last == 20)
    monkeypatch.undo()
    run(tmp_path, data, init_from="resume", max_iters=20)  # the advice works


def test_a_checkpoint_is_saved_before_the_evaluation(tmp_path, data, monkeypatch):
    # T7: a failing evaluation used to lose all steps since the previous one
    def fails(*_):
        raise RuntimeError("evaluation")

    upcoming = iter((evaluation.evaluate, fails))

    def evaluate(*args):
        return next(upcoming)(*args)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    with pytest.raises(RuntimeError, match="evaluation"):
        run(tmp_path, data)
    wait_for(tmp_path / "ckpt.pt")  # a process would end only after its write
    assert checkpoint_of(tmp_path)["iter_num"] == 5


def test_a_run_resumed_with_auto_keeps_its_kernel(tmp_path, data, monkeypatch):
    monkeypatch.setattr(train.tuning.choose, "fastest", lambda *_, **__: ("manual", {}))
    run(tmp_path, data, attention="auto")
    monkeypatch.setattr(train.tuning.choose, "fastest", lambda *_, **__: ("math", {}))
    run(tmp_path, data, attention="auto", max_iters=15, init_from="resume")
    assert json.loads((tmp_path / "run.json").read_text())["attention"] == "manual"


def test_a_finished_run_keeps_its_times_when_it_is_run_again(tmp_path, data):
    run(tmp_path, data)
    before = json.loads((tmp_path / "run.json").read_text())["time"]
    run(tmp_path, data, init_from="resume")
    assert json.loads((tmp_path / "run.json").read_text())["time"] == before


def test_always_save_checkpoint_off_saves_what_improved_and_the_end(tmp_path, data, monkeypatch):
    saved = []
    monkeypatch.setattr(train.Saver, "save", lambda self, state: saved.append(state["iter_num"]))
    losses = iter([4.0, 3.0, 3.5, 2.0, 2.5])
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: {"train_loss": 0.0, "val_loss": next(losses)})
    run(tmp_path, data, max_iters=20, always_save_checkpoint=False)
    assert saved == [5, 15, 20]


def test_auto_resumes_if_there_is_a_run(tmp_path, data):
    for max_iters in (10, 20):
        script("train.py", *flags(small(tmp_path, data, max_iters=max_iters, init_from="auto")))
        assert len(rows(tmp_path)) == max_iters
    whole = run(tmp_path / "whole", data, max_iters=20)
    assert_same_bytes(weights(tmp_path), weights(whole))
    assert not list(tmp_path.glob("previous*"))


def test_a_resumed_run_takes_its_settings_from_the_checkpoint(tmp_path, data):
    # `--init_from=resume --out_dir=X` alone used to switch to OpenWebText and 600,000 iterations
    whole = run(tmp_path / "whole", data, max_iters=20, dropout=0.1, learning_rate=3e-3)
    half = run(tmp_path / "half", data, max_iters=10, dropout=0.1, learning_rate=3e-3)
    moved = half.rename(tmp_path / "moved")
    done = script("train.py", "--init_from=resume", f"--out_dir={moved}", "--max_iters=20")
    assert "resuming with max_iters=20; it was 10" in done.stdout and done.stdout.count("resuming with") == 1
    assert_same_bytes(weights(moved), weights(whole))
    assert not half.exists()
    (tmp_path / "slower.py").write_text("learning_rate = 1e-4\n")
    flags = (tmp_path / "slower.py", "--init_from=resume", f"--out_dir={moved}", "--max_iters=22")
    assert "resuming with learning_rate=0.0001; it was 0.003" in script("train.py", *flags).stdout


def test_config_files_run_once_though_settings_come_from_a_checkpoint(tmp_path, data):
    # if `learning_rate *= 2` ran on the checkpoint's settings, every restart would double the learning rate
    (tmp_path / "config.py").write_text("learning_rate *= 2\nlr_decay_iters = max_iters + 7\n")
    begin = flags(small(tmp_path / "out", data, max_iters=10))
    kept = [flag for flag in begin if not flag.startswith(("--learning_rate", "--lr_decay_iters"))]
    for init_from in ("auto", "auto"):
        script("train.py", tmp_path / "config.py", *kept, f"--init_from={init_from}")
        settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
        assert (settings["learning_rate"], settings["lr_decay_iters"]) == (2 * 6e-4, 600_007)


def test_a_process_that_torchrun_restarted_resumes_its_own_run(tmp_path, data):
    # F2: the restarted process used to obey init_from=scratch and set its own run aside
    launch = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
    scratch = flags(small(tmp_path, data, init_from="scratch"))
    script("train.py", *scratch, **launch)
    script("train.py", *scratch, "--max_iters=20", **launch | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert len(rows(tmp_path)) == 20 and not list(tmp_path.glob("previous*"))
    script("train.py", *scratch, **launch | {"TORCHELASTIC_RUN_ID": "b"})  # another launch starts anew, as told
    assert len(rows(tmp_path)) == 10 and len(rows(tmp_path / "previous-1")) == 20


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_what_is_damaged_beside_a_good_checkpoint_does_not_block_resuming(tmp_path, data, name):
    run(tmp_path, data)
    # JSON that can be read, but not written
    deep = b'{"kind": "train", "iter": 1, "loss": 2.0, "lr": %s}\n' % (b"[" * 500 + b"]" * 500)
    for damaged in (
        deep,
        b"",
        b"\xff\xfe\x00",
        b"[1, 2]\n3\nnull\n",
        b"[" * 100_000,
        b'{"kind": "train"}\n{"iter": "x"}\n',
    ):
        (tmp_path / name).write_bytes(damaged)
        run(tmp_path, data, init_from="resume", max_iters=12)
        assert [row["iter"] for row in rows(tmp_path)][-2:] == [10, 11] or name == "run.json"
        torch.save(checkpoint_of(tmp_path, "ckpt-10.pt"), tmp_path / "ckpt.pt")
        (tmp_path / "ckpt-10.pt").unlink()


def test_a_profile_is_of_the_run_that_made_it(tmp_path, data):
    # the trace of an earlier run used to stay beside a new one
    run(tmp_path, data, profile=True)
    old = (tmp_path / "trace.json").read_bytes()
    run(tmp_path, data, profile=True)
    assert (tmp_path / "previous-1" / "trace.json").read_bytes() == old != (tmp_path / "trace.json").read_bytes()
    run(tmp_path, data)
    assert not (tmp_path / "trace.json").exists()


def test_eval_only_evaluates_and_ends(tmp_path, data):
    # T6: with resume it used to train on
    run(tmp_path, data)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    done = script("train.py", *flags(small(tmp_path, data, init_from="resume", eval_only=True)))
    assert f"step 10: train loss {rows(tmp_path, 'eval')[-1]['train_loss']:.4f}" in done.stdout
    assert "iter " not in done.stdout.replace("iterations", "")
    assert before == {f.name: f.read_bytes() for f in tmp_path.iterdir()}


def test_max_seconds_ends_with_an_evaluation_and_a_checkpoint(tmp_path, data):
    run(tmp_path, data, max_iters=10**6, eval_interval=10**6, max_seconds=2.0)
    steps = len(rows(tmp_path))
    assert 0 < steps < 10**6
    assert rows(tmp_path, "eval")[-1]["iter"] == steps
    assert checkpoint_of(tmp_path)["iter_num"] == steps


def test_a_nanogpt_checkpoint_resumes(tmp_path, data):
    run(tmp_path, data, max_iters=10)
    saved = checkpoint_of(tmp_path)
    theirs = as_nanogpt_wrote(saved)
    mask = torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)
    theirs["model"] |= {f"_orig_mod.transformer.h.{n}.attn.bias": mask for n in range(2)}
    assert theirs["model_args"]["vocab_size"] == 128  # nanoGPT knows of rows only
    torch.save(theirs, tmp_path / "ckpt.pt")
    run(tmp_path, data, max_iters=20, init_from="resume")
    assert rows(tmp_path, "eval")[-1]["val_loss"] < saved["best_val_loss"]


@pytest.mark.parametrize(
    ("activation", "rewrite", "asked", "says"),
    [
        ("gelu", dict, {}, 0),
        ("gelu", as_nanogpt_wrote, {}, 1),  # it silently went on with GPT-2's tanh form, another function
        ("gelu_tanh", as_nanogpt_wrote, dict(activation="gelu_tanh"), 0),
        ("gelu_tanh", as_we_wrote_before_activation, {}, 0),
        ("gelu_tanh", as_we_wrote_before_families, {}, 0),
    ],
)
def test_a_run_goes_on_with_its_activation(tmp_path, data, capsys, activation, rewrite, asked, says):
    options = dict(activation=activation, vocab_multiple=1)
    whole = run(tmp_path / "whole", data, max_iters=20, **options)
    half = run(tmp_path / "half", data, max_iters=10, **options)
    torch.save(rewrite(checkpoint_of(half)), half / "ckpt.pt")
    capsys.readouterr()
    for max_iters in (15, 20):  # from 15 on it is a checkpoint of ours
        run(half, data, max_iters=max_iters, init_from="resume", **asked)
    said = capsys.readouterr().out
    assert said.count(checkpoint.NANOGPTS_ACTIVATION) == says and "resuming with activation" not in said
    assert checkpoint_of(half)["extra_model_args"]["activation"] == activation
    assert_same_bytes(weights(half), weights(whole))


def test_a_llama_goes_on_as_one_and_not_as_what_is_asked_for(tmp_path, data, capsys):
    # weights decide the family: flags of another used to be nothing that a checkpoint knows
    run(tmp_path, data, max_iters=5, **LLAMA)
    saved = checkpoint_of(tmp_path)
    assert {name: saved["extra_model_args"][name] for name in LLAMA} == LLAMA
    capsys.readouterr()
    run(tmp_path, data, max_iters=10, init_from="resume", **LLAMA | {"window": 3, "norm": "layernorm"})
    said = capsys.readouterr().out
    assert "window=8, as in the weights of init_from=resume" in said
    assert "norm=rmsnorm, as in the weights of init_from=resume" in said
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["window"] == 8
    assert {name: checkpoint_of(tmp_path)["extra_model_args"][name] for name in LLAMA} == LLAMA


def test_a_resumed_run_takes_its_own_weight_decay_and_betas(tmp_path, data, capsys):
    # the optimizer's saved state holds them too, and used to win silently
    run(tmp_path, data)
    run(tmp_path, data, max_iters=12, init_from="resume", weight_decay=0.3, beta2=0.9)
    decayed, others = checkpoint_of(tmp_path)["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], others["weight_decay"], decayed["betas"]) == (0.3, 0.0, (0.9, 0.9))
    assert "resuming with weight_decay=0.3; it was 0.1" in capsys.readouterr().out


@pytest.mark.parametrize(("was", "now"), [("adamw", "muon"), ("muon", "adamw")])
def test_a_run_goes_on_with_its_own_optimizer_only(tmp_path, data, was, now):
    # a new running mean in the middle of a run would be neither the old run nor a new one
    run(tmp_path, data, max_iters=2, optimizer=was)
    with pytest.raises(UserError, match=f"optimizer={now} cannot use the state of {was}: resume .*={was}"):
        run(tmp_path, data, max_iters=4, optimizer=now, init_from="resume")
    assert len(rows(tmp_path)) == 2


def test_a_run_that_goes_on_with_another_text_says_so(tmp_path, data, capsys):
    # a text prepared anew, of the same size, was trained on without a word
    mine = shutil.copytree(data, tmp_path / "data")
    run(tmp_path / "out", mine)
    run(tmp_path / "out", mine, max_iters=12, init_from="resume")
    assert "resuming with another" not in capsys.readouterr().out
    was, ids = json.loads((mine / "meta.json").read_text()), np.fromfile(mine / "val.bin", "<u2")
    splits = {"train": [np.fromfile(mine / "train.bin", "<u2")], "val": [ids[::-1]]}
    prepare.write(mine, splits, "the same from its end", tokenizer="char", vocab_size=65, itos=was["itos"])
    now = json.loads((mine / "meta.json").read_text())["sha256"]["val"]
    assert now == hashlib.sha256(ids[::-1].tobytes()).hexdigest()
    run(tmp_path / "out", mine, max_iters=14, init_from="resume")
    said = capsys.readouterr().out
    before = was["sha256"]["val"][:12]
    assert f"resuming with another val.bin, of SHA-256 {now[:12]}…; it was {before}…: validation losses from" in said
    assert said.count("resuming with another") == 1
    best = checkpoint_of(tmp_path / "out", "best.pt")  # a loss on the other text stayed the best for ever
    assert best["best_val_loss"] == min(row["val_loss"] for row in rows(tmp_path / "out", "eval") if row["iter"] > 12)


def test_a_best_loss_of_other_windows_is_forgotten(tmp_path, data, capsys):
    # with another batch an evaluation reads other windows: a loss of easier ones stayed the best for ever
    run(tmp_path, data, batch_size=4, eval_iters=6)
    saved = checkpoint_of(tmp_path)
    torch.save(saved | {"best_val_loss": 0.0, "best_iter": 5}, tmp_path / "ckpt.pt")
    run(tmp_path, data, batch_size=8, eval_iters=3, max_iters=12, init_from="resume")  # as many
    said = capsys.readouterr().out
    assert checkpoint_of(tmp_path)["best_val_loss"] == 0 and "of other windows" not in said
    run(tmp_path, data, batch_size=8, eval_iters=6, max_iters=14, init_from="resume")
    assert "resuming with evaluations of other windows: the next one is the best" in capsys.readouterr().out
    evaluated = [row["val_loss"] for row in rows(tmp_path, "eval") if row["iter"] > 12]
    assert checkpoint_of(tmp_path)["best_val_loss"] == min(evaluated)


def test_a_resumed_run_takes_up_the_scaler_and_the_best_loss(tmp_path, data):
    # T7: neither of them used to be restored
    run(tmp_path, data, dtype="float16")
    saved = checkpoint_of(tmp_path)
    saved["scaler"]["scale"], saved["best_val_loss"], saved["best_iter"] = 1234.0, 0.0, 5
    torch.save(saved, tmp_path / "ckpt.pt")
    (tmp_path / "best.pt").unlink()
    run(tmp_path, data, max_iters=15, init_from="resume", dtype="float16")
    assert checkpoint_of(tmp_path)["scaler"]["scale"] == 1234.0
    assert not (tmp_path / "best.pt").exists()  # no loss is below 0


def test_a_complete_run_says_that_it_is(tmp_path, data, capsys):
    # it timed kernels for seconds, then printed the earlier run's last line, as if it had trained
    run(tmp_path, data)
    capsys.readouterr()
    run(tmp_path, data, init_from="resume")
    assert "all 10 iterations are done: raise --max_iters above that to train on" in capsys.readouterr().out
    run(tmp_path, data, init_from="resume", max_iters=11)
    assert "are done" not in capsys.readouterr().out


def test_a_run_trains_on_with_its_schedule(tmp_path, data):
    # raising --max_iters as the sentence above says used to learn nothing: lr_decay_iters stayed, and min_lr was 0
    out = run(tmp_path / "out", data, min_lr=0.0, lr_decay_iters=10)
    before = weights(out)
    config = tmp_path / "c.py"
    config.write_text("max_iters = 10\nlr_decay_iters = 10")  # the file that began it names the old end
    resumed = (config, "--init_from=resume", f"--out_dir={out}", "--max_iters=20")
    said = script("train.py", *resumed).stdout
    assert "resuming with lr_decay_iters=20; it was 10: the schedule ends with the run (--lr_decay_iters=10" in said
    assert all(row["lr"] > 0 for row in rows(out)[10:]) and len(rows(out)) == 20
    assert any(not torch.equal(w, before[name]) for name, w in weights(out).items())
    whole = run(tmp_path / "whole", data, min_lr=0.0, lr_decay_iters=20, max_iters=20)
    assert rows(out)[-1]["lr"] == rows(whole)[-1]["lr"]
    # the same command goes on with what it did, and a flag of its own counts
    assert "lr_decay_iters" not in script("train.py", *resumed).stdout.partition("resuming")[2]
    kept = script("train.py", *resumed[:-1], "--max_iters=22", "--lr_decay_iters=20", check=False)
    assert "iteration lr_decay_iters=20 on, so nothing more would be learnt" in sentence(kept.stderr)
    script("train.py", *resumed[:-1], "--max_iters=22", "--lr_decay_iters=20", "--min_lr=1e-4")
    assert [row["lr"] for row in rows(out)[-2:]] == [1e-4, 1e-4]


def test_a_run_trains_on_with_the_config_file_that_named_a_longer_schedule(tmp_path, data):
    # the file's schedule began then, at a higher learning rate than that of the last step
    config = tmp_path / "c.py"
    config.write_text("max_iters = 100\nlr_decay_iters = 100")
    out = run(tmp_path / "out", data, lr_decay_iters=10)
    resumed = (config, "--init_from=resume", f"--out_dir={out}", "--max_iters=15")
    said = script("train.py", *resumed).stdout
    assert "resuming with lr_decay_iters=15; it was 10: the schedule ends with the run (--lr_decay_iters=10" in said
    assert rows(out)[-1]["lr"] == rows(run(tmp_path / "whole", data, lr_decay_iters=15, max_iters=15))[-1]["lr"]
    script("train.py", *resumed[:-1], "--max_iters=16", "--lr_decay_iters=100")
    assert json.loads((out / "run.json").read_text())["settings"]["lr_decay_iters"] == 100


def test_a_run_of_an_earlier_version_goes_on_to_its_end_at_a_rate_of_0(tmp_path, data, monkeypatch):
    # it could neither be resumed nor evaluated at its end without a flag
    idle = dict(min_lr=0.0, lr_decay_iters=5)
    with monkeypatch.context() as earlier:
        earlier.setattr(train, "require_learning", lambda *_: None)
        run(tmp_path, data, max_seconds=0, **idle)
    assert len(rows(tmp_path)) < 10
    for _ in range(2):  # to its end, and at its end
        script("train.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_seconds=None")
        assert len(rows(tmp_path)) == 10
    refused = script("train.py", "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=11", check=False)
    assert "give --lr_decay_iters=11, or a --min_lr above 0" in sentence(refused.stderr)


def test_a_run_that_makes_no_step_records_none(tmp_path, data, capsys):
    # its run.json and report.html said that it had been made with what it was given afterwards
    run(tmp_path, data)
    before, losses = (tmp_path / "run.json").read_text(), rows(tmp_path, "eval")
    capsys.readouterr()
    again = dict(init_from="resume", learning_rate=1e-4, batch_size=8, eval_iters=1)
    run(tmp_path, data, **again)
    said = capsys.readouterr().out
    assert "not used, because there is no step to make: batch_size=8, learning_rate=0.0001, eval_iters=1" in said
    assert "resuming with" not in said
    assert (tmp_path / "run.json").read_text() == before and rows(tmp_path, "eval") == losses
    run(tmp_path, data, eval_only=True, **again)
    assert (tmp_path / "run.json").read_text() == before and rows(tmp_path, "eval") == losses
    run(tmp_path, data, max_iters=11, **again)
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["learning_rate"] == 1e-4


def test_a_finished_run_is_not_evaluated_on_another_text_as_if_it_were_its_own(tmp_path, data):
    # the last evaluation and the best checkpoint became another text's, and run.json still named the first
    run(tmp_path / "out", data)
    mine = shutil.copytree(data, tmp_path / "data")
    was, ids = json.loads((mine / "meta.json").read_text()), np.fromfile(mine / "val.bin", "<u2")
    splits = {"train": [np.fromfile(mine / "train.bin", "<u2")], "val": [ids[::-1]]}
    prepare.write(mine, splits, "the same from its end", tokenizer="char", vocab_size=65, itos=was["itos"])
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.name != ".lock"}
    with pytest.raises(UserError, match=r"is done, and val\.bin of .* to evaluate on it, give --eval_only"):
        run(tmp_path / "out", mine, init_from="resume")
    for nothing_written in (dict(eval_only=True), dict(dry_run=True)):
        run(tmp_path / "out", mine, init_from="resume", **nothing_written)
    assert before == {name: (tmp_path / "out" / name).read_bytes() for name in before}
    run(tmp_path / "out", mine, init_from="resume", max_iters=11)
    assert len(rows(tmp_path / "out")) == 11


def test_the_evaluation_at_the_end_of_a_run_stays_if_the_run_trains_on(tmp_path, data):
    # it vanished from metrics.jsonl and TensorBoard unless the end was at an interval, though best.pt was its state
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = dict(tensorboard_log=True, sample_interval=5, sample_prompts="!")
    run(tmp_path, data, max_iters=7, **options)
    before = rows(tmp_path, "eval")
    for end, evaluated in ((12, [0, 5, 7, 10, 12]), (12, [0, 5, 7, 10, 12]), (15, [0, 5, 7, 10, 12, 15])):
        run(tmp_path, data, max_iters=end, init_from="resume", **options)
        for kind in ("eval", "sample"):
            assert [row["iter"] for row in rows(tmp_path, kind)] == evaluated
    assert rows(tmp_path, "eval")[:3] == before and [row["iter"] for row in rows(tmp_path)] == [*range(15)]
    read = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in read.Scalars("val/loss")] == evaluated


def test_a_run_that_was_stopped_early_does_not_go_on_to_an_end_that_was_given_up(tmp_path, data):
    run(tmp_path, data)
    saved = checkpoint_of(tmp_path)
    saved["config"]["max_iters"] = 20  # as if it had been stopped half way
    torch.save(saved, tmp_path / "ckpt.pt")
    for lower in (10, 5):
        run(tmp_path, data, init_from="resume", max_iters=lower)
        assert len(rows(tmp_path)) == 10 and checkpoint_of(tmp_path)["iter_num"] == 10


def test_a_run_and_a_model_of_transformers_have_flags_of_their_own(tmp_path, small_run, data):
    # a run given to --init_from, and a folder of transformers to --out_dir
    model = tmp_path / "hf-text"
    model.mkdir()
    (model / "config.json").write_text("{}")
    resume, start = f"give --init_from=resume --out_dir={small_run}", f"--init_from={model}"
    assert resume in fails("train.py", f"--init_from={small_run}")
    assert resume in fails("train.py", small_run)
    assert start in fails("train.py", f"--dataset={data}", f"--out_dir={model}")
    assert start in fails("train.py", "--init_from=resume", f"--out_dir={model}")
    assert f"--out_dir={small_run}" in fails("sample.py", f"--init_from={small_run}")


def test_a_run_may_be_called_scratch(tmp_path, data, monkeypatch):
    # its folder was taken for what init_from=scratch names, and refused
    monkeypatch.chdir(tmp_path)
    run("scratch", data)
    s = train.read_settings(["--out_dir=scratch", f"--dataset={data}"])
    assert s.init_from == "scratch"


def test_deterministic_holds_for_the_run(tmp_path, data):
    run(tmp_path, data, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_finetuning_starts_from_hugging_face_weights(tmp_path, data, capsys):
    hugging_face(tmp_path / "hf", n_layer=1, n_head=2, n_embd=64, n_positions=32, vocab_size=101)
    run(tmp_path / "out", data, init_from=str(tmp_path / "hf"), max_iters=10, learning_rate=1e-3)
    out = capsys.readouterr().out
    assert "n_layer=1, as in the weights of init_from=" in out
    saved = checkpoint_of(tmp_path / "out")
    assert saved["model_args"]["block_size"] == 16  # cropped
    assert saved["model"]["transformer.wte.weight"].shape == (128, 64)
    assert (saved["model"]["transformer.wte.weight"][101:] == 0).all()
