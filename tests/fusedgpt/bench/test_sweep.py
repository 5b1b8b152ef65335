"""The sweep: each kernel at each length, proven before it takes turns."""

import re

import pytest
import torch

from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.bench import sweep
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.small import run, settings

CPU = torch.device("cpu")
OF = {"heads": "2x16", "pass": "forward + backward", "T": 32}


def build(name, tmp_path, data, workload=OF, **changes):
    return sweep.build(workload, name, settings("sweep", tmp_path, data, **changes), CPU)


def test_kernels_to_a_report(tmp_path, data):
    found = run("sweep", tmp_path, data, only="manual,flash,efficient", dtype="float32")
    assert [tuple(each.workload.values()) for each in found] == [
        ("2x16", direction, T) for T in (32, 64) for direction in ("forward", "forward + backward")
    ]
    for each in found:
        assert each.measured.keys() == {"manual", "flash"} and each.ratio("flash").laps >= 6
        assert each.contenders["efficient"]["reason"] == "PyTorch has it on GPUs only"
    text = (tmp_path / "results" / "sweep" / "report.md").read_text()
    assert "## 2x16, forward + backward" in text and "| tokens | manual | flash |" in text
    assert "Every kernel was compared with float64 first" in text and "flash: flash" in text


def test_a_kernel_of_the_users_own_that_was_edited_is_measured_again(tmp_path, data):
    # its old time stayed, or "parity failed" for ever
    (tmp_path / "k.py").write_text("from fusedgpt.attention.functions import ATTENTION\nmine = ATTENTION['manual']\n")
    asked = dict(attention=f"{tmp_path}/k.py:mine", only="manual,*mine", dtype="float32", lengths="32", precision=99.0)
    run("sweep", tmp_path, data, **asked)
    rows = tmp_path / "results" / "sweep" / "rows.jsonl"
    rows.write_text(re.sub(r'"own_kernel": ?"\w+"', '"own_kernel": "before"', rows.read_text()))
    found = run("sweep", tmp_path, data, **asked)
    assert len(found) == 2 and all(f"{tmp_path}/k.py:mine" in each.measured for each in found)
    assert "before" not in str([each.contenders for each in found])


def test_what_is_measured_is_the_case_of_the_row(tmp_path, data, monkeypatch):
    cases = []
    inputs = Case.inputs
    monkeypatch.setattr(sweep, "_inputs", lambda case: cases.append(case) or inputs(case))
    _, found = build("flash", tmp_path, data, dtype="float32")
    assert cases == [Case((1, 2, 32, 16), CPU, torch.float32)]
    assert found["kernel"]["forward"] == ["flash"] and found["dtype"] == "float32"
    _, found = build("flash", tmp_path, data, OF | {"pass": "forward"}, dtype="float32")
    assert cases[-1] == Case((1, 2, 32, 16), CPU, torch.float32, backward=False)


def test_a_kernel_that_is_wrong_or_another_gets_no_turn(tmp_path, data, monkeypatch):
    monkeypatch.setitem(ATTENTION, "blocked", lambda q, k, v, *args: 1.01 * ATTENTION["manual"](q, k, v))
    with pytest.raises(ParityError):
        build("blocked", tmp_path, data, dtype="float32")
    monkeypatch.setitem(ATTENTION, "flash", ATTENTION["math"])
    sweep._refusal.cache_clear()
    with pytest.raises(UserError, match="saw math"):
        build("flash", tmp_path, data, dtype="float32")
    sweep._refusal.cache_clear()


def test_lengths_go_from_coarse_to_fine_and_few_have_flex(tmp_path, data):
    # which is compiled for each
    plan = sweep.comparisons(settings("sweep", tmp_path, data, lengths="320,256,384,1024,320,512"), CPU)
    assert list(dict.fromkeys(each.workload["T"] for each in plan)) == [256, 512, 1024, 320, 384]
    assert {each.workload["T"] for each in plan if "flex" in each.names} == {256, 512, 1024}
