"""The loss: how exact it is in each dtype."""

import pytest
import torch
from torch.nn import functional as F

from fusedgpt import loss
from tests.conftest import ON_GPU_TOO


@pytest.mark.parametrize(("device", "dtype"), ON_GPU_TOO)
def test_the_loss_of_rounded_logits_is_that_of_float64(device, dtype):
    # CUDA's autocast left the log-probabilities in bfloat16: the loss of a token was off by up to 0.03
    torch.manual_seed(0)
    z = 4 * torch.randn(64, 1000, device=device, dtype=getattr(torch, dtype))
    targets = torch.randint(990, (64,), device=device)
    exact = loss.whole(z.double(), targets, 990, reduction="none")
    with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
        found = loss.whole(z, targets, 990, reduction="none")
    assert exact.dtype == torch.float64 and found.dtype == torch.float32
    assert (found - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_does_not_rely_on_autocast(dtype):
    z = torch.randn(64, 1000).to(dtype)
    targets = torch.randint(1000, (64,))
    exact = loss.whole(z.double(), targets, 1000)
    assert loss.whole(z, targets, 1000).item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_cpu_the_cast_changes_no_bit(dtype):
    # autocast casts there already, so the loss and its gradient are those from before there was a cast of ours
    found = []
    for own in (True, False):
        torch.manual_seed(0)
        z = (4 * torch.randn(4, 16, 1000)).to(dtype).requires_grad_()
        targets = torch.randint(-1, 990, (4, 16))
        with torch.autocast("cpu", dtype):
            flat = z[..., :990].flatten(0, -2)
            mean = loss.whole(z, targets, 990) if own else F.cross_entropy(flat, targets.flatten(), ignore_index=-1)
        mean.backward()
        found.append((mean.detach(), z.grad))
    assert all(map(torch.equal, *found)) and found[0][1].dtype == dtype
