"""A time that something else disturbed: it is found, and no ratio is drawn from it."""

import json
import subprocess
import sys

import pytest

from fusedgpt.bench import disturbance, ladder, max_batch, numerics, prefill, report, sweep
from fusedgpt.files import read_jsonl
from tests.conftest import ROOT

CPU = ROOT / "results" / "cpu_amx"
KINDS = {"ladder": ladder, "sweep": sweep, "prefill": prefill, "numerics": numerics, "max_batch": max_batch}


def rows_of(kind):
    """The rows of a benchmark in results/."""
    return [line for line in read_jsonl(CPU / kind / "rows.jsonl") if line["kind"] == "row"]


SETTINGS = read_jsonl(CPU / "ladder" / "rows.jsonl")[0]["settings"]


def mark(row):
    row |= {"disturbed": True, "reason": "it was slow"}


def row(before=1.0, after=1.0, best=1.0, preempted=0, cpu_s=1.0):
    around = {"before_ms": before, "after_ms": after, "best_ms": best, "preempted": preempted, "cpu_s": cpu_s}
    return {"status": "measured", "median_ms": 1.0, "reference": around}


@pytest.mark.parametrize(("slow", "yes"), [(dict(before=1.4), True), (dict(after=1.4), True), (dict(after=1.2), False)])
def test_a_reference_slower_than_the_best_disturbs(slow, yes):
    first, second = disturbance.judged([row(), row(**slow)])
    assert disturbance.comparable(first) and disturbance.comparable(second) is not yes


def test_a_row_that_lost_the_cpu_is_disturbed_although_the_reference_was_not(monkeypatch):
    # a load that begins after the first reference and ends before the second, or lasts for the whole benchmark
    monkeypatch.setattr(disturbance, "PREEMPTED", 100)
    calm, lost = disturbance.judged([row(preempted=50), row(preempted=500, cpu_s=2.0)])
    assert disturbance.comparable(calm) and lost["reason"] == "it lost the CPU 500 times in 2 s of CPU time"


def test_rows_without_a_reference_are_left_as_they_are():
    old = rows_of("ladder")
    assert disturbance.judged(old) == old
    assert not disturbance.comparable(None) and not disturbance.comparable({"status": "refused"})


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count other things")
def test_preemptions_of_child_processes_count():
    # a rung of the ladder is a child process
    def measure(spec):
        spin = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
        subprocess.run([sys.executable, "-c", spin], check=True)
        return {"median_ms": 1.0}

    around = disturbance.bracketed(measure, {}, lambda: 1.0)["reference"]
    assert around["cpu_s"] >= 0.3 and around["preempted"] >= 0
    assert "reference" not in disturbance.bracketed(lambda spec: {"n": 1}, {}, lambda: 1.0)  # a row without a time


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_reports_are_those_of_their_rows(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)  # the report only names it
    (tmp_path / "rows.jsonl").write_bytes((CPU / kind / "rows.jsonl").read_bytes())
    report.write(tmp_path, KINDS[kind])
    assert (tmp_path / "report.md").read_bytes() == (CPU / kind / "report.md").read_bytes()


