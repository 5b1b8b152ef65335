"""No time without parity; a refusal is no crash; TFLOP/s by hand."""

import pytest
import torch

from fusedgpt.attention import parity
from fusedgpt.bench import proof, rows
from fusedgpt.errors import UserError


def test_not_a_number_fails_parity():
    with pytest.raises(proof.ParityError, match="inf"):
        proof.verdict({"y": parity.TOLERANCE[torch.float32] / 2, "dq": float("inf")}, torch.float32, "here")


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        # "failed" is tried again by every later run, and a ValueError was
        (ValueError("not on MPS"), "refused"),
        (AssertionError("not on MPS"), "refused"),
        (NotImplementedError("not on MPS"), "refused"),
        (UserError("not on MPS"), "refused"),
        # all later rows of the process fail too; they are to be tried again
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "failed"),
        (KeyError("x"), "failed"),
        (proof.ParityError("e"), "parity failed"),
    ],
)
def test_what_a_kernel_raises_is_its_refusal(raised, status):
    with pytest.raises(Exception) as ended, proof.refusals():
        raise raised
    found, reason = rows.status_of(ended.value)
    assert found == status and reason.endswith(str(raised))
