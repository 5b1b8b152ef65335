"""The rows of a benchmark: each stands for itself, none is lost, and none has a time that it did not earn."""

import itertools
import json
import math

import pytest
import torch

from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.bench import disturbance, rows
from fusedgpt.bench.proof import ParityError, prove
from fusedgpt.errors import UserError
from fusedgpt.machine.files import read_jsonl

CPU = torch.device("cpu")
HEADER = {"benchmark": "ladder", "settings": {"n_layer": 2}, "environment": {"device": "a"}, "command": "bench.py"}
PLAN = [{"rung": name} for name in "abcd"]


TIME = {"median_ms": 2.0, "p10_ms": 1.9, "p90_ms": 2.1}


@pytest.fixture(autouse=True)
def _idle(monkeypatch):
    """Tests do not depend on how busy their machine is, nor wait for it."""
    monkeypatch.setattr(disturbance, "PREEMPTED", math.inf)
    monkeypatch.setattr(rows, "PAUSE", 0)


def run(tmp_path, measure, plan=PLAN, header=HEADER, reference=lambda: 1.0, **options):
    said = []
    rows.run(plan, measure, tmp_path / "rows.jsonl", header, reference, lambda: {"clock": 1}, said.append, **options)
    return [row for row in read_jsonl(tmp_path / "rows.jsonl") if row["kind"] == "row"], said


def test_no_failure_ends_the_others(tmp_path):
    # K1, and an out-of-memory in row 2 of 20 that cost the other 18
    failures = {
        "a": UserError("only on GPUs"),
        "b": torch.OutOfMemoryError("CUDA out of memory"),
        "c": RuntimeError("something else\nand more"),
    }

    def measure(spec):
        if spec["rung"] in failures:
            raise failures[spec["rung"]]
        return TIME

    got, said = run(tmp_path, measure)
    assert [row["status"] for row in got] == ["refused", "out of memory", "failed", "measured"]
    reasons = ["only on GPUs", "OutOfMemoryError: CUDA out of memory", "RuntimeError: something else"]
    assert [row["reason"] for row in got[:3]] == reasons and "median_ms" not in got[1]
    assert said[3].startswith("[4/4] d: median 2.000 ms (p10 1.900, p90 2.100); about ")


def test_what_is_left_names_what_rows_ended_with(tmp_path):
    # make gpu counted rows that failed parity as measured
    ends = {"a": ParityError("wrong"), "b": UserError("only on GPUs"), "c": RuntimeError("tried again")}

    def measure(spec):
        if spec["rung"] in ends:
            raise ends[spec["rung"]]
        return {**TIME, "p90_ms": 9.0}  # samples that lie far apart

    run(tmp_path, measure)
    wrong = {"disturbed": 1, "refused": 1, "parity failed": 1}
    assert rows.left(PLAN, tmp_path / "rows.jsonl", HEADER) == (1, wrong)
    assert rows.left(PLAN[1:2], tmp_path / "rows.jsonl", HEADER) == (0, {"refused": 1})


def test_a_row_that_fails_parity_has_no_time(tmp_path):
    # K6: silently wrong results
    def measure(spec):
        wrong = (lambda q, k, v, dropout_p: q + k + v) if spec["rung"] == "b" else ATTENTION["manual"]
        case = Case((1, 4, 32, 16), CPU, torch.float32)
        return prove(wrong, case) | {"median_ms": 1.0, "p10_ms": 1.0, "p90_ms": 1.0}

    got, _ = run(tmp_path, measure)
    assert [row["status"] for row in got] == ["measured", "parity failed", "measured", "measured"]
    assert set(got[1]) == {"kind", "rung", "status", "reason", "call"}
    assert got[0]["parity"].startswith("passed") and "2 of 4 heads" in got[0]["parity"]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    measured = []

    def measure(spec):
        if spec["rung"] == "c" and len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(spec["rung"])
        return {"n": len(measured)}

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, measure)
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"kind": "row", "rung": "c", "stat')  # a kill cut it off
    measured.append("the interruption")
    got, said = run(tmp_path, measure)
    assert measured == ["a", "b", "the interruption", "c", "d"]
    assert [row["rung"] for row in got] == list("abcd")
    assert said[0] == "2 of 4 rows are there already" and said[1].startswith("[1/2] c: ")