def test_a_report_says_which_rows_were_disturbed_and_why(tmp_path):
    lines = read_jsonl(CPU / "ladder" / "rows.jsonl")
    mark(next(line for line in lines if line.get("rung") == "flash"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.write(tmp_path, ladder)
    text = (tmp_path / "report.md").read_text()
    assert "- flash: disturbed: it was slow" in text and "The same command measures them again." in text


def test_no_per_cent_of_the_ladder_comes_from_a_disturbed_row():
    rows = rows_of("ladder")
    by_name = {row["rung"]: row for row in rows}
    mark(by_name["flash"])
    (line,) = (line for line in ladder.table(rows) if line.startswith("| flash |"))
    assert "*disturbed*" in line and line.split("|")[3].strip() == "" and line.split("|")[6].strip() == ""
    mark(by_name["manual"])
    table = "\n".join(ladder.table(rows))
    assert "measured again at the end" not in table and "times as fast" in table
    assert all(line.split("|")[3].strip() == "" for line in ladder.table(rows)[2:] if line.startswith("| "))
    mark(by_name[ladder.PADDED])
    assert "times as fast" not in "\n".join(ladder.table(rows))


def test_the_ladders_bar_of_a_disturbed_row_is_hollow():
    rows = [row for row in rows_of("ladder") if row["status"] == "measured"]
    mark(rows[1])
    ((*_, figure),) = ladder.figures(rows, SETTINGS)
    assert [bar.get_fill() for bar in figure.axes[0].patches] == [n != 1 for n in range(len(rows))]


def drawn(kind, rows):
    """The figures of a kind by name, with the settings of the ladder."""
    return {name: figure for name, _, _, figure in kind.figures(rows, SETTINGS)}


def alone(rows, attention, T):
    """The rows of the sweep's attention alone, of one kernel at one length."""
    return [row for row in rows if (row["part"], row["attention"], row["T"]) == ("attention", attention, T)]


def at_512(rows):
    """The lines at 512 tokens in the sweep's tables of attention alone."""
    return [line for line in sweep.table([row for row in rows if row["part"] == "attention"]) if "| 512 |" in line]


@pytest.mark.parametrize("attention", ["flash", "manual"])
def test_no_speedup_of_the_sweep_comes_from_a_disturbed_row(attention):
    # manual is every other kernel's baseline
    rows = [row for row in rows_of("sweep") if row["status"] == "measured"]
    before = at_512(rows)
    for each in alone(rows, attention, 512):
        mark(each)
    figure = drawn(sweep, rows)["speedup"]
    for axes in figure.axes:
        for line in axes.lines:
            gone = line.get_label() == attention or attention == "manual"
            assert (512 in line.get_xdata()) is not gone
    assert sum(line.count("*disturbed*") for line in at_512(rows)) == len(before) == 4  # two shapes, two directions
    for line, whole in zip(at_512(rows), before):
        assert line.count("x") == (0 if attention == "manual" else whole.count("x") - 1)
    everywhere = [{**row, "disturbed": True} for row in rows]
    assert sweep.crossovers(everywhere) == {} and drawn(sweep, everywhere).keys() == {"speedup", "memory"}


def test_a_crossover_needs_undisturbed_times():
    times = {"manual": (1, 4), "flash": (2, 3)}
    rows = [
        {"attention": name, "T": T, "median_ms": ms, "p10_ms": ms, "p90_ms": ms, "status": "measured"}
        for name, each in times.items()
        for T, ms in enumerate(each)
    ]
    assert sweep.crossovers(rows) == {("manual", "flash"): (1, 1)}
    mark(rows[-1])
    assert sweep.crossovers(rows) == {}


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_no_speedup_of_prefill_comes_from_a_disturbed_row(attention):
    rows = [row for row in rows_of("prefill") if row["model"] == "gpt2"]
    assert sum(line.count("x |") for line in prefill.table(rows)) == 6
    mark(next(row for row in rows if (row["T"], row["attention"]) == (1024, attention)))
    table = prefill.table(rows)
    gone = [line for line in table if "| 1024 |" in line and (attention == "eager" or "| flash |" in line)]
    assert gone and not any("x |" in line for line in gone)
    assert sum(line.count("x |") for line in table) == 6 - len(gone)
    figure = drawn(prefill, rows)["prefill"]
    for line in figure.axes[0].lines:
        assert (1024 in line.get_xdata()) is (line.get_label() != attention)
    assert len(figure.axes[0].texts) == 2  # speedups


def test_the_other_kinds_mark_it_too():
    rows = [row for row in rows_of("numerics") if "median_ms" in row]
    mark(rows[0])
    assert "\n".join(numerics.table(rows)).count("*disturbed*") == 1
    rows = [row for row in rows_of("max_batch") if row["status"] == "measured"]
    mark(rows[0])
    (line,) = (line for line in max_batch.table(rows) if line.startswith(f"| {rows[0]['attention']} |"))
    assert "*disturbed*" in line and "%" not in line
    assert len(drawn(max_batch, rows)["curves"].axes[0].lines) == len(rows) - 1
