"""What a run that goes on keeps, and what it says if it is given something else."""

import json
import shutil

import numpy as np
import pytest
import torch

import train
from fusedgpt.data import prepare
from fusedgpt.errors import UserError
from fusedgpt.runs import checkpoint
from tests.conftest import (
    again,
    as_nanogpt_wrote,
    assert_same_bytes,
    checkpoint_of,
    flags,
    record,
    rows,
    run,
    small,
    weights,
)
from tests.launch import fails, script


def from_its_end(data, folder):
    """A copy of `data` whose validation text is read from its end."""
    mine = shutil.copytree(data, folder)
    was, ids = json.loads((mine / "meta.json").read_text()), np.fromfile(mine / "val.bin", "<u2")
    splits = {"train": [np.fromfile(mine / "train.bin", "<u2")], "val": [ids[::-1]]}
    prepare.write(mine, splits, "the same from its end", tokenizer="char", vocab_size=65, itos=was["itos"])
    return mine


def test_a_resumed_run_takes_its_settings_from_the_checkpoint(tmp_path, data):
    # `--init_from=resume --out_dir=X` alone used to switch to OpenWebText and 600,000 iterations
    options = dict(dropout=0.1, learning_rate=3e-3)
    whole = run(tmp_path / "whole", data, max_iters=4, **options)
    half = run(tmp_path / "half", data, max_iters=2, **options)
    moved = half.rename(tmp_path / "moved")
    said = script("train.py", *again(moved, "--max_iters=4")).stdout
    assert "resuming with max_iters=4; it was 2" in said and said.count("resuming with") == 1
    assert_same_bytes(weights(moved), weights(whole))
    assert not half.exists()
    (tmp_path / "slower.py").write_text("learning_rate = 1e-4\n")
    said = script("train.py", *again(moved, tmp_path / "slower.py", "--max_iters=5")).stdout
    assert "resuming with learning_rate=0.0001; it was 0.003" in said


def test_a_flag_is_checked_beside_the_settings_of_its_run(done):
    # a lower rate was refused, because of a min_lr that the run did not have
    saved = checkpoint_of(done)
    torch.save(saved | {"config": saved["config"] | dict(learning_rate=1e-4, min_lr=0.0)}, done / "ckpt.pt")
    assert train.read_settings(again(done, "--learning_rate=5e-5")).min_lr == 0


def test_averages_that_begin_when_a_run_goes_on_are_in_its_first_save(done, data, monkeypatch):
    # a save before the first step had none, and no run could go on from it
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train, "train_step", lambda *_: 1 / 0)
        run(done, data, max_iters=12, init_from="resume", ema_decay=0.9, eval_iters=3)
    run(done, data, max_iters=12, init_from="resume", ema_decay=0.9, eval_iters=3)
    assert len(rows(done)) == 12


