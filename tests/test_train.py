"""Training, run small on the CPU: the loop, splits and ranks that agree, and an end to every bad input."""

import math

import pytest
import torch

import train
from fusedgpt.attention import choose, permitted
from fusedgpt.attention.case import Case
from fusedgpt.data import dataset
from fusedgpt.data.dataloader import DataLoader
from fusedgpt.errors import UserError
from fusedgpt.machine import determinism
from fusedgpt.parallel import distributed
from model import GPT, GPTConfig
from tests.conftest import assert_same_bytes, checkpoint_of, flags, record, rows, run, small, tensors, weights
from tests.launch import process, ranks, script


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
    assert out.endswith(f"next: python sample.py {tmp_path}; {tmp_path}/report.html shows the run\n")
    kept = record(tmp_path)
    assert kept["receipt"]["forward"] == ["math"] and kept["tokens_per_step"] == 64
    # products with as many columns as the padded vocabulary: the ladder says what a compiler made of them
    assert {columns for columns, _ in kept["receipt"]["logits"]} == {kept["padded_vocab_size"]}
    assert kept["settings"]["max_iters"] == 60 and kept["environment"]["torch"] == torch.__version__
    assert kept["time"]["samples"] == 55 and kept["time"]["p10_ms"] <= kept["time"]["median_ms"]
    assert kept["parameters"] - kept["parameters_in_products"] == 16 * 32


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
    means = [state["exp_avg"].double() for state in checkpoint_of(tmp_path)["optimizer"]["state"].values()]
    for mean, share in zip(means, sorted(shares.values(), key=lambda p: p.dim() < 2)):
        torch.testing.assert_close(mean, share, rtol=1e-3, atol=1e-4 * share.abs().max().item())
    for name, p in params.items():
        grad = 10 * shares[name]
        decay = 0.2 if p.dim() >= 2 else 0.0
        want = p.detach() * (1 - 0.5 * decay) - 0.5 * grad / (grad.abs() + 1e-8)
        clear = grad.abs() > 1e-5  # if the gradient is all rounding, its sign is too
        torch.testing.assert_close(got[name].double()[clear], want[clear], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_frozen_layer_and_a_head_that_the_loss_skips_are_left_alone(tmp_path, data, monkeypatch, optimizer):
    # each was a traceback: its gradient is None, which "has no attribute is_cpu"
    counted, more = GPTConfig.num_params.fget, []

    class Forked(GPT):
        def __init__(self, config):
            more.clear()
            super().__init__(config)
            self.second_head = torch.nn.Linear(config.n_embd, 3)
            more.append(3 * config.n_embd + 3)
            for p in (self.transformer.wte.weight, *self.transformer.h[0].parameters()):
                p.requires_grad_(False)

    monkeypatch.setattr(train, "GPT", Forked)
    monkeypatch.setattr(GPTConfig, "num_params", property(lambda config: counted(config) + sum(more)))
    still = dict(learning_rate=0.0, min_lr=0.0)
    begun = weights(run(tmp_path / "begun", data, max_iters=1, optimizer=optimizer, **still))
    whole = run(tmp_path / "whole", data, max_iters=4, optimizer=optimizer)
    half = run(tmp_path / "half", data, max_iters=2, optimizer=optimizer)
    run(half, data, max_iters=4, optimizer=optimizer, init_from="resume")
    assert_same_bytes(weights(half), weights(whole))
    kept = {name for name, w in weights(whole).items() if torch.equal(w, begun[name])}
    frozen = {name for name in begun if ".h.0." in name or "wte" in name or "lm_head" in name or "second" in name}
    assert kept == frozen


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_evaluates_and_saves_the_average_of_its_weights_and_trains_as_without(tmp_path, data, optimizer):
    settings = dict(eval_interval=1, keep_checkpoints=9, optimizer=optimizer)
    plain, ours = run(tmp_path / "plain", data, **settings, max_iters=4), tmp_path / "ours"
    run(ours, data, **settings, max_iters=4, ema_decay=0.7)
    each = [*(weights(plain, f"ckpt-{n}.pt") for n in (1, 2, 3)), weights(plain)]
    for name, found in weights(ours).items():
        first, second, third, last = (saved[name].double() for saved in each)
        wanted = 0.7 * (0.7 * (0.7 * first + 0.3 * second) + 0.3 * third) + 0.3 * last
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-7, msg=name)
    saved = checkpoint_of(ours)
    saved["config"]["ema_decay"] = 0.0
    for state in saved["optimizer"]["state"].values():
        del state["twin"]
    torch.save(saved, tmp_path / "ckpt.pt")
    alone = flags(small(tmp_path, data, **settings, init_from="resume", eval_only=True))
    assert f"val loss {rows(ours, 'eval')[-1]['val_loss']:.4f}\n" in script("train.py", *alone).stdout
    for out in (plain, ours):  # the trained weights are those of a run without
        run(out, data, **settings, init_from="resume", max_iters=6)
    assert_same_bytes(tensors(checkpoint_of(ours)), tensors(checkpoint_of(plain)))
    assert [row["loss"] for row in rows(ours)] == [row["loss"] for row in rows(plain)]


def test_bfloat16_and_float16_train_on_a_cpu(tmp_path, data):
    # T9: nanoGPT's dtype did nothing on a CPU; T7: the scaler's state was not saved
    gently = dict(max_iters=6, learning_rate=1e-3)  # so that rounding does not grow
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
    run(tmp_path, data, compile=True, max_iters=1)
    assert "eager (torch.compile cannot work here: RuntimeError: no C++ compiler)" in capsys.readouterr().out
    assert record(tmp_path)["compile"] is False


