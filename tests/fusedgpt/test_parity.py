"""The judge of every kernel: its reference is right, and it passes nothing that is wrong."""

import torch

from fusedgpt import parity
from fusedgpt.attention import ATTENTION
from fusedgpt.case import Case

CPU = torch.device("cpu")


def test_reference_agrees_with_autograd():
    # the reference writes the chain rule out: a slip there would bend every parity test
    q, k, v, dy = Case((2, 3, 9, 8), CPU, torch.float64).inputs()
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5
    y = (scores + torch.full((9, 9), -torch.inf).triu(1).double()).softmax(-1) @ v
    want = (y, *torch.autograd.grad(y, (q, k, v), dy))
    for got, expected in zip(parity.reference(q, k, v, dy), want):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-12)


def test_parity_refuses_a_wrong_kernel():
    # a comparison that cannot fail proves nothing
    def unmasked(q, k, v, dropout_p=0.0):
        return (q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v

    def not_a_number(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * torch.nan

    for wrong in (unmasked, not_a_number):
        found = parity.compare(wrong, Case((1, 2, 64, 32), CPU, torch.float32))
        assert not parity.passes(found, torch.float32)


def test_parity_sees_late_rows():
    # they are small: as a share of the largest of all, rows of zeros at the end passed in bfloat16
    def forgets(q, k, v, dropout_p=0.0):
        y = ATTENTION["manual"](q, k, v)
        return torch.cat((y[:, :, :-1], 0 * y[:, :, -1:]), dim=2)

    found = parity.compare(forgets, Case((1, 1, 4096, 16), CPU, torch.bfloat16, backward=False))
    assert found["y"] > 3 * parity.TOLERANCE[torch.bfloat16]
