"""A time that something else disturbed: it is found, and no ratio is drawn from it."""

import json
import subprocess
import sys

import pytest

from fusedgpt.bench import disturbance, kinds, ladder, max_batch, numerics, prefill, report, sweep
from fusedgpt.machine.files import read_jsonl
from tests.fusedgpt.bench.small import CPU_RESULTS, published
from tests.launch import ROOT


def rows_of(kind):
    """The rows of a benchmark in results/."""
    return published(kind)[1]


def mark(row):
    row |= {"disturbed": True, "reason": "it was slow"}


def row(before=1.0, after=1.0, preempted=0, cpu_s=1.0, p90=1.0, **more):
    around = {"before_ms": before, "after_ms": after, "preempted": preempted, "cpu_s": cpu_s}
    around["best_ms"] = min(before, after)
    return {"status": "measured", "median_ms": 1.0, "p10_ms": 1.0, "p90_ms": p90, "reference": around, **more}


def rounds(ms):
    """A round, and a second one in which the reference takes `ms`."""
    return [row(round=1), row(round=2, before=ms, after=ms), row(round=2, before=ms, after=ms)]


@pytest.mark.parametrize(
    ("rows", "keys", "reasons"),
    [
        # a gate of 25 % could not see what an effect of 20 % is worth
        ([row(), row(before=1.2)], (), ["", "a fixed product took 1.2 ms before"]),
        ([row(), row(after=1.2)], (), ["", "1.2 ms after it"]),
        ([row(), row(after=1.08)], (), ["", ""]),
        # the clock of a machine rose for minutes: every row before counted as disturbed, though each was compared with
        # rows of the same minute
        (rounds(1.2), ("round",), ["", "", ""]),
        (rounds(1.3), ("round",), ["", "at best beside all rows", "at best beside all rows"]),
        # a row of ours was kept with 1397 to 2023 ms, one of another's dropped with 1495 to 1576
        ([row(p90=1.2), row(p90=1.45)], (), ["", "its samples lie far apart, 1 to 1.45 ms from p10 to p90"]),
        # a load that begins after the first reference and ends before the second, or lasts for the whole benchmark
        ([row(preempted=50), row(preempted=500, cpu_s=2.0)], (), ["", "it lost the CPU 500 times in 2 s of CPU time"]),
    ],
)
def test_each_sign_disturbs_a_row(rows, keys, reasons, monkeypatch):
    monkeypatch.setattr(disturbance, "PREEMPTED", 100)
    for found, reason in zip(disturbance.judged(rows, keys), reasons, strict=True):
        assert disturbance.comparable(found) is not bool(reason)
        assert reason in found.get("reason", "")


def test_a_row_is_judged_anew_once_its_group_was_measured_again():
    first = disturbance.judged([row(), row(after=2.0)])[1]
    (second,) = disturbance.judged([first | {"reference": row()["reference"]}])
    assert first["disturbed"] and "disturbed" not in second and "reason" not in second


def test_rows_without_a_reference_are_left_as_they_are():
    old = [{name: value for name, value in row.items() if name != "reference"} for row in rows_of("ladder")]
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
    assert around["cpu_s"] >= 0.3
    assert "reference" not in disturbance.bracketed(lambda spec: {"n": 1}, {}, lambda: 1.0)  # a row without a time


def test_a_row_has_the_preemptions_and_cpu_time_of_its_own_measurement(monkeypatch):
    # not those of the process since it began, nor of the reference before and after it
    now = [5000, 900.0]
    monkeypatch.setattr(disturbance, "usage", lambda: tuple(now))

    def using(switches, cpu_s, result):
        now[:] = now[0] + switches, now[1] + cpu_s
        return result

    bracketed = disturbance.bracketed(lambda spec: using(7, 2.5, {"median_ms": 1.0}), {}, lambda: using(100, 10.0, 1.0))
    assert (bracketed["reference"]["preempted"], bracketed["reference"]["cpu_s"]) == (7, 2.5)


FOLDERS = sorted(path.parent for path in (ROOT / "results").rglob("report.md"))
ONE_OF_EACH = {folder.name: folder for folder in FOLDERS if folder.name != "ladder_124M"}.values()
OTHERS = [pytest.param(folder, marks=pytest.mark.slow) for folder in FOLDERS if folder not in ONE_OF_EACH]


