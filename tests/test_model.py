"""Our GPT against transformers' GPT-2, and what nanoGPT's users rely on."""

import collections
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fusedgpt.attention.functions import ATTENTION
from fusedgpt.dimensions import LOSSES, RECOMPUTE
from fusedgpt.errors import UserError
from model import GPT, GPTConfig
from tests.conftest import LLAMA, ON_GPU_TOO

TINY = dict(block_size=32, vocab_size=101, n_layer=3, n_head=4, n_embd=64)


@pytest.mark.parametrize("attention", ["manual", "masked"])
@torch.no_grad()
def test_each_document_is_computed_as_if_it_were_alone(attention):
    torch.manual_seed(0)
    packed = GPT(GPTConfig(**TINY, attention=attention, document_start=7))
    alone, positions = GPT(GPTConfig(**TINY, attention=attention)), packed.transformer.wpe.weight
    idx = torch.randint(8, 101, (2, 32), generator=torch.Generator().manual_seed(1))
    idx[0, [5, 20]], idx[1, 31] = 7, 7  # the first sequence has 3 documents, the second ends with the start of one
    logits, _ = packed(idx, idx)
    for row, start, stop in ((0, 0, 5), (0, 5, 20), (0, 20, 32), (1, 0, 31), (1, 31, 32)):
        alone.load_state_dict(packed.state_dict() | {"transformer.wpe.weight": positions.roll(-start, dims=0)})
        part = idx[row : row + 1, start:stop]  # it keeps its positions
        torch.testing.assert_close(logits[row, start:stop], alone(part, part)[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [dict(n_layer=4), dict(n_head=0), dict(n_embd="x")], ids=str)
def test_a_checkpoint_of_another_size_is_refused(wrong):
    # a 0 ended in a ZeroDivisionError
    saved = {"model": GPT(GPTConfig(**TINY)).state_dict(), "model_args": TINY | wrong, "extra_model_args": {}}
    with pytest.raises(UserError, match="weights and model_args do not fit each other"):
        GPT.from_checkpoint(saved)


def test_state_dict_is_gpt2s_on_every_path():
    # T3: the hand-written path used to register its mask as a weight, so that checkpoints did not cross
    wanted = {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}
    wanted |= {f"transformer.ln_f.{p}" for p in ("weight", "bias")}
    for module in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        wanted |= {f"transformer.h.{n}.{module}.{p}" for n in range(3) for p in ("weight", "bias")}
    for attention in ATTENTION:
        assert set(GPT(GPTConfig(**TINY, attention=attention)).state_dict()) == wanted


def test_initialisation_follows_gpt2():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=256, vocab_size=1000, block_size=256))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all()
        elif p.dim() == 1:
            assert (p == 1).all()
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03)
            assert abs(p.mean().item()) < 0.1 * std
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize(
    "changes", [dict(position="rotary"), dict(block_size=8), dict(mlp="swiglu"), dict(bias=True)], ids=str
)
def test_weights_of_equal_shape_begin_equal_whatever_else_differs(changes):
    # one stream of numbers for all: another position or MLP gave every later weight other numbers
    def of(**fields):
        torch.manual_seed(0)
        return [GPT(GPTConfig(**TINY | fields)).state_dict() for _ in range(2)]

    (one, second), (other, _) = of(), of(**changes)
    alike = [name for name, w in one.items() if name in other and other[name].shape == w.shape]
    assert "transformer.wte.weight" in alike and "transformer.h.1.attn.c_proj.weight" in alike
    assert all(torch.equal(one[name], other[name]) for name in alike)
    drawn = [name for name in one if one[name].dim() > 1 and name != "lm_head.weight"]
    assert not any(torch.equal(one[name], second[name]) for name in drawn)  # each model has its own
    assert len({one[name].flatten()[0].item() for name in drawn}) == len(drawn)  # and each of its weights


def test_dropout_is_after_the_embedding_and_after_each_branch():
    # without one of these sites a model trains on, and no other test saw it
    model, seen = GPT(GPTConfig(**TINY, dropout=0.3)).train(), collections.Counter()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda *_, name=name: seen.update([name]))
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    branches = [
        f"transformer.h.{n}.{each}" for n in range(TINY["n_layer"]) for each in ("attn.resid_dropout", "mlp.dropout")
    ]
    assert seen == dict.fromkeys(["transformer.drop", *branches], 1)


def test_padding_starts_equal_and_stays_out():
    # T2: padding used to shift the random numbers of every other weight
    idx = torch.randint(0, 101, (4, 32), generator=torch.Generator().manual_seed(1))
    models = []
    for multiple in (1, 64):
        torch.manual_seed(0)
        models.append(GPT(GPTConfig(**TINY, vocab_multiple=multiple)))
    plain, padded = models
    assert padded.lm_head.weight.shape == (128, 64)
    (a, loss_a), (b, loss_b) = plain(idx, idx), padded(idx, idx)
    torch.testing.assert_close(b[..., :101], a, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss_b, loss_a, rtol=1e-6, atol=1e-6)
    assert (b[..., 101:] == -torch.inf).all()
    loss_a.backward()
    loss_b.backward()
    grads = dict(plain.named_parameters())
    for name, p in padded.named_parameters():
        assert torch.isfinite(p.grad).all()
        torch.testing.assert_close(p.grad[: len(grads[name])], grads[name].grad, rtol=1e-4, atol=1e-6)
    assert (padded.transformer.wte.weight.grad[101:] == 0).all()  # so padding stays 0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("B", "T"), [(2, 32), (3, 7), (1, 2)])  # 2 tokens are fewer than there are chunks
