"""report.md and figures: one look for all kinds, and titles that say no more than intervals do."""

import json

import pytest

from fusedgpt.bench import figures, report
from fusedgpt.bench.report import Shown
from fusedgpt.errors import UserError
from fusedgpt.machine.turns import Ratio
from tests.fusedgpt.bench.small import result

HEADER = {"benchmark": "ladder", "command": "python bench.py ladder", "settings": {"n_layer": 2}, "set": ["n_layer"]}
HEADER |= {"environment": {"device": "a CPU", "torch": "2.13", "threads": 2}}


def shown(**changes):
    plain = dict(unit="ms per step", columns=lambda result, name: {"more": name.upper()}, headline=lambda result: [])
    return Shown(**plain | dict(notes=lambda results: ["a note"], subject=lambda s: "Training") | changes)


def write(folder, *results):
    """The folder of a benchmark with these results."""
    lines = [{"kind": "header", **HEADER}]
    for each in results:
        about = {"of": each.of}
        for line in each.contenders.values():
            lines.append({"kind": "contender", **about, "baseline": each.baseline, **line})
        lines += [{"kind": "lap", **about, "ms": lap} for lap in each.laps]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


FASTER = {"manual": [20.0, 22.0] * 5, "flash": [10.0, 11.0] * 5}
REFUSED = {"status": "refused", "reason": "on GPUs only"}


@pytest.mark.usefixtures("drawn")
def test_rows_alone_make_a_report_and_a_figure(tmp_path):
    paths = report.write(write(tmp_path, result(FASTER, cudnn=REFUSED)), shown(), form="pdf")
    assert [path.name for path in paths] == ["report.md", "ladder.png", "ladder.pdf"]
    assert all(path.stat().st_size > 500 for path in paths) and (tmp_path / "ladder.png").stat().st_size < 300_000
    text = (tmp_path / "report.md").read_text()
    assert "- **flash is 2 times as fast as manual (2 to 2).**" in text
    assert (
        "| flash | 10.5 (10 to 11) | 2 (2 to 2) | FLASH |" in text and "| manual | 21 (20 to 22) |  | MANUAL |" in text
    )
    assert "| cudnn | refused: on GPUs only |  |  |" in text and "- refused: cudnn: on GPUs only" in text
    assert (
        "a CPU, PyTorch 2.13, 2 threads; commit abc, 2026-11-27" in text and "n_layer 2" in text and "- a note" in text
    )


def test_a_table_over_an_axis_has_a_line_for_each_value_and_a_column_for_each_contender(tmp_path):
    long, short = result(FASTER, {"heads": "2x8", "T": 64}), result(FASTER, {"heads": "2x8", "T": 32}, cudnn=REFUSED)
    report.write(write(tmp_path, long, short), shown(axis="T", axis_label="tokens"))
    text = (tmp_path / "report.md").read_text()
    assert "## 2x8" in text and "| tokens | manual | flash |" in text
    assert "| 32 | 21 | 10.5; 2 (2 to 2) |\n| 64 | 21 | 10.5; 2 (2 to 2) |" in text
    assert "- **At 64 tokens: flash is 2 times as fast as manual (2 to 2).**" in text


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Ratio(1.414, 1.402, 1.425, 40), "1.41 times as fast (1.4 to 1.43)"),
        (Ratio(0.8, 0.75, 0.9, 40), "1.25 times as long (1.11 to 1.33)"),
        (Ratio(1.03, 0.99, 1.05, 40), "no faster or slower (0.99 to 1.05)"),
        (Ratio(1.4, 0.0, float("inf"), 5), "1.4 times as fast (in 5 laps alone)"),
        (Ratio(0.5, 0.0, float("inf"), 1), "2 times as long (in 1 lap alone)"),
    ],
)
def test_words_say_no_more_than_the_interval(ratio, words):
    # "flash was 1.4 times as fast" was said of a ratio that differed by as much from run to run
    assert report.in_words(ratio) == words