def test_a_failed_row_is_tried_again_and_a_refused_one_is_not(tmp_path):
    def first(spec):
        raise UserError("never") if spec["rung"] == "a" else RuntimeError("once")

    run(tmp_path, first)
    got, _ = run(tmp_path, lambda spec: {"second": True})
    assert [row["status"] for row in got] == ["refused", "measured", "measured", "measured"]


def test_a_row_without_memory_is_tried_again_once_by_each_call_and_stays_until_then(tmp_path):
    # a neighbour held the GPU: at 16384 tokens the row stayed "out of memory", and the next call found all rows there
    ends = {"a": torch.OutOfMemoryError("CUDA out of memory"), "b": UserError("CUDA out of memory. Tried to allocate")}
    tried = []

    def full(spec):
        tried.append(spec["rung"])
        if spec["rung"] in ends:
            raise ends[spec["rung"]]
        return TIME

    got, _ = run(tmp_path, full)
    assert [row["status"] for row in got] == ["out of memory"] * 2 + ["measured"] * 2  # b's kernel did not refuse
    got, said = run(tmp_path, full)
    assert tried == [*"abcd", *"ab"] and said[0] == "2 of 4 rows are there already" and len(got) == 4
    assert rows.left(PLAN, tmp_path / "rows.jsonl", HEADER) == (0, {"out of memory": 2})  # make gpu ends
    got, _ = run(tmp_path, lambda spec: TIME, plan=PLAN[1:])  # a is not asked for
    assert {row["rung"]: row["status"] for row in got} == dict.fromkeys("bcd", "measured") | {"a": "out of memory"}


@pytest.mark.parametrize("changed", ["settings", "environment"])
def test_rows_of_other_settings_or_another_machine_do_not_mix(tmp_path, changed):
    run(tmp_path, lambda spec: {"n": 1})
    got, said = run(tmp_path, lambda spec: {"n": 2}, header={**HEADER, changed: {"other": 1}})
    assert [row["n"] for row in got] == [2] * 4
    assert "moved to" in said[0] and (tmp_path / "rows.previous-1.jsonl").exists()
    run(tmp_path, lambda spec: {"n": 3})
    assert (tmp_path / "rows.previous-1.jsonl").exists() and (tmp_path / "rows.previous-2.jsonl").exists()


GPU = {"device": "NVIDIA H200", "torch": "2.11.0", "cuda": "12.8", "cudnn": 91002, "transformers": "5.0"}
GPU |= {"platform": "Linux-6.1", "python": "3.11.7", "threads": 16, "commit": "a"}
CPU_ONLY = {key: value for key, value in GPU.items() if key not in ("cuda", "cudnn")}


@pytest.mark.parametrize(
    ("machine", "change", "goes_on"),
    [
        *((GPU, {key: "another"}, True) for key in ("platform", "python", "threads", "commit", "triton")),
        *((GPU, {key: "another"}, False) for key in ("device", "torch", "cuda", "cudnn", "transformers")),
        # flash4 stayed refused after its package was installed, and an upgrade went on with the old rows
        *((GPU, {key: "another"}, False) for key in ("flash-attn", "flash-attn-3", "flash-attn-4")),
        *((CPU_ONLY, {key: "another"}, True) for key in ("platform", "python", "commit")),
        *((CPU_ONLY, {key: "another"}, False) for key in ("device", "torch", "transformers", "threads")),
    ],
    ids=str,
)
def test_another_machine_of_the_same_kind_goes_on(tmp_path, machine, change, goes_on):
    # the next machine that was lent had another kernel version, and every row was measured again
    run(tmp_path, lambda spec: {"n": 1}, plan=PLAN[:2], header={**HEADER, "environment": machine})
    got, _ = run(tmp_path, lambda spec: {"n": 2}, header={**HEADER, "environment": {**machine, **change}})
    assert [row["n"] for row in got] == ([1, 1, 2, 2] if goes_on else [2] * 4)
    assert (tmp_path / "rows.previous-1.jsonl").exists() is not goes_on
    assert [line["kind"] for line in read_jsonl(tmp_path / "rows.jsonl")].count("before") == 1 + goes_on


