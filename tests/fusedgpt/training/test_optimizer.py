"""Learning rates, Muon's step against float64, and steps that are skipped or clipped on the device."""

import math

import pytest
import torch

from fusedgpt.settings import Settings
from fusedgpt.training import optimizer as optimizer_module
from fusedgpt.training.optimizer import COOLDOWN, build_optimizer, learning_rate, update_weights
from model import GPT, GPTConfig
from tests.conftest import LLAMA

SHAPE = dict(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32, vocab_multiple=64)


def built(device="cpu", shape=SHAPE, dtype=torch.float32, **settings):
    """A small GPT and its optimizer, whose products are in `dtype`."""
    torch.manual_seed(0)
    s = Settings(**{"optimizer": "muon", "learning_rate": 0.1, **settings})
    model = GPT(GPTConfig(**shape)).to(device)
    return model, build_optimizer(model, s, torch.device(device).type, dtype)


def with_gradients(model, seed, scale=1.0):
    """Random gradients for every weight, and their norm."""
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=random).to(p.device)
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


def orthogonalised(m):
    """Muon's five Newton-Schulz steps on `m`, in float64. Source: K. Jordan, "Muon", 2024."""
    x = m.T if m.size(0) > m.size(1) else m
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if m.size(0) > m.size(1) else x


QUARTER = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2  # after a quarter of the cosine
FALLS = round(100 * (1 - COOLDOWN))
LINE = {FALLS: 1.0, (FALLS + 100) // 2: 0.55, 99: 0.1 + 0.9 / (100 - FALLS), 100: 0.1, 5000: 0.1}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, {0: 0.1, 8: 0.9, 9: 1.0, 34: QUARTER, 59: 0.55, 109: 0.1, 5000: 0.1}),
        (dict(schedule="wsd", lr_decay_iters=100), {0: 0.1, 8: 0.9, 9: 1.0, **LINE}),
        (dict(schedule="constant"), {0: 0.1, 9: 1.0, 5000: 1.0}),
        (dict(decay_lr=False), {0: 1.0, 5000: 1.0}),
        # a longer run has the same stable phase: what was trained there can go on
        (dict(schedule="wsd", lr_decay_iters=1000), {0: 0.1, 8: 0.9, 9: 1.0, FALLS: 1.0, 10 * FALLS: 1.0}),
    ],
    ids=str,
)
def test_a_learning_rate_warms_up_and_falls_as_its_schedule_says(settings, rates):
    s = Settings(**dict(learning_rate=1.0, min_lr=0.1, warmup_iters=9, lr_decay_iters=109) | settings)
    assert {it: learning_rate(it, s) for it in rates} == pytest.approx(rates)


OF_GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
OF_A_LLAMA = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_gate", "mlp.c_proj")


@pytest.mark.parametrize(
    ("family", "other", "layers"), [({}, "transformer.wpe", OF_GPT2), (LLAMA, "transformer.wbe", OF_A_LLAMA)]
)
def test_muon_has_the_matrices_of_the_layers_and_adamw_all_else(family, other, layers):
    # embeddings are 2-D as well: orthogonalised, rare tokens would move as far as frequent ones
    model, optimizer = built(shape=SHAPE | family, weight_decay=0.3)
    names = {p: name for name, p in model.named_parameters()}
    decayed, rest, hidden = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    assert decayed == ["transformer.wte.weight", f"{other}.weight", *["lm_head.weight"] * bool(family)]
    assert all("ln_" in name or "_norm" in name or name.endswith("bias") for name in rest)
    assert hidden == [f"transformer.h.{n}.{end}.weight" for n in range(2) for end in layers]
    assert sorted(decayed + rest + hidden) == sorted(names.values())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0, 0.3]


PARTS = {"attn.c_attn": [32, 32, 32], "attn.c_proj": [32], "mlp.c_fc": [128], "mlp.c_proj": [32]}


@pytest.mark.parametrize(
    ("family", "matrix", "rows"), [*(({}, *each) for each in PARTS.items()), (LLAMA, "attn.c_attn", [64, 32, 32])]
)
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_two_steps_of_muon_are_those_of_its_formula(limit, family, matrix, rows, device):
    # in float64; clipping matters from the second step on, because the running mean weighs large gradients more.
    # Queries, keys and values are matrices apart, also where keys have fewer heads: they moved as far as long queries
    model, optimizer = built(device, shape=SHAPE | family, weight_decay=0.2)
    p = model.transformer.h[1].get_parameter(f"{matrix}.weight")
    want, mean = p.detach().double(), torch.zeros_like(p, dtype=torch.float64)
    for seed, scale in ((1, 1.0), (2, 50.0)):
        norm = with_gradients(model, seed, scale)
        gradient = p.grad.double() / (max(1.0, norm.item() / limit) if limit else 1.0)
        mean = 0.95 * mean + 0.05 * gradient
        parts = (0.05 * gradient + 0.95 * mean).split(rows)
        step = torch.cat([math.sqrt(max(part.shape)) * orthogonalised(part) for part in parts])
        want = want * (1 - 0.1 * 0.2) - 0.1 * 0.2 * step
        update_weights(optimizer, norm, limit)
        torch.testing.assert_close(p.detach().double(), want, rtol=0, atol=0.002 * step.abs().max().item())
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"].double(), mean)