def test_the_title_names_the_headline_beside_the_baseline():
    ms = {"manual": [20.0] * 8, "flash": [10.0] * 8, "math": [40.0] * 8, "auto": [20.0, 20.1, 19.9] * 3}
    (found,) = report.findings_of([result(ms)], shown(headline=lambda result: ["flash", "math", "auto"]))
    assert found == (
        "flash is 2 times as fast as manual (2 to 2); math takes 2 times as long (2 to 2);"
        " auto is no faster or slower (0.995 to 1.01)"
    )
    assert report.findings_of([result(ms)], shown()) == ["flash is 2 times as fast as manual (2 to 2)"]  # the fastest
    assert report.findings_of([result({"manual": [1.0]})], shown()) == ["no ratio was measured"]


def test_the_title_over_an_axis_is_about_the_longest_with_a_ratio():
    # at the longest of all, manual may be out of memory
    results = [
        result(FASTER, {"pass": "forward", "T": 32}),
        result(FASTER, {"pass": "both", "T": 32}),
        result({"flash": [1.0] * 8}, {"pass": "both", "T": 64}, manual={"status": "out of memory", "reason": "full"}),
    ]
    results[0].laps[:] = [{"manual": 30.0, "flash": 10.0}] * 8
    (found,) = report.findings_of(results, shown(axis="T", axis_label="tokens"))
    assert found == "At 32 tokens: flash is 2 to 3 times as fast as manual (intervals from 2 to 3)"


def test_each_comparison_has_a_finding_of_its_own():
    results = [result(FASTER, {"part": "training"}), result(FASTER, {"part": "llama"})]
    said = "flash is 2 times as fast as manual (2 to 2)"
    assert report.findings_of(results, shown()) == [f"Training: {said}", f"Llama: {said}"]


def test_rows_that_lack_what_a_table_shows_are_one_sentence(tmp_path):
    missing = shown(columns=lambda result, name: {"loss": result.measured[name]["loss"]})
    with pytest.raises(UserError, match=r"no report can be drawn from .*KeyError: 'loss'\. Take a whole copy"):
        report.write(write(tmp_path, result(FASTER)), missing)


def test_mfu_is_of_one_peak_for_all():
    # each contender measures the peak itself, and a busy machine reaches less
    line = {"tokens": 1000, "flops_per_token": 1e6, "ran": {"dtype": "float32"}}
    found = result(
        {"manual": [10.0], "flash": [5.0]}, manual=line | {"peak_flops": 1e12}, flash=line | {"peak_flops": 4e11}
    )
    assert report.shares(found, "flash") == {"tokens/s": "200,000", "MFU": "20.0 %"}
    assert report.shares(found, "manual")["MFU"] == "10.0 %"


def test_how_a_contender_ran():
    seen = {"forward": ["flash"], "backward": ["flash"], "logits": [[50264, 50264]], "expanded": True}
    ran = {"attention": "flash", "dtype": "float32", "tf32": True, "compile": True, "padded_vocab_size": 50257}
    text = report.how_it_ran({"kernel": seen, "ran": ran})
    assert text.endswith("(flash, TF32, compiled, 50257 ids, padded by the compiler to 50264)")
    assert text.startswith("flash / flash, keys and values copied for each head")


def test_without_an_interval_none_is_drawn_or_claimed(tmp_path, monkeypatch):
    # rows of one lap had bars from 0 to twice the ratio, called a 95 % interval
    drawn, lines = [], figures.bars
    monkeypatch.setattr(figures, "bars", lambda result: drawn.append(lines(result)) or drawn[-1])
    report.write(write(tmp_path, result({"manual": [2.0], "flash": [1.0]})), shown())
    (axes,) = drawn[0].axes
    assert [len(line.get_xdata()) for line in axes.lines] == [1, 1, 2]  # two points, and the line at 1
    text = (tmp_path / "report.md").read_text()
    assert axes.get_xlabel() == "times as fast as manual" and "95 %" not in text and "- Too few laps for an" in text


def test_kernels_and_projects_keep_their_colours():
    assert figures.color("manual, eager") == figures.color("eager") == figures.color("manual")
    assert figures.color("cudnn + padded vocabulary") == figures.color("cudnn") != figures.color("flash")
    assert figures.color("auto + padded vocabulary", {"ran": {"attention": "flash"}}) == figures.color("flash")
    assert figures.color("Hugging Face, eager") == figures.color("Hugging Face, compiled") != figures.color("ours")