@pytest.mark.parametrize(("device", "dtype"), [*ON_GPU_TOO, ("cpu", "bfloat16")])
@pytest.mark.parametrize("output", [{}, dict(tie_embeddings=False, output_bias=True)], ids=["tied", "untied"])
def test_each_loss_equals_float64(loss, B, T, device, dtype, output):
    # chunks differ in length, so a mean of their means is wrong; padded ids and targets of -1 must not count in any
    torch.manual_seed(0)
    idx, targets = torch.randint(0, 101, (2, B, T), device=device)
    targets[0, :-1] = -1
    model = GPT(GPTConfig(**TINY, **output, vocab_multiple=64, loss=loss)).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p *= 3
        if output:
            model.lm_head.bias[:101].normal_()  # it starts at 0, so that its part would go unseen
    exact = GPT(GPTConfig(**TINY, **output, vocab_multiple=1)).to(device).double()
    exact.load_state_dict(
        {name: w[:101] if "wte" in name or "head" in name else w for name, w in model.state_dict().items()}
    )
    want = exact(idx, targets)[1]
    want.backward()
    with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
        _, got = model(idx, targets, logits=False)
    got.backward()
    with torch.no_grad():
        assert torch.equal(model(idx, targets, logits=False)[1], got) or dtype != "float32"  # an evaluation
    limit = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(got.double(), want, rtol=limit / 5, atol=0)
    for (name, p), q in zip(model.named_parameters(), exact.parameters()):
        gradient = p.grad[:101] if "wte" in name or "head" in name else p.grad
        assert (gradient - q.grad).norm() <= limit * q.grad.norm(), name
    assert all((p.grad[101:] == 0).all() for p in (model.transformer.wte.weight, *model.lm_head.parameters()))


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["GPT-2", "Llama"])
def test_what_is_computed_again_is_the_same_to_the_bit(device, family):
    # dropout has to be drawn again as it was: with another mask, training would go on with wrong gradients
    idx, found = torch.randint(0, 65, (2, 64), generator=torch.Generator().manual_seed(0)).to(device), {}
    for recompute in RECOMPUTE:
        torch.manual_seed(1)
        config = GPTConfig(64, 65, 2, 4, 64, dropout=0.2, attention="manual", recompute=recompute, **family)
        model = GPT(config).to(device)
        _, loss = model(idx, idx, logits=False)
        loss.backward()
        found[recompute] = [loss.detach(), *(p.grad for p in model.parameters())]
    for other in ("attention", "block"):
        assert all(map(torch.equal, found[other], found["none"]))


def test_bigrams_are_of_a_token_and_the_one_before_it():
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY, bigrams=50, document_start=7))
    plain = GPT(replace(model.config, bigrams=None))
    plain.load_state_dict({name: p for name, p in model.state_dict().items() if "wbe" not in name})
    idx = torch.tensor([[5, 9, 7, 9, 5]])
    pairs = [(5, 5), (5, 9), (7, 7), (7, 9), (9, 5)]  # a document sees nothing of the one before
    added = model.transformer.wbe.weight[[(a * 101 + b) % 50 for a, b in pairs]]
    plain.transformer.wte.register_forward_hook(lambda module, ids, found: found + added)
    torch.testing.assert_close(model(idx, idx)[0], plain(idx, idx)[0])


@pytest.mark.parametrize("attention", ["manual", "math", "sdpa"])
def test_dropout_is_off_outside_training(attention):
    # T5: SDPA drops in evaluation too unless it is told not to
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY, dropout=0.5, attention=attention))
    idx = torch.randint(0, 101, (2, 32))
    assert not torch.equal(model(idx, idx)[0], model(idx, idx)[0])
    model.eval()
    assert torch.equal(model(idx, idx)[0], model(idx, idx)[0])
    no_dropout = GPT(GPTConfig(**TINY, attention=attention)).train()
    no_dropout.load_state_dict(model.state_dict())
    assert torch.equal(model(idx, idx)[0], no_dropout(idx, idx)[0])


def test_nanogpt_interface():
    model = GPT(GPTConfig(**TINY))
    idx = torch.randint(0, 101, (2, 10))
    logits, loss = model(idx)
    assert logits.shape == (2, 1, 101) and loss is None
    everywhere, _ = model(idx, idx)
    torch.testing.assert_close(everywhere[:, -1:], logits)
    ignored = idx.clone()
    ignored[:, ::2] = -1
    want = F.cross_entropy(everywhere[:, 1::2].reshape(-1, 101), idx[:, 1::2].reshape(-1))
    torch.testing.assert_close(model(idx, ignored)[1], want)
    assert model.generate(idx, 5, temperature=1.0, top_k=3).shape == (2, 15)
    n = model.get_num_params()
    assert n == model.get_num_params(non_embedding=False) - 32 * 64 == model.config.num_params - 32 * 64
    assert model.estimate_mfu(2, 0.5) == pytest.approx((6 * n + 12 * 3 * 64 * 32) * 32 * 2 / 0.5 / 312e12)
    assert GPTConfig() == GPTConfig(1024, 50304, 12, 12, 768, 0.0, True)


def test_crop_block_size_keeps_the_first_positions():
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY)).eval()
    idx = torch.randint(0, 101, (2, 16))
    before = model(idx, idx)[0]
    model.crop_block_size(16)
    assert torch.equal(model(idx, idx)[0], before)
    with pytest.raises(UserError, match="block_size=16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(UserError, match="32"):
        model.crop_block_size(32)
