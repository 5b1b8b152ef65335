"""Sentences, tables and the figure of a study, from studies that are made by hand."""

import csv
import json
import math
import shutil

import numpy as np
import pytest
from scipy import stats

from fusedgpt.errors import UserError
from fusedgpt.machine.files import atomic
from fusedgpt.studies import outcomes, study_report
from tests.fusedgpt.studies.test_outcomes import study, three


def one(folder, *shifts, **how):
    """A study of four seeds with a baseline, and variants whose losses differ from it by about `shifts`."""
    names = ["base", "other", "more"][: 1 + len(shifts)]
    losses = {name: {s: [4.0, 2.0 + s / 10] for s in range(1, 5)} for name in names}
    rng = np.random.default_rng(1)
    for name, shift in zip(names[1:], shifts):
        for s, more in enumerate(rng.normal(0, 0.003, 4), 1):
            losses[name][s][-1] += shift + more
    return outcomes.read(study(folder, losses, **how))


def test_a_sentence_has_difference_interval_p_and_time(tmp_path):
    times = {"base": {"ms": 20.0}, "other": {"ms": 21.6, "times": 1.08, "low": 1.07, "high": 1.09}}
    results = one(tmp_path, -0.05, times=times)
    (c,), (said,) = results.comparisons, study_report.sentences(results)
    low, high = (study_report.number(each) for each in (c.low, c.high))
    assert said.startswith(
        f"other is better than base: val_loss {study_report.number(c.mean)} (95 % interval {low} to {high}, 4 seeds, p "
    )
    assert said.endswith("; a step takes 1.08 times (1.07 to 1.09) as long")


def test_no_difference_says_what_the_seeds_find(tmp_path):
    results = one(tmp_path, 0.0, matters=0.1)
    (said,) = study_report.sentences(results)
    assert said.startswith("no difference found between other and base: val_loss ")
    low, high = results.comparisons[0].found
    assert f"; 4 seeds find {study_report.number(low)} to {study_report.number(high)} in 80 % of studies" in said
    assert "; surely less than --matters=0.1; " in said


def test_what_is_not_decided_says_why(tmp_path):
    for other, why in [
        ({1: [4.0, math.nan], 2: [4.0, math.nan]}, "other diverged with 2 of 2 seeds"),
        ({1: [4.0, 2.0], 2: None}, "runs of the first 2 seeds are missing"),
        ({1: [4.0, 2.0]}, "one seed decides nothing"),
    ]:
        results = outcomes.read(study(tmp_path, {"base": {seed: [4.0, 2.0] for seed in other}, "other": other}))
        assert study_report.sentences(results) == [f"no verdict on other: {why}"]


def test_exploratory_is_said_everywhere(tmp_path):
    times = {"base": {"ms": 20.0, "times": 2.0, "low": 1.9, "high": 2.1}, "other": {"ms": 10.0}}
    results = one(tmp_path, -0.05, times=times, planned=[], changes=["the variant other was added"])
    said = study_report.sentences(results)[0]
    assert said.startswith("exploratory, because it was not planned: other is better")
    # after another baseline was named, ratios to the old one were printed as ratios to the new one
    assert "as long" not in said and study_report.rows(results)[1]["ms"] == 10.0
    assert study_report.cells(results)[1][-1] == "exploratory: better"
    assert results.warnings()[0] == "after the first run, the variant other was added"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A study's folder with its report, and the results."""
    folder = three(tmp_path_factory.mktemp("studies") / "three & <more>")
    results = outcomes.read(folder)
    study_report.write(results, study_report.sentences(results))
    return folder, results


def test_the_table_is_that_of_scipy_and_numpy(written):
    folder, _ = written
    base, muon = ([2.0, 2.1, 2.2], [1.8, 1.91, 1.99])
    with open(folder / "table.csv", newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    row = rows["learning_rate=0.01,optimizer=muon"]
    found = [float(row[name]) for name in ("mean", "sd", "difference", "p", "ms", "seconds")]
    p = 2 * stats.ttest_rel(muon, base).pvalue  # two were planned
    assert found == pytest.approx([np.mean(muon), np.std(muon, ddof=1), -0.2, p, 20.0, 2.0])
    assert row["verdict"] == "better" and rows["learning_rate=0.01,optimizer=adamw"]["difference"] == ""
    assert "| `learning_rate=0.01,optimizer=adamw` |" in (folder / "table.md").read_text()


def test_every_output_has_the_method_and_the_warnings_and_what_a_second_person_needs(written):
    # warnings reached the page and verdict.json, not the tables and figures that go into a paper
    folder, results = written
    for name in ("table.md", "verdict.json"):
        text = (folder / name).read_text()
        assert "by Student's t test" in text and "1 of 3 runs diverged" in text, name
    figure = study_report.differences(results)
    assert any("1 of 3 runs diverged" in text.get_text() for text in figure.texts)
    (axes,) = figure.axes
    names = ["a=1+b=2,c=3", "a=1+b=5,c=3", "a=1"]  # which were cut off before they differed
    assert study_report.labels(names) == ["b=2 c=3", "b=5 c=3", "a=1"]
    interval = next(line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 2.2)
    assert list(interval.get_xdata()) == [results.comparisons[0].low, results.comparisons[0].high]
    found = json.loads((folder / "verdict.json").read_text(), parse_constant=pytest.fail)
    for name in ("command", "method", "level", "seeds", "looks", "commit", "device", "code", "settings"):
        assert found[name], name
    assert found["data"]["shakespeare_char/train"] == "da7a"
    assert [c["p"] is None for c in found["comparisons"]] == [False, True]  # null where there is no verdict


def test_studies_side_by_side_share_rows(tmp_path):
    small, large = one(tmp_path / "small", 0.05, -0.05), one(tmp_path / "large", 0.02)
    figure = study_report.differences(small, large)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["more", "other"]  # the best first
    at = {a.get_title(): [line.get_ydata()[0] for line in a.lines if line.get_marker() in "oX"] for a in figure.axes}
    assert at == {"small": [1, 0], "large": [1]}
    assert study_report.side_by_side([small.folder, large.folder]) == tmp_path / "differences.png"
    with pytest.raises(UserError, match="another baseline"):
        study_report.side_by_side([small.folder, one(tmp_path / "third", 0.1, baseline="other").folder])


def test_a_report_is_equal_to_the_byte(written, tmp_path):
    # `study.py report` on a published folder, which has no runs/, replaced the verdict by nothing
    folder, results = written
    for name in ("study.json", "outcomes.jsonl"):
        shutil.copy(folder / name, tmp_path)
    with atomic(tmp_path / "table.md"):  # of a worker that ends now too: one of the two ended in "cannot write"
        study_report.write(outcomes.read(tmp_path), study_report.sentences(results))
    study_report.write(outcomes.read(tmp_path), study_report.sentences(results))
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir()) and "differences.pdf" in names
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name
    assert b"CreationDate" not in (folder / "differences.pdf").read_bytes()