def test_config_files_run_once_though_settings_come_from_a_checkpoint(tmp_path, data):
    # if `learning_rate *= 2` ran on the checkpoint's settings, every restart would double the learning rate
    (tmp_path / "config.py").write_text("learning_rate *= 2\nlr_decay_iters = max_iters + 7\n")
    begin = flags(small(tmp_path / "out", data))
    kept = [flag for flag in begin if not flag.startswith(("--learning_rate", "--lr_decay_iters"))]
    for max_iters in (1, 2):
        script("train.py", tmp_path / "config.py", *kept, "--init_from=auto", f"--max_iters={max_iters}")
        settings = record(tmp_path / "out")["settings"]
        assert (settings["learning_rate"], settings["lr_decay_iters"]) == (2 * 6e-4, 600_007)
    assert len(rows(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("activation", "rewrite", "asked", "says"),
    [
        ("gelu", dict, {}, 0),
        ("gelu", as_nanogpt_wrote, {}, 1),  # it silently went on with GPT-2's tanh form, another function
        ("gelu_tanh", as_nanogpt_wrote, dict(activation="gelu_tanh"), 0),
    ],
)
def test_a_run_goes_on_with_its_activation(tmp_path, data, capsys, activation, rewrite, asked, says):
    options = dict(activation=activation, vocab_multiple=1)
    whole = run(tmp_path / "whole", data, max_iters=3, **options)
    half = run(tmp_path / "half", data, max_iters=1, **options)
    torch.save(rewrite(checkpoint_of(half)), half / "ckpt.pt")
    capsys.readouterr()
    for max_iters in (2, 3):  # from 2 on it is a checkpoint of ours
        run(half, data, max_iters=max_iters, init_from="resume", **asked)
    said = capsys.readouterr().out
    assert said.count(checkpoint.NANOGPTS_ACTIVATION) == says and "resuming with activation" not in said
    assert checkpoint_of(half)["extra_model_args"]["activation"] == activation
    assert_same_bytes(weights(half), weights(whole))


def test_a_resumed_run_takes_its_own_weight_decay_and_betas(done, data, capsys):
    # the optimizer's saved state holds them too, and used to win silently
    run(done, data, max_iters=11, init_from="resume", weight_decay=0.3, beta2=0.9)
    decayed, others = checkpoint_of(done)["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], others["weight_decay"], decayed["betas"]) == (0.3, 0.0, (0.9, 0.9))
    assert "resuming with weight_decay=0.3; it was 0.1" in capsys.readouterr().out


@pytest.mark.parametrize(("was", "now"), [("gpt2", "muon"), ("muon", "adamw")])
def test_a_run_goes_on_with_its_own_optimizer_only(tmp_path, finished, data, was, now):
    # a new running mean in the middle of a run would be neither the old run nor a new one
    out, was = shutil.copytree(finished(was), tmp_path / "out"), was.replace("gpt2", "adamw")
    with pytest.raises(UserError, match=f"optimizer={now} cannot use the state of {was}: resume .*={was}"):
        run(out, data, max_iters=11, optimizer=now, init_from="resume")
    assert len(rows(out)) == 10


def test_a_run_that_goes_on_with_another_text_says_so(tmp_path, done, data, capsys):
    # a text prepared anew, of the same size, was trained on without a word
    run(done, shutil.copytree(data, tmp_path / "copy"), max_iters=11, init_from="resume")
    assert "resuming with another" not in capsys.readouterr().out
    mine = from_its_end(data, tmp_path / "mine")
    run(done, mine, max_iters=12, init_from="resume")
    assert capsys.readouterr().out.count("resuming with another val.bin: losses from here on cannot be compared") == 1
    # a loss on the other text stayed the best for ever
    assert checkpoint_of(done, "best.pt")["best_val_loss"] == rows(done, "eval")[-1]["val_loss"]


def test_a_run_trains_on_with_its_schedule(tmp_path, data):
    # raising --max_iters as is said at a run's end used to learn nothing: lr_decay_iters stayed, and min_lr was 0
    out = run(tmp_path / "out", data, max_iters=3, min_lr=0.0, lr_decay_iters=3)
    before = weights(out)
    config = tmp_path / "c.py"
    config.write_text("max_iters = 3\nlr_decay_iters = 3")  # the file that began it names the old end
    said = script("train.py", *again(out, config, "--max_iters=6")).stdout
    assert "resuming with lr_decay_iters=6; it was 3\n" in said
    longer = small(out, data, min_lr=0.0, lr_decay_iters=6)
    assert [row["lr"] for row in rows(out)[3:]] == [train.learning_rate(it, longer) for it in (3, 4, 5)]
    assert any(not torch.equal(w, before[name]) for name, w in weights(out).items())
    # the same command goes on with what it did, and a flag of its own counts
    said = script("train.py", *again(out, config, "--max_iters=6")).stdout
    assert "lr_decay_iters" not in said.partition("resuming")[2]
    own = (config, "--max_iters=7", "--lr_decay_iters=6")
    assert "nothing is learnt from lr_decay_iters=6 to max_iters=" in fails("train.py", *again(out, *own))
    script("train.py", *again(out, *own, "--min_lr=1e-4"))
    assert rows(out)[-1]["lr"] == 1e-4


def test_a_run_that_makes_no_step_says_so_and_records_none(done, data, capsys):
    # run.json and report.html said that it had been made with what it was given afterwards
    before = (done / "run.json").read_text()
    again = dict(init_from="resume", learning_rate=1e-4, batch_size=8, eval_iters=1)
    run(done, data, **again)
    said = capsys.readouterr().out
    assert "all 10 iterations are done: raise --max_iters above that to train on" in said
    assert "resuming with" not in said and (done / "run.json").read_text() == before
    run(done, data, eval_only=True, **again)
    assert (done / "run.json").read_text() == before


OUTSIDE = {  # settings of a checkpoint that reach outside of its folder, and what is said if they are not given again
    "attention": "attention='{0}/k.py:f', which runs the code of a file: if you trust it, give --attention={0}/k.py:f",
    "dataset": "has dataset='{0}', which is a path outside of data/: if you trust it, give --dataset={0} again",
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("how", ["--max_iters=11", "--eval_only=True"])
def test_a_strangers_checkpoint_runs_no_code_and_reads_no_data_of_its_choice(done, data, tmp_path, name, how):
    # the file that its `attention` names was imported, even to evaluate it
    (tmp_path / "k.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\ndef f(q, k, v, dropout_p): return v\n")
    saved, reached = checkpoint_of(done), {"attention": f"{tmp_path}/k.py:f", "dataset": str(tmp_path)}
    torch.save(saved | {"config": saved["config"] | {name: reached[name]}}, done / "ckpt.pt")
    given = {"attention": [f"--dataset={data}"], "dataset": []}[name]
    said = fails("train.py", "--init_from=resume", f"--out_dir={done}", *given, how)
    assert OUTSIDE[name].format(tmp_path) in said
    assert not (tmp_path / "pwned").exists()


def test_a_strangers_checkpoint_reads_no_file_and_sends_nothing(done, tmp_path):
    # a private file was put into report.html
    (tmp_path / "private").write_text("!private")
    saved = checkpoint_of(done)
    outside = {"sample_prompts": f"FILE:{tmp_path}/private", "wandb_log": True, "eval_tasks": "x"}
    torch.save(saved | {"config": saved["config"] | outside}, done / "ckpt.pt")
    said = script("train.py", *again(done, "--max_iters=11")).stdout
    assert f"resuming with sample_prompts='\\n'; it was 'FILE:{tmp_path}/private'" in said
    assert "resuming with wandb_log=False; it was True" in said
