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
