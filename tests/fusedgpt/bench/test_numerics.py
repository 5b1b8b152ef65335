"""Numerics: the article's appendix, overflow in float16, and the report."""

import warnings

import pytest
import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.bench import loss_parity, numerics
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.small import run, settings

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scaled_before_is_attention(dtype):
    errors = parity.compare(numerics.scaled_before, Case((1, 2, 33, 16), CPU, dtype))
    assert parity.passes(errors, dtype)


def test_float16_overflows_where_the_scale_comes_after_the_product(tmp_path, data):
    # K12
    s, spec = settings("numerics", tmp_path, data), {"inputs": "large", "dtype": "float16"}
    for path in ("manual", "scaled before", "math", "flash"):
        row = numerics.measure({**spec, "path": path}, s, CPU, tmp_path)
        assert row["overflows"] is (path == "manual"), path


def test_the_articles_appendix(tmp_path, data):
    # the article calls SDPA with attn_mask, and only the flag is_causal was compared
    s = settings("numerics", tmp_path, data)
    for kernel in ("math", "math, masked"):
        for path, close in (("scaled before", True), ("manual", False)):
            row = numerics.measure({"pair": f"{path} = {kernel}", "dtype": "float32"}, s, CPU, tmp_path)
            assert row["allclose"] is close and row["reproduced"] and row["seen"] == ["unfused", "math"]


def test_a_pair_of_which_the_article_says_nothing_claims_nothing(tmp_path, data):
    # `scaled before = flash` stood as claimed, and as not reproduced; the article's call could take `math` alone
    rows = run("numerics", tmp_path, data, only="scaled before = flash&float32,masked = math, masked&float32")
    assert {row["pair"] for row in rows} == {"scaled before = flash", "masked = math, masked"}
    assert {(row["claimed"], row["reproduced"]) for row in rows} == {(None, None)}
    claims = {claim.name: claim.value for claim in numerics.claims(rows)}
    for row in rows:
        value = "yes" if row["allclose"] else "no"
        assert claims[f"{row['pair']}, {row['dtype']}: allclose"] == value


def test_a_pair_is_compared_with_the_kernel_that_sdpa_picked_for_a_mask(tmp_path, data, monkeypatch):
    # `masked` against `math, masked` must see which of them is wrong
    s, spec = settings("numerics", tmp_path, data), {"pair": "masked = math, masked", "dtype": "float32"}
    row = numerics.measure(spec, s, CPU, tmp_path)
    assert row["largest_difference"] < 1e-5 and row["seen"][1] == "math"
    monkeypatch.setitem(numerics.PAIRED, "masked", lambda *inputs: ATTENTION["masked"](*inputs) + 1e-3)
    row = numerics.measure(spec, s, CPU, tmp_path)
    assert not row["allclose"] and row["largest_difference"] == pytest.approx(1e-3, rel=0.1)


def test_numerics_to_its_report(tmp_path, data):
    only = "float32&scaled before,float32&efficient*,float32&scaled before = math"
    row = run("numerics", tmp_path, data, only=only)[0]
    text = (tmp_path / "results" / "numerics" / "report.md").read_text()
    assert "| efficient | refused |" in text and "| efficient, masked | refused |" in text
    assert "Times of attention alone are of whole calls" in text
    assert "| scaled before = math | float32 | yes | yes | yes | 0.0e+00 | unfused = math |" in text
    assert (tmp_path / "results" / "numerics" / "errors.png").exists()
    assert row["samples"] == 2 and row["peak_memory"] >= 0 and row["kernel"]["forward"] == ["unfused"]


def test_shared_keys_and_windows_have_errors_of_their_own(tmp_path, data, monkeypatch):
    only = ",".join(f"{each}&float32" for each in ("grouped&manual", "window&flash", "grouped, window&math"))
    rows = run("numerics", tmp_path, data, only=f"{only},grouped&efficient&float32")
    assert {row["status"] for row in rows if row["path"] != "efficient"} == {"measured"} and len(rows) == 4
    assert all("passed" in row["parity"] for row in rows if row["path"] != "efficient")
    text = (tmp_path / "results" / "numerics" / "report.md").read_text()
    assert "## 12 heads of queries share 4 of keys and values, a window of 100 tokens (ordinary inputs)" in text
    s = settings("numerics", tmp_path, data)
    monkeypatch.setitem(numerics.PATHS, "manual", lambda q, k, v, p, window: ATTENTION["manual"](q, k, v, p))
    with pytest.raises(ParityError):
        numerics.measure({"inputs": "window", "dtype": "float32", "path": "manual"}, s, CPU, tmp_path)


