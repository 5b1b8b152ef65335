"""The sweep: attention alone and training, by length."""

import types

import pytest
import torch

from fusedgpt import kernels
from fusedgpt.attention import ATTENTION
from fusedgpt.bench import report, sweep, training
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.small import run, settings

CPU = torch.device("cpu")


def test_the_sweep_alone_and_end_to_end(tmp_path, data):
    got = run("sweep", tmp_path, data, only="manual,flash")
    assert all(row["status"] == "measured" for row in got), got
    alone = [row for row in got if row["part"] == "attention"]
    assert len(alone) == 2 * 2 * 2 and len(got) == len(alone) + 4  # lengths, directions, kernels; and training
    for row in alone:
        assert row["kernel"]["forward"] == [{"manual": "unfused"}.get(row["attention"], "flash")]
        shape, backward = (1, 2, row["T"], 16), row["pass"] != "forward"
        count = 2 * shape[1] * row["T"] ** 2 * 16 * (3.5 if backward else 1)
        assert row["tflops"] == pytest.approx(count / row["median_ms"] / 1e9)
        assert set(row["errors"]) == ({"y", "dq", "dk", "dv"} if backward else {"y"})
    for name in ("report.md", "speedup.png", "memory.png", "training.png"):
        assert (tmp_path / "results" / "sweep" / name).stat().st_size > 300
    assert "end to end" in (tmp_path / "results" / "sweep" / "report.md").read_text()


def test_parity_comes_before_the_time(tmp_path, data, monkeypatch):
    def wrong(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * 1.5

    monkeypatch.setattr(kernels, "ATTENTION", {**ATTENTION, "manual": wrong})
    monkeypatch.setattr(sweep, "ATTENTION", {**ATTENTION, "manual": wrong})
    for module, name in ((training, "run"), (sweep, "timed")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a kernel that fails parity was timed"))
    s = settings("sweep", tmp_path, data)
    for spec in ({"part": "attention", "heads": "2x16", "pass": "forward"}, {"part": "training"}):
        with pytest.raises(ParityError):
            sweep.measure({**spec, "T": 32, "attention": "manual"}, s, CPU, tmp_path)


def test_memory_is_counted_above_what_was_held(tmp_path, data):
    s = settings("sweep", tmp_path, data, dtype="float32")
    spec = {"part": "attention", "heads": "2x64", "pass": "forward", "T": 2048}
    manual, flash = (sweep.measure({**spec, "attention": n}, s, CPU, tmp_path) for n in ("manual", "flash"))
    scores = 2 * 2048 * 2048 * 4
    assert 2 * scores < manual["peak_memory"] < 4 * scores  # before and after the mask, at least
    assert 2 * 2048 * 64 * 4 < flash["peak_memory"] < scores / 4


def test_where_one_kernel_overtakes_another():
    def timed(name, *ms):
        return [{"attention": name, "T": 2**n, "median_ms": t, "status": "measured"} for n, t in enumerate(ms)]

    rows = timed("manual", 1, 2, 8, 16) + timed("flash", 2, 3, 4, 5) + timed("math", 3, 1, 9, 17)
    found = sweep.crossovers([*rows, {"attention": "cudnn", "T": 1, "status": "refused"}])
    assert found["manual", "flash"] == 4 and ("flash", "manual") not in found
    assert found["math", "manual"] == 4  # it was ahead at 1 already, but not to stay
    assert found["math", "flash"] == 4


def test_flex_is_swept_at_few_lengths():
    # it compiles anew for each length, and PyTorch stops at the eighth
    s = types.SimpleNamespace(heads="2x16", lengths="256-512-64")
    lengths = {spec["T"] for spec in sweep.plan(s, CPU) if spec["attention"] == "flex"}
    assert lengths == {256, 512}


def test_heads_are_pairs():
    for wrong in ("12", "2x", "0x16", "2x16x2"):
        with pytest.raises(UserError, match="must be like 32x128,12x64"):
            sweep.plan(types.SimpleNamespace(heads=wrong, lengths="32"), CPU)


def test_redrawn_from_rows_alone(tmp_path, data):
    run("sweep", tmp_path, data, only="forward + backward")
    folder = tmp_path / "results" / "sweep"
    before = (folder / "report.md").read_text()
    alone = tmp_path / "copied"
    alone.mkdir()
    (alone / "rows.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    report.write(alone, sweep)
    assert (alone / "report.md").read_text() == before
    assert (alone / "speedup.png").read_bytes() == (folder / "speedup.png").read_bytes()
