"""Sentences, tables, figures and the page of a study, from studies that are made by hand."""

import csv
import json
import math
import re
import shutil

import numpy as np
import pytest
from scipy import stats

from fusedgpt.studies import figures, outcomes, report, words
from tests.fusedgpt.studies import by_hand
from tests.fusedgpt.studies.by_hand import study


def one(folder, shift, seeds=4, spread=0.003, **how):
    """A study of two variants whose losses differ by about `shift`."""
    noise = np.random.default_rng(1).normal(0, spread, seeds)
    losses = {name: {s: [4.0, 2.0 + s / 10] for s in range(1, seeds + 1)} for name in ("base", "other")}
    for s, more in enumerate(noise, 1):
        losses["other"][s][-1] += shift + more
    return outcomes.read(study(folder, losses, **how))


def test_a_sentence_has_difference_interval_p_and_time(tmp_path):
    times = {"base": {"ms": 20.0}, "other": {"ms": 21.6, "times": 1.08, "low": 1.07, "high": 1.09, "laps": 30}}
    results = one(tmp_path, -0.05, times=times)
    (c,), (said,) = results.comparisons, words.sentences(results)
    low, high = (words.number(each) for each in (c.low, c.high))
    assert said.startswith(
        f"other is better than base: val_loss {words.number(c.mean)} (95 % interval {low} to {high}, 4 seeds, p "
    )
    assert "; a step takes 1.08 times (1.07 to 1.09) as long; to find half of this difference takes " in said
    assert words.headline(results) == f"other is better than base by {words.number(-c.mean)} (validation loss)"


def test_no_difference_says_what_the_seeds_find(tmp_path):
    results = one(tmp_path, 0.0, matters=0.1)
    (said,) = words.sentences(results)
    assert said.startswith("no difference found between other and base: val_loss ")
    low, high = results.comparisons[0].found
    assert f"; 4 seeds find {words.number(low)} to {words.number(high)} in 80 % of studies" in said
    assert "; surely less than --matters=0.1; " in said
    assert words.headline(results) == "No difference from base was found"


def test_what_is_not_decided_says_why(tmp_path):
    losses = {"base": {1: [4.0, 2.0], 2: [4.0, 2.1]}, "other": {1: [4.0, math.nan], 2: [4.0, math.nan]}}
    results = outcomes.read(study(tmp_path / "a", losses))
    assert words.headline(results) == "No verdict on what was planned"
    assert words.sentences(results) == ["no verdict on other: other diverged with 2 of 2 seeds"]
    results = outcomes.read(study(tmp_path / "b", losses | {"other": {1: [4.0, 2.0], 2: None}}))
    assert words.sentences(results) == ["no verdict on other: runs of the first 2 seeds are missing"]
    results = outcomes.read(study(tmp_path / "c", {name: {1: [4.0, 2.0]} for name in ("base", "other")}))
    assert words.sentences(results) == ["no verdict on other: one seed decides nothing"]


def test_exploratory_is_said_everywhere(tmp_path):
    times = {"base": {"ms": 20.0, "times": 2.0, "low": 1.9, "high": 2.1}, "other": {"ms": 10.0}}
    results = one(tmp_path, -0.05, times=times, planned=[], changes=["the variant other was added"])
    said = words.sentences(results)[0]
    assert said.startswith("exploratory, because it was not planned: other is better")
    # after another baseline was named, ratios to the old one were printed as ratios to the new one
    assert "as long" not in said and report.rows(results)[1]["ms"] == 10.0
    assert report.cells(results)[1][-1] == "exploratory: better"
    assert results.warnings()[0] == "after the first run, the variant other was added"


