"""No time without parity."""

import pytest
import torch

from fusedgpt.attention import parity
from fusedgpt.bench import proof


def test_not_a_number_fails_parity():
    with pytest.raises(proof.ParityError, match="inf"):
        proof.verdict({"y": parity.TOLERANCE[torch.float32] / 2, "dq": float("inf")}, torch.float32, "here")