def test_no_row_is_begun_after_the_budget(tmp_path, monkeypatch):
    # a machine that was lent for half an hour was taken away in the middle of a row
    clock = [100.0]
    monkeypatch.setattr(rows, "BEGAN", 100.0)
    monkeypatch.setattr(rows.time, "monotonic", lambda: clock[0])

    def measure(spec):
        clock[0] += 10
        return {"n": clock[0]}

    got, said = run(tmp_path, measure, max_seconds=20)
    assert [row["rung"] for row in got] == ["a", "b"]
    assert said[-1] == "max_seconds=20 is over: 2 of 4 rows are missing. The same command continues"
    monkeypatch.setattr(rows, "BEGAN", clock[0])
    got, said = run(tmp_path, measure, max_seconds=25)
    assert [(row["rung"], row["n"]) for row in got] == [("a", 110), ("b", 120), ("c", 130), ("d", 140)]
    assert not any("missing" in line for line in said)


def test_a_disturbed_row_is_not_measured_again_after_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "time_is_up", lambda max_seconds: bool(measured))
    references, measured = iter([1.0, 4.0]), []

    def measure(spec):
        measured.append(1)
        return TIME

    got, said = run(tmp_path, measure, reference=lambda: next(references), max_seconds=1)
    assert [(row["rung"], row["disturbed"]) for row in got] == [("a", True)] and len(measured) == 1
    assert "disturbed rows: 1" in said[-2] and "3 of 4 rows are missing" in said[-1]


def test_a_row_that_runs_out_of_time_is_left_for_the_next_call(tmp_path):
    def measure(spec):
        if spec["rung"] == "b":
            with open(tmp_path / "rows.jsonl", "a") as file:
                file.write('{"kind": "trial", "rung": "b", "fits": true}\n')
            raise rows.OutOfTime
        return TIME

    got, said = run(tmp_path, measure, max_seconds=1e9)
    assert [row["rung"] for row in got] == ["a"] and "3 of 4 rows are missing" in said[-1]
    got, _ = run(tmp_path, lambda spec: TIME)
    assert [row["rung"] for row in got] == list("abcd")  # a trial of b is not its row
    run(tmp_path, lambda spec: TIME, profile=True)
    assert [line["kind"] for line in read_jsonl(tmp_path / "rows.jsonl")].count("trial") == 1  # it is kept each time


def test_fewer_rows_asked_for_keep_the_others(tmp_path):
    run(tmp_path, lambda spec: {"n": 1})
    got, _ = run(tmp_path, lambda spec: {"n": 2}, plan=PLAN[:1], header={**HEADER, "command": "bench.py --only=a"})
    assert [row["n"] for row in got] == [1] * 4


def test_a_profile_that_is_missing_is_made_by_measuring_again(tmp_path):
    def measure(spec):
        if spec["rung"] == "a":
            raise UserError("not here")
        trace = rows.trace_path(tmp_path, spec)
        trace.parent.mkdir(exist_ok=True)
        trace.write_text("{}")
        return {"n": next(numbers), "kernel": {}}

    numbers = iter(range(100))  # --profile=True on rows that were there already used to write no trace
    first, _ = run(tmp_path, measure)
    rows.trace_path(tmp_path, PLAN[2]).unlink()
    got, said = run(tmp_path, measure, profile=True)
    assert sorted(row["n"] for row in got[1:]) == [0, 2, 3] and got[0] == first[0]  # a refused row has none to make
    assert said[0] == "3 of 4 rows are there already"


def test_the_state_of_the_machine_is_around_the_rows(tmp_path):
    run(tmp_path, lambda spec: {})
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header", "before", *["row"] * 4, "after"]


