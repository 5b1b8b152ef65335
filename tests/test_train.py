"""Training, run small on the CPU: exact resume, splits and ranks that agree, and an end to every bad input."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import termios
import time

import pytest
import torch

import train
from model import GPT, GPTConfig
from parts import machine
from parts.errors import UserError
from tests.conftest import (
    GPU,
    ROOT,
    assert_same_bytes,
    fails,
    flags,
    rows,
    script,
    small,
    torchrun,
    weights,
)

ON_GPU_TOO = [("cpu", "float32"), *(pytest.param(*GPU.values, d, marks=GPU.marks) for d in ("bfloat16", "float16"))]


def run(out_dir, data, **settings):
    train.main(small(out_dir, data, **settings))
    return out_dir


def optimizer_state(out_dir):
    return torch.load(out_dir / "ckpt.pt", weights_only=True)["optimizer"]["state"]


# the loop


def test_the_loss_falls_and_everything_is_written(tmp_path, data, capsys):
    run(tmp_path, data, max_iters=60, eval_interval=30, dropout=0.1)
    steps, evaluations = rows(tmp_path), rows(tmp_path, "eval")
    assert [row["iter"] for row in steps] == list(range(60))  # T6: nanoGPT ran max_iters + 1 steps
    assert [row["iter"] for row in evaluations] == [0, 30, 60]
    assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"] - 0.5
    assert abs(evaluations[0]["val_loss"] - math.log(65)) < 0.1
    for row in steps:
        assert row["ms"] > 0 and row["mfu"] > 0 and row["grad_norm"] > 0 and row["peak_memory"] > 0
        assert row["tokens_per_s"] == pytest.approx(1e3 * 64 / row["ms"])
        assert row["lr"] == train.learning_rate(row["iter"], small(tmp_path, data))
    out = capsys.readouterr().out
    assert f"iter 40: loss {steps[40]['loss']:.4f}, time {steps[40]['ms']:.2f}ms, mfu " in out
    assert f"step 30: train loss {evaluations[1]['train_loss']:.4f}, val loss {evaluations[1]['val_loss']:.4f}" in out
    assert "tokens per iteration: 64 = 1 micro-batches x 4 x 16" in out  # T21
    assert "attention: sdpa; forward seen: math; backward seen: unfused" in out  # K8
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["receipt"]["forward"] == ["math"] and record["tokens_per_step"] == 64
    assert record["settings"]["max_iters"] == 60 and record["environment"]["torch"] == torch.__version__
    assert record["time"]["samples"] == 55 and record["time"]["p10_ms"] <= record["time"]["median_ms"]
    assert record["parameters"] - record["parameters_without_positions"] == 16 * 32


def test_learning_rate_warms_up_and_decays(tmp_path, data):
    s = small(tmp_path, data, learning_rate=1.0, min_lr=0.1, warmup_iters=9, lr_decay_iters=109)
    assert train.learning_rate(0, s) == pytest.approx(0.1)
    assert train.learning_rate(8, s) == pytest.approx(0.9)
    assert train.learning_rate(9, s) == 1.0
    assert train.learning_rate(34, s) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)  # a quarter of the cosine
    assert train.learning_rate(59, s) == pytest.approx(0.55)
    assert train.learning_rate(109, s) == train.learning_rate(5000, s) == 0.1
    s.schedule = "constant"
    assert train.learning_rate(0, s) == pytest.approx(0.1) and train.learning_rate(5000, s) == 1.0
    s.decay_lr = False
    assert train.learning_rate(0, s) == 1.0


def test_one_step_is_adamw_on_the_clipped_mean_gradient(tmp_path, data):
    # an independent step: plain autograd and the formula of AdamW (arXiv:1711.05101), in float64
    from parts import tokens
    from parts.batches import Batches

    settings = dict(max_iters=1, gradient_accumulation_steps=3, learning_rate=0.5, warmup_iters=0, grad_clip=0.1)
    run(tmp_path, data, **settings, weight_decay=0.2)
    machine.seed(1337, "init")
    config = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65, vocab_multiple=64, bias=False)
    net = GPT(GPTConfig(**config)).double()
    feed = Batches(data, tokens.read_meta(data), 16, 12, 1337, torch.device("cpu"))
    loss = net(*feed.train(0, 0))[1]
    loss.backward()
    assert rows(tmp_path)[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters()))
    assert rows(tmp_path)[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    got = weights(tmp_path)
    for name, p in net.named_parameters():
        grad = p.grad * min(1.0, 0.1 / (norm + 1e-6))
        decay = 0.2 if p.dim() >= 2 else 0.0
        want = p.detach() * (1 - 0.5 * decay) - 0.5 * grad / (grad.abs() + 1e-8)
        clear = grad.abs() > 1e-5  # where the gradient is all rounding, its sign is too
        torch.testing.assert_close(got[name].double()[clear], want[clear], rtol=1e-3, atol=1e-3)


def test_bfloat16_and_float16_train_on_a_cpu(tmp_path, data):
    # T9: nanoGPT's dtype did nothing on a CPU; T7: the scaler's state was not saved
    gently = dict(max_iters=20, learning_rate=1e-3)  # so that rounding does not grow
    full = rows(run(tmp_path / "a", data, **gently))
    for dtype in ("bfloat16", "float16"):
        half = rows(run(tmp_path / dtype, data, **gently, dtype=dtype))
        assert half[-1]["loss"] == pytest.approx(full[-1]["loss"], rel=0.005)
        assert half[-1]["loss"] != full[-1]["loss"]
    saved = torch.load(tmp_path / "float16" / "ckpt.pt", weights_only=True)
    assert saved["scaler"]["scale"] > 1
    assert not torch.load(tmp_path / "a" / "ckpt.pt", weights_only=True)["scaler"]


def test_compile_trains_to_the_same_loss(tmp_path, data):
    if reason := machine.can_compile(torch.device("cpu")):
        pytest.skip(reason)
    eager = rows(run(tmp_path / "a", data))
    compiled = rows(run(tmp_path / "b", data, compile=True))
    assert compiled[-1]["loss"] == pytest.approx(eager[-1]["loss"], rel=1e-4)
    assert json.loads((tmp_path / "b" / "run.json").read_text())["compile"] is True


def test_compile_without_a_compiler_runs_eager_and_says_so(tmp_path, data, capsys, monkeypatch):
    # T23: torch.compile ended the run on machines with no C++ compiler
    monkeypatch.setattr(torch, "compile", lambda *_: (_ for _ in ()).throw(RuntimeError("no C++ compiler")))
    run(tmp_path, data, compile=True)
    assert (
        "eager (torch.compile cannot work here, running eager (RuntimeError: no C++ compiler))"
        in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "run.json").read_text())["compile"] is False


# what each step is trained on


def test_evaluation_kernel_and_padding_do_not_change_the_batches(tmp_path, data):
    # T2: one RNG used to serve weights, evaluation and batches
    base = [row["loss"] for row in rows(run(tmp_path / "a", data))]
    changes = [
        dict(eval_interval=2),
        dict(eval_iters=1),
        dict(vocab_multiple=1),
        dict(attention="manual"),
        dict(attention="math"),
    ]
    for n, change in enumerate(changes):
        other = [row["loss"] for row in rows(run(tmp_path / str(n), data, **change))]
        assert other == pytest.approx(base, rel=1e-5), change
    assert [row["loss"] for row in rows(run(tmp_path / "s", data, seed=2))] != pytest.approx(base, rel=1e-3)


def test_splits_of_a_step_give_the_same_loss_and_gradient(tmp_path, data):
    # T13: accumulation used to be divided by the GPUs of one machine
    whole = run(tmp_path / "1", data, max_iters=3, batch_size=8)
    for split in (2, 4):
        parts = run(tmp_path / str(split), data, max_iters=3, batch_size=8 // split, gradient_accumulation_steps=split)
        assert_close_runs(parts, whole)


def test_two_ranks_equal_one_and_resume_bitwise(tmp_path, data):
    # T9, T10, T13; dropout is on: it follows the micro-batch, not the rank
    settings = dict(gradient_accumulation_steps=4, dropout=0.1, max_iters=6, eval_interval=3)
    one = run(tmp_path / "one", data, **settings)
    torchrun(2, "train.py", *flags(small(tmp_path / "two", data, **settings)))
    two = tmp_path / "two"
    assert_close_runs(two, one)
    record = json.loads((two / "run.json").read_text())
    assert record["world_size"] == 2 and record["tokens_per_step"] == 4 * 4 * 16
    evaluations = [[row["val_loss"] for row in rows(path, "eval")] for path in (one, two)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    torchrun(2, "train.py", *flags(small(tmp_path / "half", data, **{**settings, "max_iters": 3})))
    torchrun(2, "train.py", *flags(small(tmp_path / "half", data, **settings, init_from="resume")))
    assert_same_bytes(weights(tmp_path / "half"), weights(two))


def assert_close_runs(a, b):
    """The same losses, gradient norms, and means of gradients in AdamW, to rounding."""
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows(a)] == pytest.approx([row[key] for row in rows(b)], rel=1e-4), key
    states = optimizer_state(a), optimizer_state(b)
    for n in states[0]:
        x, y = (state[n]["exp_avg"] for state in states)
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * y.abs().max().item() + 1e-12)


def test_a_world_that_does_not_divide_is_refused(tmp_path, data):
    settings = small(tmp_path, data, gradient_accumulation_steps=3)
    done = script("train.py", *flags(settings), check=False, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "gradient_accumulation_steps=3 cannot be shared by 2 processes" in done.stderr


# checkpoints


@pytest.mark.parametrize(("device", "dtype"), ON_GPU_TOO)
@pytest.mark.parametrize("attention", ["sdpa", "manual"])
def test_ten_steps_saved_and_ten_more_are_twenty(tmp_path, data, attention, device, dtype):
    # T1: a resumed run used to replay the batches of iteration 0, with other dropout
    options = dict(attention=attention, dropout=0.1, device=device, dtype=dtype, deterministic=device == "cuda")
    whole = run(tmp_path / "whole", data, max_iters=20, **options)
    half = run(tmp_path / "half", data, max_iters=10, **options)
    run(half, data, max_iters=20, init_from="resume", **options)
    assert_same_bytes(weights(half), weights(whole))
    states = optimizer_state(half), optimizer_state(whole)
    for n in states[0]:
        assert_same_bytes(states[0][n], states[1][n])
    assert [row["loss"] for row in rows(half)] == [row["loss"] for row in rows(whole)]
    assert rows(half, "eval") == rows(whole, "eval")
    assert_same_bytes(weights(half, "best.pt"), weights(whole, "best.pt"))


def test_killed_at_any_instant_and_resumed_is_an_unbroken_run(tmp_path, data):
    settings = dict(max_iters=300, eval_interval=7, dropout=0.1, eval_iters=1)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    script("train.py", *flags(small(whole, data, **settings)))
    for start_from, lines in (("scratch", 40), ("resume", 130), ("resume", 210)):
        command = [sys.executable, "train.py", *flags(small(broken, data, **settings, init_from=start_from))]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        wait_for_lines(child, broken / "metrics.jsonl", lines)
        child.kill()
        child.wait()
    script("train.py", *flags(small(broken, data, **settings, init_from="resume")))
    assert [row["iter"] for row in rows(broken)] == list(range(300))
    assert rows(broken, "eval") == rows(whole, "eval")
    assert_same_bytes(weights(broken), weights(whole))


def wait_for_lines(child, path, lines):
    for _ in range(6000):
        if path.exists() and path.read_text().count("\n") >= lines:
            return
        assert child.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    raise AssertionError(f"{path} never had {lines} lines")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_with_a_checkpoint(tmp_path, data, number):
    settings = small(tmp_path, data, max_iters=100_000, eval_interval=100_000)
    child = subprocess.Popen(
        [sys.executable, "train.py", *flags(settings)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    wait_for_lines(child, tmp_path / "metrics.jsonl", 10)
    child.send_signal(number)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    steps = len(rows(tmp_path))
    assert f"stopped after {steps} iterations, saved: go on with the same command and --init_from=resume" in out
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] == steps


def test_best_and_latest_are_separate(tmp_path, data):
    # T7: nanoGPT's one file is overwritten by a worse one
    run(tmp_path, data, max_iters=20)
    best = {row["iter"]: row["val_loss"] for row in rows(tmp_path, "eval")}
    early = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    run(
        tmp_path, data, max_iters=30, init_from="resume", learning_rate=30.0, min_lr=30.0, warmup_iters=0
    )  # it gets worse
    assert rows(tmp_path, "eval")[-1]["val_loss"] > min(best.values())
    kept = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best[kept["iter_num"]] == min(best.values())
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] == 30
    assert early["iter_num"] == 20


def test_a_new_run_sets_the_old_one_aside(tmp_path, data, capsys):
    # a new run that was killed early used to resume as the old one
    run(tmp_path, data)
    old = weights(tmp_path)
    run(tmp_path, data, max_iters=2, seed=2)
    assert f"an earlier run in {tmp_path} was moved to {tmp_path / 'previous'}" in capsys.readouterr().out
    assert_same_bytes(weights(tmp_path / "previous"), old)
    assert len(rows(tmp_path)) == 2 and len(rows(tmp_path / "previous")) == 10


def test_best_is_of_the_whole_run_across_a_resume(tmp_path, data):
    # a checkpoint written before its evaluation used to know of the evaluation before it only
    run(tmp_path, data, max_iters=7, eval_interval=5)
    assert (
        torch.load(tmp_path / "ckpt.pt", weights_only=True)["best_val_loss"] == rows(tmp_path, "eval")[-1]["val_loss"]
    )
    assert (
        torch.load(tmp_path / "best.pt", weights_only=True)["best_val_loss"] == rows(tmp_path, "eval")[-1]["val_loss"]
    )


def test_weights_that_are_not_finite_are_not_saved(tmp_path, data, monkeypatch):
    run(tmp_path, data)
    before = weights(tmp_path)
    step = torch.optim.AdamW.step

    def broken(self, *args, **kwargs):
        step(self, *args, **kwargs)
        self.param_groups[0]["params"][0].data[0, 0] = torch.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    with pytest.raises(UserError, match="weights are not finite after 15 steps and were not saved"):
        run(tmp_path, data, init_from="resume", max_iters=20)
    assert_same_bytes(weights(tmp_path), before)


def test_always_save_checkpoint_off_saves_what_improved_and_the_end(tmp_path, data, monkeypatch):
    saved = []
    monkeypatch.setattr(train.checkpoint, "save", lambda path, state: saved.append(state["iter_num"]))
    monkeypatch.setattr(train.checkpoint, "keep", lambda *_: None)
    losses = iter([4.0, 3.0, 3.5, 2.0, 2.5])
    monkeypatch.setattr(train, "evaluate", lambda *_: {"train_loss": 0.0, "val_loss": next(losses)})
    run(tmp_path, data, max_iters=20, always_save_checkpoint=False)
    assert saved == [5, 15, 20]


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
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] == steps


def test_a_nanogpt_checkpoint_resumes(tmp_path, data, capsys):
    run(tmp_path, data, max_iters=10)
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    theirs = {name: saved[name] for name in ("optimizer", "model_args", "iter_num", "config")}
    theirs["model_args"] = {k: v for k, v in saved["model_args"].items() if k != "vocab_multiple"}
    theirs["model"] = {f"_orig_mod.{name}": w for name, w in saved["model"].items()}
    mask = torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)
    theirs["model"] |= {f"_orig_mod.transformer.h.{n}.attn.bias": mask for n in range(2)}
    theirs["model_args"]["vocab_size"] = 128  # nanoGPT knows of rows only
    theirs["best_val_loss"] = torch.tensor(saved["best_val_loss"])
    torch.save(theirs, tmp_path / "ckpt.pt")
    run(tmp_path, data, max_iters=20, init_from="resume")
    assert rows(tmp_path, "eval")[-1]["val_loss"] < saved["best_val_loss"]


def test_a_resumed_run_takes_its_own_weight_decay_and_betas(tmp_path, data, capsys):
    # the optimizer's saved state holds them too, and used to win in silence
    run(tmp_path, data)
    run(tmp_path, data, max_iters=12, init_from="resume", weight_decay=0.3, beta2=0.9)
    decayed, others = torch.load(tmp_path / "ckpt.pt", weights_only=True)["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], others["weight_decay"], decayed["betas"]) == (0.3, 0.0, (0.9, 0.9))
    assert "resuming with weight_decay=0.3; it was 0.1" in capsys.readouterr().out


def test_a_resumed_run_takes_up_the_scaler_and_the_best_loss(tmp_path, data):
    # T7: neither used to be restored
    run(tmp_path, data, dtype="float16")
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    saved["scaler"]["scale"], saved["best_val_loss"] = 1234.0, 0.0
    torch.save(saved, tmp_path / "ckpt.pt")
    (tmp_path / "best.pt").unlink()
    run(tmp_path, data, max_iters=15, init_from="resume", dtype="float16")
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["scaler"]["scale"] == 1234.0
    assert not (tmp_path / "best.pt").exists()  # no loss is below 0


def test_deterministic_holds_for_the_run(tmp_path, data):
    run(tmp_path, data, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_finetuning_starts_from_hugging_face_weights(tmp_path, data, capsys):
    from tests.test_model import hugging_face

    hugging_face(tmp_path / "hf", n_layer=1, n_head=2, n_embd=64, n_positions=32, vocab_size=101)
    run(tmp_path / "out", data, init_from=str(tmp_path / "hf"), max_iters=10, learning_rate=1e-3)
    out = capsys.readouterr().out
    assert "n_layer=1, as in the weights of init_from=" in out
    saved = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)
    assert saved["model_args"]["block_size"] == 16  # cropped
    assert saved["model"]["transformer.wte.weight"].shape == (128, 64)
    assert (saved["model"]["transformer.wte.weight"][101:] == 0).all()


# bad steps and bad input


def test_a_gradient_that_is_not_finite_is_named_and_survived(tmp_path, data, capsys, monkeypatch):
    # T25
    forward, calls = GPT.forward, []

    def poisoned(self, idx, targets=None, cache=None):
        logits, loss = forward(self, idx, targets, cache)
        if self.training:
            calls.append(None)
        return logits, loss * torch.nan if len(calls) == 6 and self.training else loss  # two were rehearsals

    monkeypatch.setattr(GPT, "forward", poisoned)
    run(tmp_path, data)
    losses = [row["loss"] for row in rows(tmp_path)]
    assert math.isnan(losses[3]) and all(map(math.isfinite, losses[:3] + losses[4:]))
    assert "iter 3: loss nan, gradient norm nan: step skipped, weights kept" in capsys.readouterr().out
    assert all(torch.isfinite(w).all() for w in weights(tmp_path).values())


def test_a_run_whose_kernel_is_another_ends(tmp_path, data, monkeypatch):
    # K1, K5: the receipt is not just printed
    flash = {"forward": ["flash"], "backward": ["flash"], "ops": []}
    monkeypatch.setattr(train.kernels, "require", lambda *_: None)
    monkeypatch.setattr(train.kernels, "observe", lambda step: flash)
    with pytest.raises(UserError, match="attention='manual' was asked for, but the profiler saw flash"):
        run(tmp_path, data, attention="manual")


def test_a_lost_run_ends(tmp_path, data, monkeypatch):
    forward = GPT.forward

    def poisoned(self, *args, **kwargs):
        logits, loss = forward(self, *args, **kwargs)
        return logits, loss * torch.nan

    monkeypatch.setattr(GPT, "forward", poisoned)
    with pytest.raises(UserError, match="20 steps in a row had no finite gradient, the last at iteration 19"):
        run(tmp_path, data, max_iters=100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(attention="efficient"), "attention='efficient' cannot train on cpu .*on GPUs only"),
        (dict(attention="cudnn"), "attention='cudnn' cannot train on cpu .*on GPUs only"),
        (dict(attention="flex"), "no backward of FlexAttention on a CPU"),
        (dict(attention="flash", dropout=0.1), "attention='flash' cannot train on cpu .*dropout 0.1.*sdpa"),
        (dict(n_head=3), "n_embd=32 cannot be split over n_head=3"),
        (dict(batch_size=0), "batch_size=0 must be 1 or more"),
        (dict(dropout=float("nan")), "dropout=nan must be from 0"),
        (dict(learning_rate=-1.0), "learning_rate=-1.0 must be 0 or more"),
        (dict(learning_rate=math.inf), "learning_rate=inf must be 0 or more, and finite"),
        (dict(beta2=1.0), "beta2=1.0 must be from 0"),
        (dict(init_from="gpt3"), "init_from='gpt3' must be scratch, resume, gpt2"),
        (dict(init_from="resume"), "ckpt.pt does not exist: train first"),
        (dict(block_size=5000), "Lower --block_size"),
        (dict(vocab_size=50), "has 65 ids, the model 50"),
        (dict(dataset="nowhere"), "dataset='nowhere' is no folder of data/"),
        (dict(device="cuda:99"), "device='cuda:99' is not here|there is no cuda:99"),
        (dict(device="gpu"), "device='gpu' is no device"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused(tmp_path, data, settings, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, data, **settings)


def test_bad_input_ends_in_one_sentence(tmp_path, data):
    ask = flags(small(tmp_path / "out", data))
    assert "there is no setting 'atention': did you mean attention?" in fails("train.py", "--atention=flash")
    assert "config file nope.py does not exist" in fails("train.py", "nope.py")
    assert "attention='cudnn' cannot train on cpu" in fails("train.py", *ask, "--attention=cudnn")
    bad = tmp_path / "bad"
    bad.mkdir()
    for name in ("train.bin", "val.bin", "meta.json"):
        (bad / name).write_bytes((data / name).read_bytes())
    (bad / "val.bin").write_bytes((data / "val.bin").read_bytes()[:-100])
    assert "val.bin is truncated" in fails("train.py", *ask, f"--dataset={bad}")
    (bad / "val.bin").write_bytes((data / "val.bin").read_bytes()[:-2] + b"\xff\xff")
    (bad / "train.bin").write_bytes(b"\x50\x00" * 20_000)
    assert "holds the id 80, but the vocabulary has 65" in fails("train.py", *ask, f"--dataset={bad}")
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "ckpt.pt").write_bytes(b"not a checkpoint")
    assert "ckpt.pt is damaged" in fails("train.py", *ask, "--init_from=resume")
    (tmp_path / "file").write_text("")
    assert "cannot write" in fails("train.py", *ask, f"--out_dir={tmp_path / 'file'}")


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, data):
    run(tmp_path, data)
    before = weights(tmp_path)
    ask = flags(small(tmp_path, data, init_from="resume", max_iters=20))
    limited = ["bash", "-c", f'ulimit -f 40; exec "{sys.executable}" "$@"', "train"]  # files up to 40 KiB
    done = script("train.py", *ask, check=False, prefix=limited)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "ckpt.pt: " in done.stderr and "what it held before is kept" in done.stderr
    assert_same_bytes(weights(tmp_path), before)


def test_wandb_offline(tmp_path, data):
    settings = small(tmp_path / "out", data, wandb_log=True)
    script("train.py", *flags(settings), WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_train_starts_without_what_it_does_not_use():
    code = (
        "import train, sys; print([m for m in ('wandb', 'datasets', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    assert script("-c", code).stdout.strip() == "[]"


def test_a_terminal_shows_a_bar_and_a_pipe_plain_lines(tmp_path, data):
    done = script("train.py", *flags(small(tmp_path, data)))
    assert "\r" not in done.stdout + done.stderr and "it/s" not in done.stderr
    main, child_end = os.openpty()
    termios.tcsetwinsize(child_end, (24, 100))
    command = [sys.executable, "train.py", *flags(small(tmp_path, data))]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=child_end)
    os.close(child_end)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that its other end is closed
        while chunk := os.read(main, 10_000):
            shown += chunk
    os.close(main)
    assert child.wait(timeout=60) == 0
    assert "10/10" in shown.decode() and "val " in shown.decode()


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("attention", ["manual", "math", "efficient", "flash", "cudnn", "flex", "auto"])
def test_every_kernel_trains_on_a_gpu(tmp_path, data, attention, compile):
    options = dict(n_head=1, n_embd=64, block_size=64, device="cuda", dtype="bfloat16", max_iters=30)
    reference = rows(run(tmp_path / "reference", data, attention="math", **options))[-1]["loss"]
    torch.compiler.reset()
    out_dir = run(tmp_path / "out", data, attention=attention, compile=compile, **options)
    assert rows(out_dir)[-1]["loss"] == pytest.approx(reference, rel=0.02)
    receipt = json.loads((out_dir / "run.json").read_text())["receipt"]
    if attention in ("efficient", "flash", "cudnn", "flex"):
        assert receipt["forward"] == receipt["backward"] == [attention]
