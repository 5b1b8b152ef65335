"""The judge of every kernel: its reference is right, and it passes nothing that is wrong."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fusedgpt.attention import choose, parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.bench import proof
from fusedgpt.errors import UserError

CPU = torch.device("cpu")


def test_reference_agrees_with_autograd():
    # the reference writes the chain rule out: a slip there would bend every parity test
    q, k, v, dy = Case((2, 3, 9, 8), CPU, torch.float64).inputs()
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5
    y = (scores + torch.full((9, 9), -torch.inf).triu(1).double()).softmax(-1) @ v
    want = (y, *torch.autograd.grad(y, (q, k, v), dy))
    for got, expected in zip(parity.reference(q, k, v, dy), want):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("nh", "nkv", "T", "window"), [(6, 2, 9, None), (3, 1, 20, 4), (4, 4, 9, 1), (2, 1, 1, 3)])
def test_reference_with_shared_keys_and_a_window_agrees_with_sdpa_and_autograd(nh, nkv, T, window):
    # queries after a cache: each head of keys is repeated for its heads of queries, and the mask is written as a sum
    Tk = 20
    q, k, v, dy = Case((2, nh, T, 8), CPU, torch.float64, keys=Tk, kv_heads=nkv).inputs()
    distance = torch.arange(Tk - T, Tk)[:, None] - torch.arange(Tk)
    seen = (distance >= 0) & (distance < (window or Tk))
    wide = (x.repeat_interleave(nh // nkv, dim=1) for x in (k, v))
    y = F.scaled_dot_product_attention(q, *wide, attn_mask=seen)
    want = (y, *torch.autograd.grad(y, (q, k, v), dy))
    for got, expected in zip(parity.reference(q, k, v, dy, window=window), want, strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, p, window: ATTENTION["manual"](q, k, v, window=window + 1),
        lambda q, k, v, p, window: ATTENTION["manual"](q, k, v),
        lambda q, k, v, p, window: ATTENTION["manual"](q, k.flip(1), v.flip(1), window=window),
        lambda q, k, v, p, window: ATTENTION["manual"](q, *(x.repeat(1, 2, 1, 1) for x in (k, v)), window=window),
    ],
)
def test_the_gate_sees_a_wrong_window_and_wrong_heads(wrong):
    case = Case((2, 4, 200, 16), CPU, torch.float32, kv_heads=2, window=100)
    assert not all(parity.passes(errors, torch.float32) for _, errors in parity.checks(wrong, case))
    right = parity.checks(ATTENTION["manual"], case)
    assert all(parity.passes(errors, torch.float32) for _, errors in right)


def test_parity_refuses_a_wrong_kernel():
    # a comparison that cannot fail proves nothing
    def unmasked(q, k, v, dropout_p=0.0):
        return (q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v

    def not_a_number(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * torch.nan

    for wrong in (unmasked, not_a_number):
        found = parity.compare(wrong, Case((1, 2, 64, 32), CPU, torch.float32))
        assert not parity.passes(found, torch.float32)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("heads", [None, 1])
def test_parity_refuses_a_kernel_that_changes_its_inputs(which, backward, heads):
    # it was compared with float64 on what it had made of them, so one that doubled v or zeroed q passed
    def early(**given):
        given[which].data.mul_(2)
        return ATTENTION["manual"](*given.values())

    def late(**given):
        y = ATTENTION["manual"](*given.values())
        given[which].data.zero_()  # in generation k and v are the cache
        return y

    case = Case((2, 2, 64, 32), CPU, torch.float32, backward=backward)
    for wrong in (early, late):
        with pytest.raises(ValueError, match="it changes q, k, v or dy in place"):
            parity.compare(lambda q, k, v, p, wrong=wrong: wrong(q=q, k=k, v=v), case, heads=heads)


def test_parity_sees_late_rows():
    # late rows are small: compared with the largest of all numbers, rows of zeros there passed in bfloat16
    def forgets(q, k, v, dropout_p=0.0):
        y = ATTENTION["manual"](q, k, v)
        return torch.cat((y[:, :, :-1], 0 * y[:, :, -1:]), dim=2)

    found = parity.compare(forgets, Case((1, 1, 4096, 16), CPU, torch.bfloat16, backward=False))
    assert found["y"] > 3 * parity.TOLERANCE[torch.bfloat16]


def test_the_gate_tries_a_query_after_an_odd_number_of_keys():
    # it tried whole prompts of odd lengths, and a query after 256 keys alone: this one drew its texts from 64, 128, ...
    def whole_blocks(q, k, v, dropout_p=0.0):
        kept = max(64, k.size(2) // 64 * 64) if q.size(2) == 1 else k.size(2)
        return ATTENTION["manual"](q, k[:, :, :kept], v[:, :, :kept])

    prompt = Case((2, 4, 256, 16), CPU, torch.float32, kv_heads=2, backward=False)
    for case, right in ((prompt, True), (prompt.one_query(), False), (replace(prompt, keys=300), True)):
        found = {where: parity.passes(errors, torch.float32) for where, errors in parity.checks(whole_blocks, case)}
        assert all(found.values()) == right, found
        assert all(parity.passes(errors, torch.float32) for _, errors in parity.checks(ATTENTION["blocked"], case))


def of_rows(wrong):
    """Attention whose rows are halved where `wrong`(shape of q) is true."""

    def attend(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * (1 - 0.5 * wrong(q.shape).to(q))

    return attend


def of_scores(largest):
    """Attention whose scores are clamped at `largest`."""

    def attend(q, k, v, dropout_p=0.0):
        scores = (q @ k.mT * q.size(-1) ** -0.5).clamp(max=largest)
        return scores.masked_fill(~torch.ones(scores.shape[-2:]).bool().tril(), -torch.inf).softmax(-1) @ v

    return attend


def gradient_off(dtype):
    """Attention whose dk is 2 % too large in `dtype`."""

    def attend(q, k, v, dropout_p=0.0):
        more = 0.02 if k.dtype == dtype else 0.0
        return ATTENTION["manual"](q, k + more * (k - k.detach()), v)

    return attend


def rows_of(shape):
    return torch.arange(shape[2])[:, None]


WRONG = {
    "partial first block": of_rows(lambda shape: (rows_of(shape) >= 64) & torch.tensor(shape[2] == 127)),
    "partial later block": of_rows(lambda shape: rows_of(shape) >= max(256, shape[2] // 256 * 256)),
    "third head": of_rows(lambda shape: (torch.arange(shape[1]) >= 2)[:, None, None]),
    "second sequence": of_rows(lambda shape: (torch.arange(shape[0]) >= 1)[:, None, None, None]),
    "last sequence of more": of_rows(lambda shape: (torch.arange(shape[0]) >= 2)[:, None, None, None]),
    "the whole length": of_rows(lambda shape: rows_of(shape) >= 320),
    "clamped at 60": of_scores(60.0),
    "clamped at 8": of_scores(8.0),
    "dk in bfloat16": gradient_off(torch.bfloat16),
    "dk in float16": gradient_off(torch.float16),
    "dk in float32": gradient_off(torch.float32),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_gate_sees_what_is_wrong(name):
    # F15: six of these passed: a later block, two of the sequences, both clamps, and dk in bfloat16
    dtype = getattr(torch, name.removeprefix("dk in ") if name.startswith("dk") else "float32")
    case = Case((3, 4, 512 if "length" in name or "more" in name else 64, 16), CPU, dtype)
    with pytest.raises(proof.ParityError):
        proof.prove(WRONG[name], case)


@pytest.mark.parametrize("name", [name for name in WRONG if name != "last sequence of more"])
def test_auto_has_the_same_gate(name, monkeypatch):
    # it compared two heads of the first sequence at the model's own length
    # and let seven of these pass
    monkeypatch.setattr(permitted, "ATTENTION", {"manual": WRONG[name]})
    monkeypatch.setattr(choose, "SINGLE_KERNELS", ["manual"])
    dtype = getattr(torch, name.removeprefix("dk in ") if name.startswith("dk") else "float32")
    case = Case((2, 4, 512 if "length" in name else 64, 16), CPU, dtype)
    with pytest.raises(UserError, match="manual: it fails parity with float64"):
        choose.fastest(case)


@pytest.mark.parametrize("T", [1, 2, 64])
@pytest.mark.parametrize("dtype", parity.TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["manual", "blocked", "math", "flash"])
def test_the_gate_lets_attention_pass(name, dtype, T):
    # if rounding reached the bound, `auto` would have no kernel; the shortest sequences come closest
    case = Case((2, 3, T, 8), CPU, dtype)
    for where, errors in parity.checks(ATTENTION[name], case):
        assert parity.passes(errors, dtype), (where, errors)