def test_the_loss_has_a_row_for_each_dtype_and_one_that_is_wrong_says_so(tmp_path, data, monkeypatch):
    monkeypatch.setitem(loss_parity.SHARE, torch.float16, 1e-9)
    rows = {row["dtype"]: row for row in run("numerics", tmp_path, data, only="loss")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "float32": "measured",
        "bfloat16": "measured",
        "float16": "parity failed",
    }
    text = (tmp_path / "results" / "numerics" / "report.md").read_text()
    errors = rows["bfloat16"]["errors"]
    line = f"| bfloat16 | {errors['loss']:.1e} | 2.0e-05 | {errors['gradient']:.1e} | 8.0e-03 |"
    assert line in text and "| float16 | parity failed |  |  |  |" in text
    assert "- loss, float16: parity failed: a token's loss is off by up to" in text
    claims = {claim.name: claim for claim in numerics.claims(list(rows.values()))}
    assert claims["loss, bfloat16: error of the gradient"].value == errors["gradient"]
    assert claims["loss, float32: error of the loss"].error and len(claims) == 4


def test_a_mask_costs_and_is_refused_as_a_row_of_its_own(tmp_path, data, monkeypatch):
    s, spec = settings("numerics", tmp_path, data), {"inputs": "ordinary", "dtype": "float32"}
    for path, kernel in (("math, masked", "math"), ("flash, masked", "flash")):
        row = numerics.measure({**spec, "path": path}, s, CPU, tmp_path)
        assert row["kernel"]["forward"] == [kernel] and row["errors"].keys() == {"y", "dq", "dk", "dv", "rms"}
    with pytest.raises(UserError, match="on GPUs only"):
        numerics.measure({**spec, "path": "cudnn, masked"}, s, CPU, tmp_path)

    def takes_no_mask(q, k, v, dropout_p=0.0):
        warnings.warn("Flash Attention does not support non-null attn_mask.", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setitem(numerics.PATHS, "flash, masked", takes_no_mask)  # as on a GPU
    with pytest.raises(UserError, match=r"^Flash Attention does not support non-null attn_mask$"):
        numerics.measure({**spec, "path": "flash, masked"}, s, CPU, tmp_path)


def test_a_masked_kernel_is_compared_where_its_gradients_have_been_wrong(tmp_path, data, monkeypatch):
    # K6: with a mask, cuDNN's dq was NaN at T % 128 == 64 if the logarithm of a softmax's divisor was below -88.7
    def wrong(q, k, v, dropout_p=0.0):
        scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(torch.ones(q.size(-2), q.size(-2)).triu(1) > 0, -torch.inf)
        bad = q.size(-2) % 128 == 64 and scores.logsumexp(-1).min() < -88.7
        return ATTENTION["math"](q, k, v) * (torch.nan if bad else 1.0)

    monkeypatch.setitem(numerics.PATHS, "math, masked", wrong)
    s, spec = settings("numerics", tmp_path, data), {"dtype": "float32", "path": "math, masked"}
    assert not numerics.measure({**spec, "inputs": "ordinary"}, s, CPU, tmp_path)["overflows"]
    assert numerics.measure({**spec, "inputs": "large"}, s, CPU, tmp_path)["overflows"]


def test_the_title_says_how_far_off_manual_and_flash_are_on_large_inputs():
    def error(path, dtype, y, inputs="large"):
        return {"path": path, "dtype": dtype, "inputs": inputs, "status": "measured", "errors": {"y": y}}

    manual = [
        error("manual", "float16", float("inf")),
        error("manual", "bfloat16", 0.9),
        error("manual", "float32", 1e-6),
    ]
    flash = [
        error("flash", "float16", 0.002),
        error("flash", "bfloat16", 0.013),
        error("flash", "float16", 9, "ordinary"),
    ]
    said = "On large inputs in 16 bits manual overflows in float16 and is off by up to 90 %"
    assert numerics.finding(manual + flash) == f"{said}; flash is off by up to 1.3 %"
    assert numerics.finding(manual) == said
    assert numerics.finding(manual[2:] + flash[2:]) == "How exact each way to compute attention is"
