"""rows.jsonl: what counts, what is moved aside, and what is refused."""

import json

import pytest
import torch

from fusedgpt.bench import proof, rows
from fusedgpt.errors import UserError
from fusedgpt.machine import files
from tests.fusedgpt.bench.small import result

HEADER = {
    "benchmark": "ladder",
    "command": "x",
    "settings": {"n_layer": 2},
    "environment": {"device": "d", "threads": 2},
}
READY = {"kind": "contender", "workload": {"T": 8}, "name": "a", "baseline": "a", "status": "measured"}
LAP = {"kind": "lap", "workload": {"T": 8}, "ms": {"a": 1.5}}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_rows_are_continued_and_the_last_line_about_a_contender_counts(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert rows.begin(path, HEADER) == ([], "")
    failed = READY | {"status": "failed", "reason": "it hung"}
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in (failed, READY, LAP, LAP, LAP | {"workload": {"T": 16}}))
        file.write('{"kind": "lap", "workload": {"T"')  # a kill
    lines = files.Lines(path)  # a torn last line takes no other with it
    lines.add(files.json_line(LAP))
    ((found,), said) = rows.begin(path, HEADER)
    assert said == "" and found.measured.keys() == {"a"} and found.laps == [{"a": 1.5}] * 3
    assert found.ms("a") == {"median_ms": 1.5, "p10_ms": 1.5, "p90_ms": 1.5, "samples": 3}


@pytest.mark.parametrize("change", [{"settings": {"n_layer": 3}}, {"environment": {"device": "d", "threads": 1}}])
def test_rows_of_another_setting_or_machine_are_moved_aside(tmp_path, change):
    path = tmp_path / "rows.jsonl"
    for n in (1, 2):
        write(path, {"kind": "header", **HEADER}, READY)
        found, said = rows.begin(path, HEADER | change)
        assert found == [] and said.endswith(f"moved to {tmp_path / f'rows.previous-{n}.jsonl'}")
        assert rows.read(tmp_path / f"rows.previous-{n}.jsonl")[1] == [READY]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "does not exist, or is empty: name the folder of a benchmark"),
        ([READY], "does not begin with the header of a benchmark"),
    ],
)
def test_files_that_bench_did_not_write_are_one_sentence(tmp_path, lines, message):
    with pytest.raises(UserError) as raised:
        rows.read(write(tmp_path / "rows.jsonl", *lines))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (UserError("on GPUs only"), "refused", "on GPUs only"),
        # "failed" is tried again by every later run, and a ValueError of a kernel was
        *((kind("not on MPS"), "refused", "not on MPS") for kind in (ValueError, AssertionError, NotImplementedError)),
        (UserError("attention='x' cannot run: CUDA out of memory. Tried"), "out of memory", "attention='x' cannot"),
        (torch.OutOfMemoryError("no room"), "out of memory", "no room"),
        (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate"), "out of memory", "[enforce] Default"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB"), "out of memory", "MPS backend"),
        (proof.ParityError("1.0e+00"), "parity failed", "1.0e+00"),
        (rows.Ended("failed", "it hung"), "failed", "it hung"),
        (torch.AcceleratorError("an illegal access"), "failed", "AcceleratorError: an illegal access"),
        (KeyError("x"), "failed", "KeyError: 'x'"),
    ],
    ids=repr,
)
def test_how_a_contender_ends(error, status, reason):
    with pytest.raises(Exception) as ended, proof.refusals():
        raise error
    found = rows.status_of(ended.value)
    assert found[0] == status and found[1].startswith(reason)


def test_a_ratio_needs_both_in_the_same_laps():
    found = result({"manual": [2.0] * 8, "flash": [1.0] * 8, "math": [4.0] * 8})
    assert found.ratio("flash").times == 2.0
    assert found.ratio("manual") is None and found.ratio("cudnn") is None
    found.contenders["flash"] |= {"status": "failed", "reason": "it hung"}
    assert found.ratio("flash") is None and found.ms("flash") is None
    assert found.precise(["math"], 0.01) and not result({"manual": [1.0], "math": [1.0]}).precise(["math"], 0.5)


def test_laps_of_other_code_do_not_count():
    # a kernel was edited, the same command given again, and the median was of both
    def line(commit, **more):
        return READY | {"commit": commit} | more

    other = READY | {"name": "b", "commit": "1"}
    lap = {"kind": "lap", "workload": {"T": 8}, "ms": {"a": 1.0, "b": 2.0}}
    (found,) = rows.results([line("1"), other, lap, lap, line("2"), lap])
    assert [sorted(lap) for lap in found.laps] == [["b"], ["b"], ["a", "b"]]
    (found,) = rows.results([line("1"), lap, line("1"), lap])
    assert len(found.laps) == 2 and all("a" in lap for lap in found.laps)
    (found,) = rows.results([line("1", own_kernel="x"), lap, line("1", own_kernel="y")])
    assert found.laps == [{"b": 2.0}]
