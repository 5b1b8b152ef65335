"""No time without parity; a refusal is no crash; TFLOP/s by hand."""

from dataclasses import replace

import pytest
import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
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


def test_tflops_by_hand():
    def tflops(B, backward, ms):
        case = Case((B, 12, 1024, 64), torch.device("cpu"), torch.float32, backward=backward)
        return proof.tflops(case, ms)

    # 2 products of 2 * 1024 * 1024 * 64 a head, half of each, 12 heads: 1,610,612,736 in a millisecond
    assert tflops(1, False, 1.0) == pytest.approx(1.610612736)
    assert tflops(1, True, 1.0) == pytest.approx(1.610612736 * 3.5)
    assert tflops(2, False, 4.0) == pytest.approx(1.610612736 / 2)


def test_tflops_count_what_a_window_shows():
    case = Case((1, 12, 1024, 64), torch.device("cpu"), torch.float32, backward=False, kv_heads=4)
    whole, half, narrow = (proof.tflops(replace(case, window=window), 1.0) for window in (1024, 512, 1))
    assert whole == proof.tflops(case, 1.0)  # heads that share keys compute as many scores as others
    assert half / whole == pytest.approx(3 / 4)  # the triangle without the one that is half as high
    assert narrow / whole == pytest.approx(2 / 1024, rel=0.01)


def test_tflops_count_what_documents_show():
    case = Case((2, 12, 96, 64), torch.device("cpu"), torch.float32, backward=False, packed=True)
    lengths = [33, 33, 30, *[3, *[5] * 18, 3]]  # of the first sequence, and of the second, which begins in a document
    assert [n for each in case.documents for n in each.unique(return_counts=True)[1].tolist()] == lengths
    assert proof.tflops(case, 1.0) == pytest.approx(2 * 12 * 64 * sum(n * n for n in lengths) / 1e9)
    in_a_window = 2 * 12 * 64 * sum(n * n - max(0, n - 10) ** 2 for n in lengths) / 1e9
    assert proof.tflops(replace(case, window=10), 1.0) == pytest.approx(in_a_window)
