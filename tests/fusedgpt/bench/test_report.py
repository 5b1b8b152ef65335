"""report.md and figures: one look for all kinds, and titles that say no more than intervals do."""

import json

import pytest

from fusedgpt.bench import figures, peers, report
from fusedgpt.bench.report import Shown
from tests.fusedgpt.bench.small import result

HEADER = {"benchmark": "ladder", "command": "python bench.py ladder", "settings": {"n_layer": 2}, "set": ["n_layer"]}
HEADER |= {"environment": {"device": "a CPU", "torch": "2.13", "threads": 2}}
FASTER = {"manual": [20.0, 22.0] * 5, "flash": [10.0, 11.0] * 5}
REFUSED = {"status": "refused", "reason": "on GPUs only"}


def shown(*headline):
    return Shown("Training", "ms per step", headline, lambda result, name: {"more": name.upper()}, lambda _: ["a note"])


def write(folder, *results):
    """The folder of a benchmark with these results."""
    lines = [{"kind": "header", **HEADER}]
    for each in results:
        about = {"workload": each.workload}
        for line in each.contenders.values():
            lines.append({"kind": "contender", **about, "baseline": each.baseline, **line})
        lines += [{"kind": "lap", **about, "ms": lap} for lap in each.laps]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.usefixtures("drawn")
def test_rows_alone_make_a_report_and_a_figure(tmp_path):
    paths = report.write(write(tmp_path, result(FASTER, cudnn=REFUSED)), shown())
    assert [path.name for path in paths] == ["report.md", "ladder.png", "ladder.svg"]
    assert all(path.stat().st_size > 500 for path in paths) and (tmp_path / "ladder.png").stat().st_size < 300_000
    text = (tmp_path / "report.md").read_text()
    for said in (
        "- **flash is 2 (2 to 2) times as fast as manual.**",
        "| flash | 10.5 (10 to 11) | 2 (2 to 2) | FLASH |",
        "| manual | 21 (20 to 22) |  | MANUAL |",
        "- refused: cudnn: on GPUs only",
        "a CPU, PyTorch 2.13, threads: 2; commit abc, 2026-11-27",
        "n_layer 2",
        "- a note",
    ):
        assert said in text


def test_a_figure_names_who_failed_parity():
    # a figure without the kernel looked as if there had been none
    wrong = {"status": "parity failed", "reason": "largest error 73"}
    made = [result(FASTER, flex=wrong, cudnn=REFUSED), result(FASTER, flex=wrong)]
    header = {"settings": {"n_layer": 2}, "set": []}
    assert report._subject(header, shown(), made).endswith("n_layer 2; parity failed: flex")
    assert "parity" not in report._subject(header, shown(), [result(FASTER, cudnn=REFUSED)])
    # a figure of nanoGPT's recipe, of 4 layers, had the sizes of GPT-2 124M
    recipe = result(FASTER, workload={"part": "recipe"})
    assert "n_layer" not in report._subject(header | {"set": []}, peers.SHOWN, [recipe])


@pytest.mark.usefixtures("drawn")
def test_over_lengths_there_is_a_line_for_each_and_a_column_for_each_contender(tmp_path):
    long, short = result(FASTER, {"heads": "2x8", "T": 64}), result(FASTER, {"heads": "2x8", "T": 32}, cudnn=REFUSED)
    report.write(write(tmp_path, long, short), shown())
    text = (tmp_path / "report.md").read_text()
    assert "## 2x8" in text and "| tokens | manual | flash |" in text
    assert "| 32 | 21 | 10.5; 2 (2 to 2) |\n| 64 | 21 | 10.5; 2 (2 to 2) |" in text
    assert "- **At 64 tokens flash is 2 to 2 times as fast as manual.**" in text
    # without a ratio there is nothing to draw, and no logarithm of it
    report.write(write(tmp_path, result({"manual": [1.0]}, {"T": 64})), shown())
    assert "- **No ratio was measured.**" in (tmp_path / "report.md").read_text()


def test_the_title_names_the_fastest_of_the_headline():
    ms = {"ours": [2.0] * 6, "ours, compiled": [1.0] * 6, "Hugging Face, eager": [4.0] * 6}
    ms |= {"Hugging Face, compiled": [3.0] * 6, "nanoGPT, eager": [8.0] * 6}
    made = result(ms, {"part": "training"}, baseline="ours")
    said = "training: Hugging Face, compiled is 0.6667 (0.6667 to 0.6667) times as fast as ours; nanoGPT, eager is 0.25"
    assert report.finding(made, shown("Hugging Face", "nanoGPT")).startswith(said)
    assert report.finding(made, shown("flash")).startswith("training: ours, compiled is 2 (2 to 2)")  # no flash
    assert report.finding(result({"manual": [1.0]}), shown()) == "no ratio was measured"


def test_the_title_over_lengths_is_about_the_longest_with_a_ratio_and_names_whole_intervals():
    # at the longest of all, manual may be out of memory
    results = [
        result({"manual": [30.0] * 8, "flash": [10.0, 15.0] * 4}, {"pass": "forward", "T": 32}),
        result(FASTER, {"pass": "both", "T": 32}),
        result({"flash": [1.0] * 8}, {"pass": "both", "T": 64}, manual={"status": "out of memory", "reason": "full"}),
    ]
    assert report.finding_over_lengths(results, shown()) == "At 32 tokens flash is 2 to 3 times as fast as manual"
    few = [result({"manual": [3.0], "flash": [1.0]}, {"T": 32})]
    assert report.finding_over_lengths(few, shown()).startswith("At 32 tokens flash is, in few laps, 3 to 3 times")


def test_mfu_is_of_one_peak_for_all():
    # each contender measures the peak itself, and a busy machine reaches less
    line = {"tokens": 1000, "flops_per_token": 1e6, "ran": {"dtype": "float32"}}
    lines = {"manual": line | {"peak_flops": 1e12}, "flash": line | {"peak_flops": 4e11}}
    found = result({"manual": [10.0], "flash": [5.0]}, **lines)
    assert report.shares(found, "flash") == {"tokens/s": "200,000", "MFU": "20.0 %"}
    assert report.shares(found, "manual")["MFU"] == "10.0 %"


def test_how_a_contender_ran():
    seen = {"forward": ["flash"], "backward": ["flash"], "logits": [[50264, 50264]]}
    ran = {"attention": "flash", "dtype": "float32", "tf32": True, "compile": True, "padded_vocab_size": 50257}
    text = report.how_it_ran({"kernel": seen, "ran": ran})
    assert text.startswith("flash / flash (flash, TF32, compiled, 50257 ids, padded by the compiler to 50264)")


def test_without_an_interval_none_is_drawn_or_claimed(tmp_path):
    # rows of one lap had bars from 0 to twice the ratio, called a 95 % interval
    made = result({"manual": [2.0], "flash": [1.0]})
    (axes,) = figures.bars(made).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [1, 2]  # a point, and the line at 1
    assert axes.get_xlabel() == "times as fast as manual"
    assert report.finding(made, shown()) == "flash is 2 (in 1 lap alone) times as fast as manual"


def test_kernels_and_projects_keep_their_colours():
    assert figures.color("manual, eager") == figures.color("eager") == figures.color("manual")
    assert figures.color("cudnn + padded vocabulary") == figures.color("cudnn") != figures.color("flash")
    assert figures.color("auto + padded vocabulary", {"ran": {"attention": "flash"}}) == figures.color("flash")
    assert figures.color("Hugging Face, eager") == figures.color("Hugging Face, compiled") != figures.color("ours")