@pytest.mark.parametrize(("n_embd", "stack"), [(32, 2**24), (96, 2 * 96**2)])
def test_muon_is_pytorchs_to_the_bit(monkeypatch, n_embd, stack):
    # PyTorch's takes one matrix at a time, ours takes those of one shape, two at a time or one if STACK is small
    monkeypatch.setitem(optimizer_module.STACK, "cpu", stack)
    model, optimizer = built(shape={**SHAPE, "n_embd": n_embd}, dtype=torch.bfloat16, weight_decay=0.2)
    other, _ = built(shape={**SHAPE, "n_embd": n_embd})
    pairs = [(p, q) for p, q in zip(model.transformer.h.parameters(), other.transformer.h.parameters()) if p.dim() == 2]
    many = [3 if q.size(0) == 3 * n_embd else 1 for _, q in pairs]  # queries, keys and values
    parts = [torch.nn.Parameter(part) for (_, q), n in zip(pairs, many) for part in q.detach().chunk(n)]
    theirs = torch.optim.Muon(parts, 0.1, 0.2, adjust_lr_fn="match_rms_adamw")
    for seed in range(3):
        update_weights(optimizer, with_gradients(model, seed), 0.0)
        with_gradients(other, seed)
        for part, gradient in zip(parts, (each for (_, q), n in zip(pairs, many) for each in q.grad.chunk(n))):
            part.grad = gradient
        theirs.step()
        assert all(torch.equal(p, q) for p, q in pairs)


def test_an_update_is_exact_for_tiny_gradients_in_float16_too():
    # cast before they were divided by their norm, they were 0 in float16: a T4 had to multiply in float32
    tiny = 5e-9 * torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    exact, errors = orthogonalised(tiny.double()), {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        (update,) = optimizer_module.orthogonalised([tiny], dtype)
        assert update.dtype == dtype
        errors[dtype] = (update - exact).abs().max().item() / exact.abs().max().item()
    assert errors[torch.float32] < 1e-5 and errors[torch.float16] < 5e-3 < errors[torch.bfloat16] < 5e-2, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_have_the_dtype_of_the_run_on_every_rank(monkeypatch, dtype):
    # each rank timed a product to choose it: on a busy machine two of them chose differently, and their weights parted
    model, optimizer = built(dtype=dtype)
    norm, asked = with_gradients(model, 0), []
    monkeypatch.setattr(optimizer_module, "_update_batch", lambda *args: asked.append(args[-1]))
    update_weights(optimizer, norm, 1.0)
    assert set(asked) == {dtype}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_changes_nothing_to_the_bit(bad, device):
    # a gradient of 0 instead would still decay weights and mean, and the mean would move the weights
    model, optimizer = built(device)
    other, same = built(device)
    for seed in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        norm = with_gradients(model, seed)
        if seed in (0, 2):  # the first step too, before there is any state
            model.transformer.h[0].attn.c_attn.weight.grad[3, 5] = bad
            update_weights(optimizer, torch.full_like(norm, bad), 1.0)
            assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before))
        else:
            update_weights(optimizer, norm, 1.0)
            update_weights(same, with_gradients(other, seed), 1.0)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, same.state[q][key]), key


@pytest.mark.parametrize("limit", [0.0, 1.0, 100.0])
def test_the_host_makes_the_same_step_where_the_kernel_cannot_clip_or_skip(limit):
    torch.manual_seed(0)
    start, gradients = torch.randn(50), [10 * torch.randn(50) for _ in range(4)]
    gradients[1][7] = torch.nan
    ended = []
    for fused in (True, False):
        p = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([p], lr=0.1, fused=fused)
        for gradient in gradients:
            p.grad, before = gradient.clone(), p.detach().clone()
            update_weights(optimizer, torch.nn.utils.get_total_norm([p.grad]), limit)
            assert torch.equal(p, before) == bool(gradient.isnan().any())
        assert optimizer.state[p]["step"] == 3
        ended.append(p.detach())
    torch.testing.assert_close(*ended)
