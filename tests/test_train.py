"""Training, run small on the CPU: exact resume, splits and ranks that agree, and an end to every bad input."""

import itertools
import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
import torch

import train
from fusedgpt.attention import choose, permitted
from fusedgpt.attention.case import Case
from fusedgpt.data import dataset, prepare
from fusedgpt.data.dataloader import DataLoader
from fusedgpt.errors import UserError
from fusedgpt.machine import determinism, memory
from fusedgpt.machine.choices import Choices
from fusedgpt.parallel import distributed
from fusedgpt.training import nonfinite
from model import GPT, GPTConfig
from tests.conftest import (
    LLAMA,
    assert_same_bytes,
    checkpoint_of,
    flags,
    optimizer_state,
    rows,
    run,
    small,
    wait_for,
    weights,
)
from tests.launch import fails, process, ranks, script, torchrun

# at the rate of `small`, a Llama's rounding grows to 1e-3 of the loss in 20 steps
GENTLE_LLAMA = LLAMA | dict(learning_rate=1e-3)

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
    assert "tokens per iteration: 64 = 1 micro-batch x 4 x 16, on 1 process\n" in out  # T21
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
    settings = dict(max_iters=1, gradient_accumulation_steps=3, learning_rate=0.5, warmup_iters=0, grad_clip=0.1)
    run(tmp_path, data, **settings, weight_decay=0.2)
    determinism.seed(1337, "init")
    config = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65, vocab_multiple=64, bias=False)
    net = GPT(GPTConfig(**config)).double()
    loader = DataLoader(data, dataset.read_meta(data), 16, 12, 1337, torch.device("cpu"))
    loss = net(*loader.train(0, 0))[1]
    loss.backward()
    assert rows(tmp_path)[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters()))
    assert rows(tmp_path)[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    got, params = weights(tmp_path), dict(net.named_parameters())
    shares = {name: 0.1 * params[name].grad * min(1.0, 0.1 / (norm + 1e-6)) for name in params}  # 0.1 is 1 - beta1
    # AdamW's running means too, because its steps do not depend on the scale of gradients
    means = [state["exp_avg"].double() for state in optimizer_state(tmp_path).values()]
    for mean, share in zip(means, sorted(shares.values(), key=lambda p: p.dim() < 2)):
        torch.testing.assert_close(mean, share, rtol=1e-3, atol=1e-4 * share.abs().max().item())
    for name, p in params.items():
        grad = 10 * shares[name]
        decay = 0.2 if p.dim() >= 2 else 0.0
        want = p.detach() * (1 - 0.5 * decay) - 0.5 * grad / (grad.abs() + 1e-8)
        clear = grad.abs() > 1e-5  # if the gradient is all rounding, its sign is too
        torch.testing.assert_close(got[name].double()[clear], want[clear], rtol=1e-3, atol=1e-3)


def test_bfloat16_and_float16_train_on_a_cpu(tmp_path, data):
    # T9: nanoGPT's dtype did nothing on a CPU; T7: the scaler's state was not saved
    gently = dict(max_iters=20, learning_rate=1e-3)  # so that rounding does not grow
    full = rows(run(tmp_path / "a", data, **gently))
    for dtype in ("bfloat16", "float16"):
        half = rows(run(tmp_path / dtype, data, **gently, dtype=dtype))
        assert half[-1]["loss"] == pytest.approx(full[-1]["loss"], rel=0.005)
        assert half[-1]["loss"] != full[-1]["loss"]
        assert half[0]["grad_norm"] == pytest.approx(full[0]["grad_norm"], rel=0.01)  # of unscaled gradients
    saved = checkpoint_of(tmp_path / "float16")
    assert saved["scaler"]["scale"] > 1
    assert not checkpoint_of(tmp_path / "a")["scaler"]


def test_compile_without_a_compiler_runs_eager_and_says_so(tmp_path, data, capsys, monkeypatch):
    # T23: torch.compile ended the run on machines with no C++ compiler
    monkeypatch.setattr(torch, "compile", lambda *_: (_ for _ in ()).throw(RuntimeError("no C++ compiler")))
    run(tmp_path, data, compile=True)
    assert "eager (torch.compile cannot work here: RuntimeError: no C++ compiler)" in capsys.readouterr().out
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


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """A data folder of short documents: 65 ids, and one that ends each of them, after some ten tokens."""
    folder, rng = tmp_path_factory.mktemp("stories"), np.random.default_rng(0)
    ids = np.cumsum(rng.integers(-3, 4, 23_000)) % 65
    ids[rng.random(23_000) < 0.1] = 65
    meta = dict(tokenizer="char", vocab_size=66, itos=[*(chr(33 + i) for i in range(65)), None], end_of_text=65)
    prepare.write(folder, {"train": [ids[:20_000]], "val": [ids[20_000:]]}, "stories", **meta)
    return folder


KERNELS_OF_A_CPU = ("manual", "blocked", "math", "masked")


@pytest.mark.parametrize(
    ("family", "names"),
    [({}, (*KERNELS_OF_A_CPU, "flash", "across")), (GENTLE_LLAMA, KERNELS_OF_A_CPU)],
    ids=["GPT-2", "Llama"],
)
def test_every_kernel_trains_to_the_same_loss_within_documents(tmp_path, stories, family, names):
    losses = {}
    for name in names:
        how = dict(mask="document", attention=name) if name != "across" else dict(attention="manual")
        losses[name] = [row["loss"] for row in rows(run(tmp_path / name, stories, max_iters=20, **family, **how))]
    for name in losses.keys() - {"manual", "across"}:
        assert losses[name] == pytest.approx(losses["manual"], rel=1e-4), name
    saved = checkpoint_of(tmp_path / "masked")
    assert saved["extra_model_args"]["document_start"] == 65
    if "across" in names:
        assert losses["across"] != pytest.approx(losses["manual"], rel=1e-3)
        assert "document_start" not in checkpoint_of(tmp_path / "across")["extra_model_args"]


def test_a_run_within_documents_goes_on_so_and_can_be_evaluated_otherwise(tmp_path, stories, capsys):
    whole = run(tmp_path / "whole", stories, mask="document")
    half = run(tmp_path / "half", stories, mask="document", max_iters=5)
    script("train.py", *["--init_from=resume", f"--out_dir={half}", "--max_iters=10"])  # as a user would
    assert_same_bytes(weights(half), weights(whole))
    within = rows(whole, "eval")[-1]["val_loss"]
    capsys.readouterr()
    for mask, differs in (("document", False), ("causal", True)):
        run(whole, stories, init_from="resume", eval_only=True, mask=mask)
        found = float(re.search(r"val loss ([\d.]+)", capsys.readouterr().out)[1])
        assert (abs(found - within) > 1e-3) == differs, mask


@pytest.mark.parametrize(("mask", "then"), [("causal", "document"), ("document", "causal")])
def test_another_mask_begins_the_best_loss_anew(tmp_path, stories, capsys, mask, then):
    # a loss across documents stayed the best of a run that had gone on within them: best.pt was never replaced
    run(tmp_path, stories, mask=mask)
    saved = checkpoint_of(tmp_path) | {"best_val_loss": 0.0, "best_iter": 5}
    saved["config"].pop("mask")  # as in checkpoints from before there was a mask
    torch.save(saved, tmp_path / "ckpt.pt")
    capsys.readouterr()
    run(tmp_path, stories, init_from="resume", mask=then, max_iters=20)
    said = capsys.readouterr().out
    assert "resuming with mask" not in said
    assert f"another mask, {then}: losses from here on cannot be compared with those before" in said
    best = checkpoint_of(tmp_path, "best.pt")
    evaluated = {row["iter"]: row["val_loss"] for row in rows(tmp_path, "eval") if row["iter"] >= 10}
    assert best["best_val_loss"] == min(evaluated.values()) == evaluated[best["iter_num"]]


def test_a_run_that_makes_no_step_keeps_its_mask(tmp_path, stories, capsys):
    # its checkpoints and last evaluation became those of a model within documents, and run.json still said causal
    run(tmp_path, stories)
    before, losses = checkpoint_of(tmp_path)["extra_model_args"], rows(tmp_path, "eval")
    run(tmp_path, stories, init_from="resume", mask="document")
    assert "not used, because there is no step to make: mask='document'" in capsys.readouterr().out
    assert checkpoint_of(tmp_path)["extra_model_args"] == before and rows(tmp_path, "eval") == losses


def test_documents_that_end_with_another_id_are_refused(tmp_path, stories):
    # the data's id replaced the one that the weights were trained with, in silence
    run(tmp_path / "out", stories, mask="document")
    other = shutil.copytree(stories, tmp_path / "data")
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"end_of_text": 64}))
    with pytest.raises(UserError, match="begin with the id 65, but in the data documents end with the id 64"):
        run(tmp_path / "out", other, mask="document", init_from="resume")
    run(tmp_path / "out", other, mask="causal", init_from="resume", max_iters=11)


