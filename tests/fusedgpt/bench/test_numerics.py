"""Numerics: the article's appendix, overflow in float16, and the report."""

import warnings

import pytest
import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.bench import numerics
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.small import run, settings

CPU = torch.device("cpu")


@pytest.fixture
def build(tmp_path, data):
    """build(path or pair, inputs, dtype) -> what was found out about it."""
    s = settings("numerics", tmp_path, data)
    return lambda name, inputs, dtype="float32": numerics.build({"inputs": inputs, "dtype": dtype}, name, s, CPU)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scaled_before_is_attention(dtype):
    errors = parity.compare(numerics.scaled_before, Case((1, 2, 33, 16), CPU, dtype))
    assert parity.passes(errors, dtype)


def test_float16_overflows_where_the_scale_comes_after_the_product(build):
    # K12
    for path in ("manual", "scaled before", "math", "flash"):
        assert (build(path, "large", "float16")["error"] == float("inf")) is (path == "manual"), path


def test_the_articles_appendix(build):
    # the article calls SDPA with attn_mask, and only the flag is_causal was compared
    for kernel in ("math", "math, masked"):
        for path, close in (("scaled before", True), ("manual", False)):
            found = build(f"{path} = {kernel}", numerics.PAIR)
            assert found["allclose"] is found["claimed"] is close and found["seen"] == ["unfused", "math"]


def test_numerics_to_its_report(tmp_path, data):
    run(
        "numerics",
        tmp_path,
        data,
        only="float32&scaled before,float32&efficient*,scaled before = math,manual&large&float16",
    )
    text = (tmp_path / "results" / "numerics" / "report.md").read_text()
    assert "efficient, masked: PyTorch has it on GPUs only" in text and "| manual | overflows | " in text
    assert "## allclose, float32" in text and "| scaled before = math | True | True | 0.0e+00 | unfused = math" in text
    again = run("numerics", tmp_path, data, only="float32&scaled before")
    assert len(again) == len({tuple(each.workload.items()) for each in again})  # nothing is measured twice


def test_a_mask_is_refused_as_a_row_of_its_own(build, monkeypatch):
    assert build("math, masked", "ordinary")["errors"].keys() == {"y", "dq", "dk", "dv", "rms"}
    with pytest.raises(UserError, match="on GPUs only"):
        build("cudnn, masked", "ordinary")

    def takes_no_mask(q, k, v, dropout_p=0.0):
        warnings.warn("Flash Attention does not support non-null attn_mask.", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setitem(numerics.PATHS, "flash, masked", takes_no_mask)  # as on a GPU
    with pytest.raises(UserError, match=r"^Flash Attention does not support non-null attn_mask$"):
        build("flash, masked", "ordinary")


def test_a_masked_kernel_is_compared_where_its_gradients_have_been_wrong(build, monkeypatch):
    # K6: with a mask, cuDNN's dq was NaN at T % 128 == 64 if the logarithm of a softmax's divisor was below -88.7
    def wrong(q, k, v, dropout_p=0.0):
        scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(torch.ones(q.size(-2), q.size(-2)).triu(1) > 0, -torch.inf)
        bad = q.size(-2) % 128 == 64 and scores.logsumexp(-1).min() < -88.7
        return ATTENTION["math"](q, k, v) * (torch.nan if bad else 1.0)

    monkeypatch.setitem(numerics.PATHS, "math, masked", wrong)
    assert build("math, masked", "ordinary")["error"] < 1e-5
    assert build("math, masked", "large")["error"] == float("inf")
