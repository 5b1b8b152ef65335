"""The loss: how exact it is in each dtype."""

import pytest
import torch

from fusedgpt import loss
from tests.conftest import ON_GPU_TOO


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("device", "dtype"), [*ON_GPU_TOO, ("cpu", "bfloat16"), ("cpu", "float16")])
def test_the_loss_of_rounded_logits_is_that_of_float64(device, dtype, autocast):
    # CUDA's autocast left the log-probabilities in bfloat16: the loss of a token was off by up to 0.03
    torch.manual_seed(0)
    z = 4 * torch.randn(64, 1000, device=device, dtype=getattr(torch, dtype))
    targets = torch.randint(990, (64,), device=device)
    exact = loss.whole(z.double(), targets, 990, reduction="none")
    with torch.autocast(device, getattr(torch, dtype), enabled=autocast and dtype != "float32"):
        found = loss.whole(z, targets, 990, reduction="none")
    assert exact.dtype == torch.float64 and found.dtype == torch.float32
    assert (found - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize(("dtype", "share"), [("float32", 2e-5), ("float16", 1e-3), ("bfloat16", 8e-3)])
def test_each_number_of_the_gradient_is_that_of_float64(dtype, share):
    # as a share of its row's largest number, the target's, the error of any other id would be 0
    torch.manual_seed(0)
    z = torch.randn(64, 50304).to(getattr(torch, dtype)).requires_grad_()  # 50257 ids and padding
    targets = torch.randint(50257, (64,))
    targets[::4] = -1  # such a target does not count
    with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
        mean = loss.whole(z, targets, 50257)
    (mean * 2.0**12 * 48).backward()  # scaled, so that float16 does not round small gradients to 0
    p = z.detach().double()[:, :50257].softmax(-1)
    want, counts = torch.zeros(64, 50304).double(), targets >= 0
    want[counts, :50257] = p[counts]
    want[torch.arange(64)[counts], targets[counts]] -= 1
    off = (z.grad.double() / 2.0**12 - want).abs()
    assert torch.where(off == 0, 0.0, off / want.abs()).max() <= share  # of 0, padding's, any error is infinite