def test_data_without_any_separator_say_that_the_mask_may_do_nothing(tmp_path, stories, capsys):
    # nanoGPT's shakespeare has GPT-2's ids and not one <|endoftext|>: the mask hid nothing, and no line said so
    run(tmp_path / "stories", stories, mask="document", max_iters=1)
    assert "may do nothing" not in capsys.readouterr().out
    for split in ("train", "val"):
        np.tile(np.arange(65), 100).astype("<u2").tofile(tmp_path / f"{split}.bin")
    run(tmp_path / "none", tmp_path, mask="document", max_iters=1, vocab_size=50257)
    assert "mask=document may do nothing: the id 50256, which ends a document, is not among" in capsys.readouterr().out


def test_splits_of_a_step_give_the_same_loss_and_gradient(tmp_path, data):
    # T13: accumulation used to be divided by the GPUs of one machine
    whole = run(tmp_path / "1", data, max_iters=3, batch_size=8)
    for split in (2, 4):
        parts = run(tmp_path / str(split), data, max_iters=3, batch_size=8 // split, gradient_accumulation_steps=split)
        assert_close_runs(parts, whole)


def test_two_ranks_equal_one_and_resume_bitwise(tmp_path, data):
    # T9, T10, T13; dropout is on, because it follows the micro-batch, not the rank
    settings = dict(gradient_accumulation_steps=4, dropout=0.1, max_iters=6, eval_interval=3)
    one = run(tmp_path / "one", data, **settings)
    torchrun(2, "train.py", *flags(small(tmp_path / "two", data, **settings, log_interval=4)))
    two = tmp_path / "two"
    assert_close_runs(two, one)
    record = json.loads((two / "run.json").read_text())
    assert record["world_size"] == 2 and record["tokens_per_step"] == 4 * 4 * 16
    evaluations = [[row["val_loss"] for row in rows(path, "eval")] for path in (one, two)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    ranks(2, "train.py", *flags(small(tmp_path / "half", data, **{**settings, "max_iters": 3})))
    ranks(2, "train.py", *flags(small(tmp_path / "half", data, **settings, init_from="resume")))
    assert_same_bytes(weights(tmp_path / "half"), weights(two))


def test_two_ranks_of_muon_equal_one(tmp_path, data):
    # each rank orthogonalises all matrices: ranks that did not agree to the bit would end the run at check_interval
    settings = dict(optimizer="muon", gradient_accumulation_steps=2, max_iters=4)
    one = run(tmp_path / "one", data, **settings)
    ranks(2, "train.py", *flags(small(tmp_path / "two", data, **settings, check_interval=1)))
    losses = [[row["loss"] for row in rows(path)] for path in (one, tmp_path / "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # Muon computes in bfloat16, which magnifies rounding


def assert_close_runs(a, b):
    """The same losses, gradient norms, and means of gradients in AdamW, to rounding."""
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows(a)] == pytest.approx([row[key] for row in rows(b)], rel=1e-4), key
    states = optimizer_state(a), optimizer_state(b)
    for n in states[0]:
        x, y = (state[n]["exp_avg"] for state in states)
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * y.abs().max().item() + 1e-12)


@pytest.mark.parametrize(
    ("fails_at", "compared", "evaluated"), [(5, [0, 2, 4, 5], [0]), (7, [0, 2, 4, 5, 6, 7], [0, 5])]
)
def test_a_rank_that_drifts_ends_the_run_and_is_not_saved(tmp_path, data, monkeypatch, fails_at, compared, evaluated):
    # without the call in the loop, ranks would train on with different weights, and rank 0 would save its own
    seen = []

    def require_same_weights(model, ranks, iteration):
        seen.append(iteration)
        if iteration == fails_at:
            raise UserError("rank 1 no longer has the weights of rank 0")

    monkeypatch.setattr(distributed, "require_same_weights", require_same_weights)
    with pytest.raises(UserError, match="rank 1 no longer has"):
        run(tmp_path, data, max_iters=7, check_interval=2, eval_interval=5)
    assert seen == compared
    assert [row["iter"] for row in rows(tmp_path, "eval")] == evaluated
    if evaluated[-1]:
        wait_for(tmp_path / "best.pt", 60)  # linked by a thread, after ckpt.pt; the end of a process waits for it
    for name in ("ckpt.pt", "best.pt"):
        saved = checkpoint_of(tmp_path, name)["iter_num"] if (tmp_path / name).exists() else 0
        assert saved == evaluated[-1], name


def test_dropout_differs_from_step_to_step_and_from_micro_batch_to_micro_batch(tmp_path, data, monkeypatch):
    seeds, seed = [], determinism.seed
    monkeypatch.setattr(determinism, "seed", lambda *stream: seeds.append(stream) or seed(*stream))
    run(tmp_path, data, max_iters=3, gradient_accumulation_steps=2, dropout=0.1)
    drawn = [stream for stream in seeds if "dropout" in stream]
    assert drawn == [(1337, "dropout", it, micro) for it in range(3) for micro in range(2)]


def test_a_world_that_does_not_divide_is_refused(tmp_path, data):
    settings = small(tmp_path, data, gradient_accumulation_steps=3)
    place = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # nobody is there
    done = script("train.py", *flags(settings), check=False, **place)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "gradient_accumulation_steps=3 cannot be shared by 2 processes" in done.stderr


# bad steps and bad input


def test_a_gradient_that_is_not_finite_is_named_and_survived(tmp_path, data, capsys, monkeypatch):
    # T25
    forward, calls = GPT.forward, []

    def poisoned(self, idx, targets=None, cache=None, logits=True):
        logits, loss = forward(self, idx, targets, cache, logits)
        if self.training:
            calls.append(None)
        return logits, loss * torch.nan if len(calls) == 6 and self.training else loss  # two were rehearsals

    monkeypatch.setattr(GPT, "forward", poisoned)
    run(tmp_path, data)
    losses = [row["loss"] for row in rows(tmp_path)]
    assert losses[3] is None and all(map(math.isfinite, losses[:3] + losses[4:]))  # JSON has no NaN
    said = capsys.readouterr().out
    assert "iter 3: loss nan, gradient norm nan: step skipped, weights kept" in said
    assert "iter 3: not seen again when the step is repeated eagerly: suspect the compiled kernels" in said
    assert all(torch.isfinite(w).all() for w in weights(tmp_path).values())


def test_a_bad_batch_is_named_with_its_place_and_its_first_tensors(tmp_path, data, capsys, monkeypatch):
    loader = DataLoader(data, dataset.read_meta(data), 16, 4, 1337, torch.device("cpu"))
    bad, _ = loader.train(iteration=3, micro_step=1)
    forward = torch.nn.Embedding.forward

    def embed(self, idx):
        return forward(self, idx) * (torch.nan if torch.equal(idx, bad) else 1)

    monkeypatch.setattr(torch.nn.Embedding, "forward", embed)
    run(tmp_path, data, gradient_accumulation_steps=2)
    starts = ", ".join(map(str, loader.starts(3, 1)))
    place = f"in micro-step 1, whose windows begin at tokens {starts} of train"
    tensors = "transformer.wte, transformer.drop, transformer.h.0.ln_1"
    assert f"iter 3: first in outputs: {tensors}, {place}" in capsys.readouterr().out


def test_a_bad_step_that_is_seen_later_is_explained_with_that_said(tmp_path, data, capsys, monkeypatch):
    # the weights have moved on: to suspect the kernels or the device would be wrong
    norm, calls = distributed.gradient_norm, itertools.count()
    monkeypatch.setattr(
        distributed, "gradient_norm", lambda model: norm(model) * (torch.nan if next(calls) == 3 else 1)
    )
    run(tmp_path, data, log_interval=4, eval_interval=100)
    said = capsys.readouterr().out
    again = "repeated with weights that are 1 steps newer; --log_interval=1 repeats a step at once"
    assert f"iter 3: not seen again, {again}" in said and "suspect" not in said


def test_another_process_gone_saves_whatever_the_unread_steps_were(tmp_path, data, capsys, monkeypatch):
    # explaining a bad step needs the process that is gone, which used to end the run before it saved
    step, norm, calls = train.train_step, distributed.gradient_norm, itertools.count()

    def dies(state, *args):
        if state.iteration == 7:
            raise UserError("another process is gone")
        return step(state, *args)

    def explain(*args):
        raise UserError("so is the explanation")

    monkeypatch.setattr(train, "train_step", dies)
    monkeypatch.setattr(nonfinite, "explain", explain)
    monkeypatch.setattr(
        distributed, "gradient_norm", lambda model: norm(model) * (torch.nan if next(calls) == 3 else 1)
    )
    with pytest.raises(UserError, match="another process is gone"):
        run(tmp_path, data, log_interval=100, eval_interval=100)
    assert [row["iter"] for row in rows(tmp_path)] == list(range(7))
    wait_for(tmp_path / "ckpt.pt", 60)  # written by a thread; the end of a process waits for it
    assert checkpoint_of(tmp_path)["iter_num"] == 7


@pytest.mark.parametrize("most", [0, 3])
def test_more_than_max_bad_steps_in_a_row_end_the_run(tmp_path, data, monkeypatch, most):
    run(tmp_path, data)
    before = weights(tmp_path)
    monkeypatch.setattr(distributed, "gradient_norm", lambda model: torch.tensor(torch.nan))
    ends = rf"{most + 1} steps in a row .* iteration {10 + most}: resume from .*ckpt\.pt, of iteration 10, with"
    with pytest.raises(UserError, match=ends):
        run(tmp_path, data, max_iters=100, max_bad_steps=most, init_from="resume", eval_interval=2)
    assert_same_bytes(weights(tmp_path), before)


def test_a_run_whose_kernel_is_another_ends(tmp_path, data, monkeypatch):
    # K1, K5: the receipt is not just printed
    flash = {"forward": ["flash"], "backward": ["flash"], "ops": []}
    monkeypatch.setattr(choose, "require", lambda *_: None)
    monkeypatch.setattr(train, "observe", lambda *_, **__: flash)
    with pytest.raises(UserError, match="attention='manual' was asked for, but the profiler saw flash"):
        run(tmp_path, data, attention="manual")


def test_in_float16_too_a_step_that_is_said_to_be_skipped_is(tmp_path, data, monkeypatch):
    # finite gradients with a norm that overflows: the scaler, which saw no infinity, used to apply them unclipped
    run(tmp_path, data, dtype="float16", max_iters=5)
    before = weights(tmp_path)
    monkeypatch.setattr(distributed, "gradient_norm", lambda model: torch.tensor(math.inf))
    run(tmp_path, data, dtype="float16", max_iters=8, init_from="resume")
    assert_same_bytes(weights(tmp_path), before)


def test_in_float16_an_overflow_lowers_the_scale(tmp_path, data):
    run(tmp_path, data, dtype="float16", max_iters=5)
    saved = checkpoint_of(tmp_path)
    saved["scaler"]["scale"] = 2.0**60
    torch.save(saved, tmp_path / "ckpt.pt")
    run(tmp_path, data, dtype="float16", max_iters=8, init_from="resume")
    assert checkpoint_of(tmp_path)["scaler"]["scale"] == 2.0**57


def test_a_command_that_comes_again_ends_with_the_same_bytes(tmp_path, data, monkeypatch, capsys):
    # timed anew, auto could take another kernel, and the weights differed in their last digits
    remembered = Choices().path
    remembered.parent.mkdir(parents=True)
    remembered.write_bytes(b"\xff garbage")
    picks = iter(["math", "manual"])
    monkeypatch.setattr(train.tuning.choose, "fastest", lambda *_, **__: (next(picks), {}))
    a, b = (run(tmp_path / name, data, attention="auto") for name in "ab")
    assert_same_bytes(weights(a), weights(b))
    said = capsys.readouterr().out
    assert (
        said.count("auto: timed now") == said.count("1 of 1 lines") == 1
    )  # the first run has replaced the damaged file
    assert re.search(r"^auto: remembered from 20.*; --choose=again times anew$", said, re.M)
    assert json.loads((tmp_path / "b" / "run.json").read_text())["timed"].startswith("remembered from 20")


def test_a_lost_run_ends(tmp_path, data, monkeypatch):
    finite = iter([True] * 3 + [False] * 15 + [True] + [False] * 100)  # skips count in a row, not in all
    norm = distributed.gradient_norm
    monkeypatch.setattr(
        distributed, "gradient_norm", lambda model: norm(model) if next(finite) else torch.tensor(torch.inf)
    )
    with pytest.raises(UserError, match="21 steps in a row had no finite gradient, the last at iteration 39: there"):
        run(tmp_path, data, max_iters=100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(attention="efficient"), "attention='efficient' cannot train on cpu .*on GPUs only"),
        (dict(batch_size=0), "batch_size=0 must be 1 or more"),
        (dict(dropout=float("nan")), "dropout=nan must be from 0"),
        (dict(learning_rate=-1.0), "learning_rate=-1.0 must be 0 or more"),
        (dict(learning_rate=math.inf), "learning_rate=inf must be 0 or more, and finite"),
        (dict(beta2=1.0), "beta2=1.0 must be from 0"),
        (dict(init_from="gpt3"), "init_from='gpt3' is no GPT-2, .* that can be loaded"),
        (dict(init_from=""), "init_from is empty: it can be scratch, resume, auto, or a hub id"),
        (dict(init_from="resume"), "ckpt.pt does not exist: train first"),
        (dict(block_size=5000), "Lower --block_size"),
        (dict(vocab_size=50), "has 65 ids, the model 50: set --vocab_size=65, or leave it out"),
        (dict(mask="document"), "mask=document needs documents, but .* has no id that ends one: prepare your texts"),
        (dict(dataset="nowhere"), "dataset='nowhere' is no folder: name one of data/"),
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
    done = process("train.py", *ask, check=False, prefix=limited)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "ckpt.pt: " in done.stderr and "what it held before is kept" in done.stderr
    assert_same_bytes(weights(tmp_path), before)


@pytest.mark.parametrize("name", ["train.py", "sample.py"])
def test_scripts_run_without_what_they_do_not_use(tmp_path, data, small_run, name):
    # importing torch.distributed's collectives, AdamW's first step, the profiler's and the first number drawn for an
    # embedding imported torch._dynamo and sympy: more than importing PyTorch takes
    heavy = ("wandb", "datasets", "transformers", "matplotlib", "tyro", "sympy", "torch._dynamo", "torch._inductor")
    heavy += ("torch.distributed.nn", "torch.distributed.fsdp", "tensorboard", "typeguard", "pandas")
    settings = dict(attention="auto", dtype="auto", optimizer="muon", max_iters=2)
    ask = (
        flags(small(tmp_path, data, **settings))
        if name == "train.py"
        else [small_run, "--start=a", "--max_new_tokens=2"]
    )
    code = f"import atexit, runpy, sys; sys.argv = {[name, *map(str, ask)]}; sys.path.insert(0, '.')"
    code += f"; atexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))"
    done = process("-c", f"{code}; runpy.run_path({name!r}, run_name='__main__')")
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_flex_trains_within_documents_as_manual_does(tmp_path, stories, compile):
    options = dict(n_head=1, n_embd=64, block_size=256, device="cuda", dtype="bfloat16", max_iters=30, mask="document")
    losses = {}
    for attention in ("manual", "flex"):
        torch.compiler.reset()
        losses[attention] = rows(run(tmp_path / attention, stories, attention=attention, compile=compile, **options))
    assert losses["flex"][-1]["loss"] == pytest.approx(losses["manual"][-1]["loss"], rel=0.02)
    assert losses["flex"][0]["loss"] == pytest.approx(losses["manual"][0]["loss"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("attention", ["manual", "blocked", "math", "efficient", "flash", "cudnn", "flex", "auto"])
def test_every_kernel_trains_on_a_gpu(tmp_path, data, attention, compile):
    case = Case((4, 1, 64, 64), torch.device("cuda"), torch.bfloat16)
    if attention == "cudnn" and (reason := permitted.refusal(attention, case)):  # ROCm has none
        pytest.skip(reason)
    options = dict(n_head=1, n_embd=64, block_size=64, device="cuda", dtype="bfloat16", max_iters=30)
    reference = rows(run(tmp_path / "reference", data, attention="math", **options))[-1]["loss"]
    torch.compiler.reset()
    out_dir = run(tmp_path / "out", data, attention=attention, compile=compile, **options)
    assert rows(out_dir)[-1]["loss"] == pytest.approx(reference, rel=0.02)
    receipt = json.loads((out_dir / "run.json").read_text())["receipt"]
    if attention in ("efficient", "flash", "cudnn", "flex"):
        assert receipt["forward"] == receipt["backward"] == [attention]


def test_a_model_that_certainly_does_not_fit_is_refused_before_it_is_built(tmp_path, data, monkeypatch):
    # the system ends a process whose memory is full without a word
    monkeypatch.setattr(memory, "total_memory", lambda device: 1000)
    monkeypatch.setattr(train, "GPT", None)
    with pytest.raises(UserError, match="of memory or more, and this machine or its container has"):
        run(tmp_path, data)


def test_data_are_looked_for_first(tmp_path, data, monkeypatch, capsys):
    # in a fresh clone, `python train.py` announced 15.59 GiB before it found that there was nothing to train on
    monkeypatch.setattr(train.dataset, "find_folder", lambda root, name: tmp_path)
    with pytest.raises(
        UserError, match=r"train.bin does not exist.*; for a first run .* train.py config/quickstart.py"
    ):
        run(tmp_path / "out", train.Settings.dataset)
    with pytest.raises(UserError, match=r"train.bin does not exist") as raised:
        run(tmp_path / "out", tmp_path)  # a data set that was named
    assert "quickstart" not in str(raised.value)
    assert "GiB" not in (said := capsys.readouterr().out) and "memory" not in said