def test_the_time_left_is_of_each_part(tmp_path, monkeypatch):
    told = iter([0, 10, 10, 11, 11, 12, 12, 22])  # before and after each row
    monkeypatch.setattr(rows.time, "perf_counter", lambda: next(told))
    plan = [{"part": part, "n": n} for n, part in enumerate(("slow", "quick", "quick", "slow"))]
    _, said = run(tmp_path, lambda spec: {}, plan=plan)
    assert [line.split("about ")[1] for line in said] == ["30 s left", "11 s left", "10 s left", "0 s left"]


def test_a_disturbed_row_is_measured_again(tmp_path):
    # a loaded machine gave 72.0 ms, p10 to p90 within 0.1, for a kernel of 1 ms
    references = iter([1.0, 1.1, 1.0, 4.0, 1.0, 1.0, *[1.0] * 4])  # before and after each attempt: the second is slow
    measured = []
    got, said = run(tmp_path, lambda spec: measured.append(spec["rung"]) or TIME, reference=lambda: next(references))
    assert measured == ["a", "b", "b", "c", "d"]
    assert [row["rung"] for row in got] == list("abcd") and not any("disturbed" in row for row in got)
    (dropped,) = got[1]["tries"]  # what was dropped is shown
    assert dropped["median_ms"] == 2.0 and "4 ms after it" in dropped["reason"] and "tries" not in got[0]
    assert "a fixed product took 1 ms before and 4 ms after it, 1 ms at best beside the rows that it" in said[1]
    assert said[1].endswith("it is measured again")


def test_a_row_that_stays_disturbed_is_kept_with_a_mark_and_measured_by_the_next_run(tmp_path):
    measured, slow = [], [1.0]

    def measure(spec):
        measured.append(spec["rung"])
        slow[0] = 9.0 if spec["rung"] == "b" else 1.0
        return TIME

    got, said = run(tmp_path, measure, reference=lambda: slow[0])
    assert measured == ["a", "b", "b", "b", "c", "c", "d"]  # the last of b was slow still when c began
    assert [row.get("disturbed") for row in got] == [None, True, None, None]
    assert got[1]["status"] == "measured" and "9 ms after it, 1 ms at best " in got[1]["reason"]
    assert said[-1] == "disturbed rows: 1. The same command measures them again"
    got, said = run(tmp_path, lambda spec: TIME, plan=PLAN[:1])  # not asked for: it stays
    assert len(got) == 4 and said[0] == "1 of 1 rows are there already" and said[1].startswith("disturbed rows: 1.")
    got, said = run(tmp_path, lambda spec: TIME)
    assert said[0] == "3 of 4 rows are there already" and len(got) == 4
    assert not any(row.get("disturbed") for row in got)


def test_a_disturbed_row_stays_until_it_is_measured_again(tmp_path, monkeypatch):
    # it was taken out of the file before, and a budget that was over, or a kill, left nothing of it
    got, _ = run(tmp_path, lambda spec: TIME | {"n": 1}, plan=PLAN[:2])
    path = tmp_path / "rows.jsonl"
    slow = {"before_ms": 9.0, "after_ms": 9.0, "best_ms": 9.0, "preempted": 0, "cpu_s": 1.0}
    lines = read_jsonl(path)
    lines[3]["reference"] = slow  # b's: header, before, a, b
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(rows, "time_is_up", lambda max_seconds: max_seconds == 1)
    got, said = run(tmp_path, lambda spec: pytest.fail("no time"), plan=PLAN[:2], max_seconds=1)
    assert [row.get("disturbed") for row in got] == [None, True] and not any("missing" in line for line in said)

    def measure(spec):
        if spec["rung"] == "c":
            raise KeyboardInterrupt
        return TIME | {"n": 2}

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, measure)
    assert [row["n"] for row in rows.latest(read_jsonl(path)) if row["kind"] == "row"] == [1, 2]
    got, _ = run(tmp_path, lambda spec: TIME | {"n": 3})
    assert [(row["rung"], row["n"]) for row in got] == [("a", 1), ("b", 2), ("c", 3), ("d", 3)]
    assert not any("disturbed" in row for row in got)


