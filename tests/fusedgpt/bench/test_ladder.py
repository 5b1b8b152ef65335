"""The ladder: each rung is a real run of train.py, changes one thing, and earns its time by parity."""

import json

import pytest
import torch

from fusedgpt import kernels
from fusedgpt.attention import ATTENTION
from fusedgpt.bench import ladder, training
from fusedgpt.bench.proof import ParityError
from fusedgpt.device import why_no_compiler
from tests.fusedgpt.bench.small import rows_of, run, settings

CPU = torch.device("cpu")


def test_the_ladder_from_the_command_line_and_again(tmp_path, data, capsys):
    only = f"manual,efficient,{ladder.PADDED}"
    got = {row["rung"]: row for row in run("ladder", tmp_path, data, only=only)}
    assert got.keys() == {"manual", "efficient", ladder.PADDED}  # "manual" was seven rungs
    assert {name for name, row in got.items() if row["status"] == "refused"} == {"efficient"}
    base, flash = got["manual"], got["flash + padded vocabulary"]
    assert base["kernel"]["forward"] == ["unfused"] and flash["kernel"]["forward"] == ["flash"]
    assert base["samples"] == len(base["samples_ms"]) == 3  # 8 steps, 5 of them warm-up
    assert flash["ran"]["padded_vocab_size"] == 128 and base["ran"]["padded_vocab_size"] == 65
    assert flash["final_loss"] == pytest.approx(base["final_loss"], rel=1e-4)  # same weights, same batches
    assert base["tokens_per_s"] == pytest.approx(1e3 * 64 / base["median_ms"])
    assert base["errors"].keys() == {"y", "dq", "dk", "dv", "rms"}
    text = (tmp_path / "results" / "ladder" / "report.md").read_text()
    assert (
        "| efficient | refused: PyTorch has this kernel on GPUs only |  | 119 ms, 20.17 % |" in text
        and "64.37 %" in text
    )
    assert not list((tmp_path / "results").rglob("*.pt"))
    before = rows_of("ladder", tmp_path)
    capsys.readouterr()
    assert run("ladder", tmp_path, data, only=only) == before
    assert f"{len(before)} of {len(before)} rows are there already" in capsys.readouterr().out


def test_manual_stays_manual_under_compile(tmp_path, data):
    # K5: Inductor may rewrite hand-written attention into SDPA
    if reason := why_no_compiler(CPU):
        pytest.skip(reason)
    s = settings("ladder", tmp_path, data, compile=True)
    row = ladder.measure({"rung": "manual"}, s, CPU, tmp_path)
    assert row["ran"]["compile"] is True
    assert row["kernel"]["forward"] == row["kernel"]["backward"] == ["unfused"]
    assert not [op for op in row["kernel"]["ops"] if "flash" in op or "efficient" in op or "cudnn" in op]


def test_each_rung_changes_one_thing():
    changed = {
        "manual, eager": "manual",
        "math": "manual",
        "efficient": "manual",
        "flash": "manual",
        "masked": "manual",
        "flash + padded vocabulary": "flash",
        "cudnn + padded vocabulary": "flash + padded vocabulary",
        "flash3 + padded vocabulary": "flash + padded vocabulary",
        "flash4 + padded vocabulary": "flash + padded vocabulary",
        "flex + padded vocabulary": "flash + padded vocabulary",
        "auto + padded vocabulary": "flash + padded vocabulary",
        "flash + padded vocabulary, eager": "flash + padded vocabulary",
        "manual, float32, eager": "manual, eager",
    }
    for name, other in changed.items():
        assert len(ladder.RUNGS[name].items() ^ ladder.RUNGS[other].items()) in (1, 2), name  # one key
    assert ladder.RUNGS["manual, again"] == ladder.RUNGS["manual"]
    assert changed.keys() | {"manual", "manual, again"} == ladder.RUNGS.keys()


def test_per_cent_are_counted_as_the_article_counts():
    # its own table: 6.71 (rounded from other digits), 20.16, 26.54, 64.37
    a = ladder.ARTICLE
    got = [ladder.faster(a["manual"], a[name]) for name in ("math", "efficient", "flash", ladder.PADDED)]
    assert got == pytest.approx([6.71, 20.16, 26.54, 64.37], abs=0.02)
    assert ladder.faster(100, 200) == -50


def test_parity_comes_before_the_run(tmp_path, data, monkeypatch):
    def wrong(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * 1.5

    monkeypatch.setattr(kernels, "ATTENTION", {**ATTENTION, "manual": wrong})
    monkeypatch.setattr(training, "run", lambda *_, **__: pytest.fail("a kernel that fails parity was timed"))
    with pytest.raises(ParityError):
        ladder.measure({"rung": "manual"}, settings("ladder", tmp_path, data), CPU, tmp_path)


def test_losses_that_are_no_numbers_do_not_agree():
    def row(loss):
        ran = {"dtype": "float32"}
        return {"final_loss": loss, "steps": 9, "errors": {"y": 0}, "ran": ran, "peak_flops": 1, "peak_source": ""}

    notes = ladder.notes({"manual": row(2.0), "math": row(2.001), "flash": row(float("nan"))})
    assert "**they DISAGREE**" in notes[0]
    assert "they agree" in ladder.notes({"manual": row(2.0), "math": row(2.001)})[0]


def test_a_profile_opens_in_perfetto_and_a_row_without_one_is_measured_again(tmp_path, data):
    # --profile=True on rows that were there already used to write no trace
    (first,) = run("ladder", tmp_path, data, only="math")
    trace = tmp_path / "results" / "ladder" / "traces" / "math.json"
    assert not trace.exists()
    (second,) = run("ladder", tmp_path, data, only="math", profile=True)
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)
    assert first["samples_ms"] != second["samples_ms"]
    assert run("ladder", tmp_path, data, only="math", profile=True) == [second]