@pytest.mark.parametrize("folder", [*ONE_OF_EACH, *OTHERS], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_published_reports_are_those_of_their_rows(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    report.write(tmp_path, kinds.kind_of(report.read(folder)[0]))
    assert (tmp_path / "report.md").read_bytes() == (folder / "report.md").read_bytes()


@pytest.mark.slow  # matplotlib lays out each figure anew
@pytest.mark.parametrize("folder", {folder.name: folder for folder in FOLDERS}.values(), ids=lambda path: path.name)
def test_the_published_figures_can_be_drawn(folder, tmp_path, drawn):
    (tmp_path / "rows.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    paths = report.write(tmp_path, kinds.kind_of(report.read(folder)[0]))
    assert all(path.stat().st_size > 300 for path in paths)


def test_a_report_says_which_rows_were_disturbed_and_why(tmp_path):
    lines = read_jsonl(CPU_RESULTS / "ladder" / "rows.jsonl")
    mark(next(line for line in lines if line.get("rung") == "flash"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.write(tmp_path, ladder)
    text = (tmp_path / "report.md").read_text()
    assert "- flash: disturbed: it was slow" in text and "The same command measures them again." in text


@pytest.mark.parametrize("rung", ["flash", "manual"])
def test_no_per_cent_of_the_ladder_comes_from_a_round_with_a_disturbed_row(rung):
    # only the disturbed row itself was left out: whoever had the calmer visits was favoured
    rows = rows_of("ladder")
    first, second = ([{**row, "round": n} for row in rows if row["rung"] != ladder.AGAIN] for n in (1, 2))
    mark(next(row for row in first if row["rung"] == rung))
    lines = [line.split(" | ") for line in ladder.table([*first, *second]) if "MiB" in line or "GiB" in line]
    assert lines and all(line[2].startswith("(") and "), " in line[2] for line in lines)  # a dropped median is shown
    assert [bool(line[3]) for line in lines] == [line[0] != "| manual" for line in lines]
    mark(next(row for row in second if row["rung"] == rung))
    table = "\n".join(ladder.table([*first, *second]))
    assert " % (" not in table and "times as fast" not in table and "not told apart" not in table


def test_the_ladders_bars_without_a_whole_round_are_hollow():
    rows = [row for row in rows_of("ladder") if row["status"] == "measured" and row["rung"] != ladder.AGAIN]
    for disturbed in (False, True):
        if disturbed:
            mark(rows[1])
        ((*_, figure),) = ladder.figures(rows, published("ladder")[0])
        assert {bar.get_fill() for bar in figure.axes[0].patches} == {not disturbed}


def drawn_by(kind, rows):
    """The figures of a kind by name, with the settings of the ladder."""
    return {name: figure for name, _, _, figure in kind.figures(rows, published("ladder")[0])}


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
    figure = drawn_by(sweep, rows)["speedup"]
    for axes in figure.axes:
        for line in axes.lines:
            gone = line.get_label() == attention or attention == "manual"
            assert (512 in line.get_xdata()) is not gone
    assert sum(line.count("*disturbed*") for line in at_512(rows)) == len(before) == 4  # two shapes, two directions
    for line, whole in zip(at_512(rows), before):
        assert line.count("x") == (0 if attention == "manual" else whole.count("x") - 1)
    everywhere = [{**row, "disturbed": True} for row in rows]
    assert sweep.crossovers(everywhere) == {} and drawn_by(sweep, everywhere).keys() == {"speedup", "memory"}


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_no_speedup_of_prefill_comes_from_a_disturbed_row(attention):
    rows = [row for row in rows_of("prefill") if row["model"] == "gpt2"]
    assert sum(line.count("x |") for line in prefill.table(rows)) == 3  # flash's
    mark(next(row for row in rows if (row["T"], row["attention"]) == (1024, attention)))
    table = prefill.table(rows)
    (gone,) = (line for line in table if "| 1024 | flash |" in line)
    assert "x |" not in gone and sum(line.count("x |") for line in table) == 2
    figure = drawn_by(prefill, rows)["prefill"]
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
    assert len(drawn_by(max_batch, rows)["curves"].axes[0].lines) == len(rows) - 1