def test_the_table_is_that_of_scipy_and_numpy(tmp_path):
    results = outcomes.read(by_hand.three(tmp_path))
    base, muon = ([2.0, 2.1, 2.2], [1.8, 1.91, 1.99])
    expected = stats.ttest_rel(muon, base)
    rows = {row["variant"]: row for row in report.rows(results)}
    row = rows["learning_rate=0.01,optimizer=muon"]
    assert row["mean"] == pytest.approx(np.mean(muon)) and row["sd"] == pytest.approx(np.std(muon, ddof=1))
    assert row["difference"] == pytest.approx(-0.2) and row["p"] == pytest.approx(2 * expected.pvalue)  # two planned
    assert (row["ms"], row["seconds"], row["verdict"]) == (20.0, 2.0, "better")
    assert math.isnan(rows["learning_rate=0.01,optimizer=adamw"]["difference"])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A study's folder with its report, and the results."""
    folder = by_hand.three(tmp_path_factory.mktemp("studies") / "three & <more>")
    results = outcomes.read(folder)
    report.write(results, words.sentences(results))
    return folder, results


def test_every_output_has_the_method_and_the_warnings(written):
    # warnings reached the page and verdict.json, not the tables and figures that go into a paper
    folder, results = written
    for name in ("table.md", "table.tex", "verdict.json", "study.html"):
        text = (folder / name).read_text()
        assert "by Student's t test" in text.replace("&#x27;", "'"), name
        assert "1 of 3 runs diverged" in text, name
    figure = dict(figures.draw(results))["differences"]
    assert any("1 of 3 runs diverged" in text.get_text() for text in figure.texts)


def test_the_verdict_has_what_a_second_person_needs(written):
    folder, _ = written
    found = json.loads((folder / "verdict.json").read_text(), parse_constant=pytest.fail)
    for name in ("command", "method", "level", "seeds", "looks", "commit", "device", "code", "settings"):
        assert found[name], name
    assert found["data"]["shakespeare_char/train"] == "da7a"
    assert [c["p"] is None for c in found["comparisons"]] == [False, True]  # null where there is no verdict


def test_a_report_is_equal_to_the_byte(written, tmp_path):
    # `study.py report` on a published folder, which has no runs/, replaced the verdict by nothing
    folder, results = written
    again = tmp_path / "another folder"
    again.mkdir()
    for name in ("study.json", "outcomes.jsonl"):
        shutil.copy(folder / name, again)
    report.write(outcomes.read(again), words.sentences(results))
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in again.iterdir()) and "differences.pdf" in names
    for name in names:
        assert (folder / name).read_bytes() == (again / name).read_bytes(), name


def test_tables_are_read_by_programs(written):
    folder, _ = written
    with open(folder / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert next(row["variant"] for row in rows) == "learning_rate=0.01,optimizer=adamw"
    assert float(rows[1]["difference"]) == pytest.approx(-0.2) and rows[0]["p"] == ""
    tex = (folder / "table.tex").read_text()
    assert r"learning\_rate=0.01" in tex and r"\toprule" in tex
    assert all(line.startswith("%") or "%" not in line.replace(r"\%", "") for line in tex.splitlines())
    assert "| `learning_rate=0.01,optimizer=adamw` |" in (folder / "table.md").read_text()


def test_the_page_loads_nothing(written):
    folder, _ = written
    page = (folder / "study.html").read_text()
    assert "A study of learning_rate, optimizer" in page and page.count("<svg") == 2
    assert not re.findall(r"(?:src|href)=[\"'](?!data:|#)", page)


def test_the_figures_show_the_verdict(written):
    _, results = written
    drawn = dict(figures.draw(results))
    assert list(drawn) == ["curves_iterations", "differences"]
    (axes,) = drawn["differences"].axes
    interval = next(line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 2.2)
    c = results.comparisons[0]
    assert list(interval.get_xdata()) == [c.low, c.high]
    (axes,) = drawn["curves_iterations"].axes
    assert list(axes.lines[1].get_ydata())[1:] == pytest.approx([2.7, 1.9])  # the means of three seeds


def test_the_headline_names_the_best_of_several(tmp_path):
    losses = {name: {s: [4.0, 2.0 + s / 10 + less + s % 3 / 1000] for s in range(1, 7)} for name, less in
              {"base": 0.0, "good": -0.1, "better still": -0.3, "bad": 0.2}.items()}  # fmt: skip
    for s in range(1, 7):
        losses["base"][s][-1] -= s % 2 / 500
    results = outcomes.read(study(tmp_path, losses))
    assert words.headline(results).startswith("better still is better than base by 0.299")
