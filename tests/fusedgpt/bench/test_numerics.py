"""Numerics: the article's appendix, overflow in float16, and the report."""

import pytest
import torch

from fusedgpt import parity
from fusedgpt.bench import numerics
from fusedgpt.case import Case
from tests.fusedgpt.bench.small import run, settings

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scaled_before_is_attention(dtype):
    errors = parity.compare(numerics.scaled_before, Case((1, 2, 33, 16), CPU, dtype))
    assert parity.passes(errors, dtype)


def test_float16_overflows_where_the_scale_comes_after_the_product(tmp_path, data):
    # K12
    s, spec = settings("numerics", tmp_path, data), {"inputs": "large", "dtype": "float16"}
    found = {
        path: numerics.measure({**spec, "path": path}, s, CPU, tmp_path)["overflows"]
        for path in ("manual", "scaled before", "math", "flash")
    }
    assert found == {"manual": True, "scaled before": False, "math": False, "flash": False}


def test_the_articles_appendix(tmp_path, data):
    s = settings("numerics", tmp_path, data)
    for pair, close in (("scaled before = math", True), ("manual = math", False)):
        row = numerics.measure({"pair": pair, "dtype": "float32"}, s, CPU, tmp_path)
        assert row["allclose"] is close and row["reproduced"]


def test_numerics_to_its_report(tmp_path, data):
    row = run("numerics", tmp_path, data, only="float32")[0]
    text = (tmp_path / "results" / "numerics" / "report.md").read_text()
    assert "| efficient | refused |" in text
    assert "| scaled before = math | float32 | yes | yes | yes | 0.0e+00 |" in text
    assert (tmp_path / "results" / "numerics" / "errors.png").exists()
    assert row["samples"] == 2 and row["peak_memory"] >= 0 and row["kernel"]["forward"] == ["unfused"]