def test_rows_measured_under_load_are_found_once_the_best_is_known(tmp_path):
    references = itertools.chain([5.0] * 4, itertools.repeat(1.0))
    got, _ = run(tmp_path, lambda spec: TIME, reference=lambda: next(references))
    assert [row.get("disturbed") for row in got] == [True, True, None, None]
    got, _ = run(tmp_path, lambda spec: TIME, plan=PLAN[2:], reference=lambda: 5.0)  # a run that goes on knows it too
    assert [row.get("disturbed") for row in got] == [True, True, None, None]
    got, _ = run(tmp_path, lambda spec: TIME, plan=[*PLAN, {"rung": "e"}], reference=lambda: 5.0)
    assert [row["rung"] for row in got if row.get("disturbed")] == ["a", "b", "e"]


def test_a_disturbed_row_is_measured_again_with_its_whole_group(tmp_path):
    # the rows that it is compared with were measured at another hour
    plan = [{"peer": peer, "round": n} for n in (1, 2) for peer in "ab"]
    slow = iter([*[1.0] * 4, *[9.0] * 2, *[9.0] * 4, *[1.0] * 2])  # the third row, and each of its tries
    got, _ = run(tmp_path, lambda spec: TIME | {"n": 1}, plan, reference=lambda: next(slow), group=("round",))
    assert [row.get("disturbed") for row in got] == [None, None, True, None]
    got, said = run(tmp_path, lambda spec: TIME | {"n": 2}, plan, group=("round",))
    assert said[0] == "2 of 4 rows are there already"
    assert [row["n"] for row in got] == [1, 1, 2, 2] and not any("disturbed" in row for row in got)
    assert [row["call"] for row in got] == [1, 1, 2, 2]


def test_a_refused_row_of_a_disturbed_group_is_not_tried_again(tmp_path):
    tried = []

    def measure(spec):
        tried.append(spec["rung"])
        if spec["rung"] == "a":
            raise UserError("only on GPUs")
        return {**TIME, "p90_ms": 9.0}

    for _ in range(2):
        run(tmp_path, measure, PLAN[:2], group=("round",))
    assert tried.count("a") == 1 and tried.count("b") == 2 * (1 + rows.AGAIN)


def test_each_call_that_measured_is_named(tmp_path):
    # a report had the command of the last call only: 20 rows were of one, 12 of a later --only
    for only, command in ((PLAN[:2], "bench.py --only=a,b"), (PLAN, "bench.py")):
        run(tmp_path, lambda spec: TIME, only, header={**HEADER, "command": command})
    before = [line for line in read_jsonl(tmp_path / "rows.jsonl") if line["kind"] == "before"]
    assert [(line["call"], line["command"]) for line in before] == [(1, "bench.py --only=a,b"), (2, "bench.py")]


DAMAGED = ["{}", "[]", "7", "not JSON", '{"kind": "row", "rung": "b"}', '{"kind": "row", "status": 7}', '{"kind": 3}']
DAMAGED += ['{"kind": "row", "rung": "b", "status": "measured", "median_ms": "2"}', '{"kind": "before", "machine": 1}']
DAMAGED += ['{"kind": "row", "rung": ["b"], "status": "measured"}', '{"kind": "row", "rung": "b", "status": "refused"}']
DAMAGED += ['{"kind": "row", "rung": "b", "status": "measured", "reference": {}}']


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_one_sentence(tmp_path, line):
    # three of seven were a traceback
    run(tmp_path, lambda spec: TIME, PLAN[:1])
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text() + line + "\n")
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"rows.jsonl is damaged: .*Take a whole copy"):
        run(tmp_path, lambda spec: TIME)
    with pytest.raises(UserError, match="is damaged"):
        rows.left(PLAN, path, HEADER)
    assert path.read_bytes() == before
    path.write_text(path.read_text() + '{"kind": "after"}')  # a last line without its end hid it
    with pytest.raises(UserError, match="is damaged"):
        rows.left(PLAN, path, HEADER)
    path.write_text(before.decode().removesuffix(line + "\n") + '{"kind": "row", "rung": "b", "sta')
    got, _ = run(tmp_path, lambda spec: TIME)  # a kill cut it short: its row is measured again
    assert [row["rung"] for row in got] == list("abcd")