def test_evaluation_kernel_and_padding_do_not_change_the_batches(tmp_path, data, small_run):
    # T2: one RNG used to serve weights, evaluation and batches
    base = [row["loss"] for row in rows(small_run)][:4]
    for n, change in enumerate((dict(eval_interval=2, eval_iters=1), dict(vocab_multiple=1, attention="manual"))):
        other = [row["loss"] for row in rows(run(tmp_path / str(n), data, max_iters=4, **change))]
        assert other == pytest.approx(base, rel=1e-5), change
    other = [row["loss"] for row in rows(run(tmp_path / "seed", data, max_iters=4, seed=2))]
    assert other != pytest.approx(base, rel=1e-3)


def test_two_ranks_equal_one_and_resume_bitwise(tmp_path, data):
    # T9, T10, T13; dropout is on, because it follows the micro-batch, not the rank
    settings = dict(gradient_accumulation_steps=4, dropout=0.1, max_iters=4, eval_interval=2)
    one = run(tmp_path / "one", data, **settings)
    two, half = tmp_path / "two", tmp_path / "half"
    ranks(2, "train.py", *flags(small(two, data, **settings, log_interval=4)))
    assert_close_runs(two, one)
    assert record(two)["world_size"] == 2 and record(two)["tokens_per_step"] == 4 * 4 * 16
    evaluations = [[row["val_loss"] for row in rows(path, "eval")] for path in (one, two)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    ranks(2, "train.py", *flags(small(half, data, **{**settings, "max_iters": 2})))
    ranks(2, "train.py", *flags(small(half, data, **settings, init_from="resume")))
    assert_same_bytes(weights(half), weights(two))


def assert_close_runs(a, b):
    """The same losses, gradient norms, and means of gradients in AdamW, to rounding."""
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows(a)] == pytest.approx([row[key] for row in rows(b)], rel=1e-4), key
    states = [checkpoint_of(out)["optimizer"]["state"] for out in (a, b)]
    for n in states[0]:
        x, y = (state[n]["exp_avg"] for state in states)
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * y.abs().max().item() + 1e-12)


def test_a_rank_that_drifts_ends_the_run_and_is_not_saved(tmp_path, data, monkeypatch):
    # without the call in the loop, ranks would train on with different weights, and rank 0 would save its own
    seen = []

    def require_same_weights(model, ranks, iteration):
        seen.append(iteration)
        if iteration == 7:
            raise UserError("rank 1 no longer has the weights of rank 0")

    monkeypatch.setattr(distributed, "require_same_weights", require_same_weights)
    with pytest.raises(UserError, match="rank 1 no longer has"):
        run(tmp_path, data, max_iters=7, check_interval=2, eval_interval=5)
    assert seen == [0, 2, 4, 5, 6, 7]
    for name in ("ckpt.pt", "best.pt"):
        assert checkpoint_of(tmp_path, name)["iter_num"] == 5


def test_dropout_differs_from_step_to_step_and_from_micro_batch_to_micro_batch(tmp_path, data, monkeypatch):
    seeds, seed = [], determinism.seed
    monkeypatch.setattr(determinism, "seed", lambda *stream: seeds.append(stream) or seed(*stream))
    run(tmp_path, data, max_iters=3, gradient_accumulation_steps=2, dropout=0.1)
    drawn = [stream for stream in seeds if "dropout" in stream]
    assert drawn == [(1337, "dropout", it, micro) for it in range(3) for micro in range(2)]


def test_a_run_whose_kernel_is_another_ends(tmp_path, data, monkeypatch):
    # K1, K5: the receipt is not just printed
    flash = {"forward": ["flash"], "backward": ["flash"], "ops": []}
    monkeypatch.setattr(choose, "require", lambda *_: None)
    monkeypatch.setattr(train, "observe", lambda *_, **__: flash)
    with pytest.raises(UserError, match="attention='manual' was asked for, but the profiler saw flash"):
        run(tmp_path, data, attention="manual")
    monkeypatch.setattr(train, "resolve_device", lambda *_: torch.device("mps"))
    with pytest.raises(UserError, match="on mps PyTorch recomputes with other dropout"):
        run(tmp_path, data, recompute="block", dropout=0.1)


def test_scripts_run_without_what_they_do_not_use(tmp_path, data, small_run):
    # importing torch.distributed's collectives, AdamW's first step, the profiler's and the first number drawn for an
    # embedding imported torch._dynamo and sympy: more than importing PyTorch takes
    heavy = ("wandb", "datasets", "transformers", "matplotlib", "tyro", "sympy", "torch._dynamo", "torch._inductor")
    heavy += ("torch.distributed.nn", "torch.distributed.fsdp", "pandas")
    train_it = flags(small(tmp_path, data, attention="auto", dtype="auto", optimizer="muon", max_iters=2))
    code = "import runpy, sys; sys.path.insert(0, '.')"
    for name, *args in (("train.py", *train_it), ("sample.py", small_run, "--start=a", "--max_new_tokens=2")):
        code += f"\nsys.argv = {[name, *map(str, args)]}; runpy.run_path({name!r}, run_name='__main__')"
        code += f"\nprint({name!r}, 'has', [m for m in {heavy} if m in sys.modules])"
    said = process("-c", code).stdout
    assert "train.py has []\n" in said and "sample.py has []\n" in said


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
    receipt = record(out_dir)["receipt"]
    if attention in ("efficient", "flash", "cudnn", "flex"):
        assert receipt["forward"] == receipt["backward"] == [attention]
