"""The figures of a study: which are drawn, and whether they show the numbers of the runs."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from fusedgpt.runs.style import COLOURS, SUFFIXES
from fusedgpt.studies import drawn, figures, outcomes
from fusedgpt.studies.verdict import Comparison
from tests.fusedgpt.studies import fakes
from tests.fusedgpt.studies.by_hand import EVERY, MS, TOKENS, renamed, study, three

ALL = ("curves_iterations", "curves_tokens", "curves_time", "differences", "settings", "importance")
ADAMW, MUON = "learning_rate=0.01,optimizer=adamw", "learning_rate=0.01,optimizer=muon"


@pytest.fixture
def results(tmp_path):
    return outcomes.read(three(tmp_path))


def axes_of(results, name="curves_iterations"):
    """The only axes of a figure."""
    return next(figure.axes[0] for each, figure in figures.draw(results) if each == name)


def titles(axes):
    """The title above axes, and the subtitle."""
    return [text.get_text().replace("\n", " ") for text in axes.figure.texts[:2]]


def grid(folder, means, **design):
    """A study of a full grid {(learning_rate, optimizer): mean of two seeds}."""
    variants = {f"learning_rate={a},optimizer={b}": {"learning_rate": a, "optimizer": b} for a, b in means}
    ends = dict(zip(variants, means.values()))
    losses = {name: {seed: [4.0, 3.0, end + (seed - 1.5) / 50] for seed in (1, 2)} for name, end in ends.items()}
    return outcomes.read(study(folder, variants, losses, **design))


MEANS = {(0.01, "adamw"): 2.0, (0.01, "muon"): 1.6, (0.02, "adamw"): 2.2, (0.02, "muon"): 2.0}


@pytest.mark.parametrize("drawn_first", [1, pytest.param(len(ALL), marks=pytest.mark.slow)])
def test_each_figure_is_whole_in_each_format(tmp_path, monkeypatch, drawn_first):
    every = figures.draw
    monkeypatch.setattr(figures, "draw", lambda results: itertools.islice(every(results), drawn_first))
    paths = figures.write(grid(tmp_path, MEANS), tmp_path)
    assert [path.name for path in paths] == [f"{name}{suffix}" for name in ALL[:drawn_first] for suffix in SUFFIXES]
    begins = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
    ends = {".png": b"IEND\xaeB`\x82", ".pdf": b"%%EOF", ".svg": b"</svg>"}
    for path in paths:
        raw = path.read_bytes()
        assert raw.startswith(begins[path.suffix]) and raw.rstrip().endswith(ends[path.suffix]), path
        assert b"/Type3" not in raw, path  # fonts that conferences refuse


def test_a_curve_is_the_mean_in_a_band_over_its_seeds(results):
    axes = axes_of(results)
    lines = {line.get_label().strip("\u200b"): line for line in axes.lines}
    adamw = lines["0.01, adamw (3 seeds)"]
    assert adamw.get_xdata().tolist() == [0, EVERY, 2 * EVERY] and adamw.get_color() == COLOURS[0]
    assert adamw.get_ydata() == pytest.approx([4.1, 3.2, 2.1])
    band = axes.collections[0].get_paths()[0].vertices
    assert {round(float(y), 6) for x, y in band if x == EVERY} == {3.0, 3.4}
    # the run that diverged is a line of its own, and does not change the mean of its variant
    assert lines["0.1, muon (1 seed)"].get_ydata() == pytest.approx([4.0, 2.4, 2.3])
    (stray,) = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert stray.get_ydata() == pytest.approx([4.1, 3.9, math.nan], nan_ok=True)
    assert "diverged" in [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert titles(axes)[0] == f"{MUON} ends lowest, at 1.9000" and titles(axes)[1].endswith("8 of 9 runs")


def test_the_axes_are_iterations_tokens_and_training_time(results):
    found = {axis: axes_of(results, f"curves_{axis}") for axis in ("tokens", "time")}
    ends = {axis: axes.lines[0].get_xdata()[-1] for axis, axes in found.items()}
    assert ends == {"tokens": 2 * EVERY * TOKENS, "time": 2 * EVERY * MS / 1e3}
    assert found["time"].get_xlabel() == "training time (seconds)"


def test_a_long_run_is_drawn_in_minutes(tmp_path):
    losses = {"a": {1: [4.0 / (n + 1) for n in range(150)]}}  # 149 times 50 steps of 20 ms
    axes = axes_of(outcomes.read(study(tmp_path, {"a": {"n_layer": 1}}, losses)), "curves_time")
    assert axes.get_xlabel() == "training time (minutes)"
    assert axes.lines[0].get_xdata()[-1] == pytest.approx(149 / 60)


def test_runs_of_unequal_length_end_where_they_end(tmp_path):
    # as with --minutes: cut to the shorter one, the curve would not end at the value of the verdict
    losses = {"a": {1: [4.0, 3.0, 2.0], 2: [4.0, 3.0, 2.5, 1.8]}}
    (curve,) = drawn.curves(outcomes.read(study(tmp_path, {"a": {"n_layer": 1}}, losses)))
    assert curve.mean == pytest.approx([4.0, 3.0, 1.9])
    assert curve.x["iterations"].tolist() == [0, EVERY, 2.5 * EVERY]


def test_differences_are_those_of_the_verdict(results):
    axes = figures.differences(results).axes[0]
    muon, _ = results.comparisons()
    whiskers = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_ydata()[0] in (0, 1)]
    whiskers = [tuple(line.get_xdata()) for line in whiskers if line.get_xdata()[0] != 0]  # without the line at 0
    assert whiskers == [(muon.low, muon.high)]  # a difference from a run that diverged has no interval
    points = {line.get_ydata()[0]: line for line in axes.lines if len(line.get_xdata()) == 1}
    assert points[0].get_xdata()[0] == pytest.approx(-0.2) and points[0].get_color() == COLOURS[6]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0.01, muon", "0.1, muon"]
    assert [text.get_text() for text in axes.texts] == ["−0.2000  better", "+1.2000  no difference found"]
    assert titles(axes)[0].startswith(f"1 of 2 variants is better than {ADAMW}: {MUON} by 0.2000")


def test_a_difference_from_a_stand_in_that_is_too_far_away_is_cut():
    near = [Comparison(f"v{n}", 3, -0.1, -0.2, 0.0, 0.05, 0.05, "no difference found", 1.0, 9) for n in range(3)]
    nan = math.nan
    far = Comparison("far", 3, 50.0, nan, nan, 0.01, 0.01, "worse", nan, None, stand_ins=1)
    low, high = drawn.extent([*near, far])
    assert -0.3 < low < -0.2 and 0.2 < high < 1
    alone = drawn.extent([far])
    assert alone[0] < 0 and alone[1] > 50
    # only stand-ins are cut: the main result of a study was pushed off its axis
    main = Comparison("main", 3, -50.0, -60.0, -40.0, 0.01, 0.01, "better", 1.0, 2)
    low, high = drawn.extent([*near, main])
    assert low < -60 and high > 0
    equal = Comparison("equal", 3, 0.0, 0.0, 0.0, 1.0, 1.0, "no difference found", 0.0, None)
    low, high = drawn.extent([equal])
    assert low < 0 < high


def test_a_loss_that_is_not_reached_is_said_but_its_curve_is_whole(tmp_path):
    losses = {"a": {s: [4.0, 3.0, 2.0] for s in (1, 2)}, "b": {s: [4.0, 3.5, 3.0] for s in (1, 2)}}
    variants = {"a": {"n_layer": 1}, "b": {"n_layer": 2}}
    results = outcomes.read(study(tmp_path, variants, losses, metric="tokens_to_loss", target_loss=2.5))
    assert [each.status for each in drawn.curves(results)] == ["finished"] * 2
    assert [text.get_text() for text in figures.differences(results).axes[0].texts] == ["+26,000  no difference found"]


@pytest.mark.parametrize(("ends", "title"), [
    ((1.9, 1.9, 2.0), "a and b end lowest, at 1.9000"),
    ((1.9, 1.9000001, 1.9), "3 variants end lowest, at 1.9000"),
    ((1.9, 1.9001, 2.0), "a ends lowest, at 1.9000"),
])  # fmt: skip
def test_a_tie_has_no_single_best(tmp_path, ends, title):
    variants = {name: {"n_layer": n} for n, name in enumerate("abc")}
    losses = {name: {1: [4.0, 3.0, end]} for name, end in zip(variants, ends)}
    results = outcomes.read(study(tmp_path, variants, losses))
    assert drawn.curves_title(results, drawn.curves(results)) == title


def test_each_run_that_diverged_has_a_cross(tmp_path):
    losses = {"a": {1: [4.0, 3.0, 2.0], 2: [4.0, 3.5, math.nan], 3: [4.0, math.nan, math.nan]}}
    axes = axes_of(outcomes.read(study(tmp_path, {"a": {"n_layer": 1}}, losses)))
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == [EVERY, 0]


def test_parallel_coordinates_lead_from_settings_to_the_value(tmp_path):
    results = grid(tmp_path, MEANS)
    axes = figures.settings(results, drawn.coordinates(results)).axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert [line.get_ydata().tolist() for line in lines][-1] == pytest.approx([0, 1, 0])  # the best: 0.01, muon
    worst = lines[0]
    assert list(worst.get_ydata()) == pytest.approx([1, 0, 1]) and worst.get_linewidth() < lines[-1].get_linewidth()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["learning_rate", "optimizer", "validation loss"]
    assert {"0.01", "0.02", "adamw", "muon", "1.6000", "2.2000"} <= {text.get_text() for text in axes.texts}
    assert titles(axes)[0] == f"The lowest mean, 1.6000, is that of {MUON}"


def test_a_variant_that_is_far_worse_does_not_squeeze_the_others(tmp_path):
    # a learning rate of 30 brought the loss to 100 million and back to 400: all others were one line at the bottom
    variants = {
        f"learning_rate={a},beta2={b}": {"learning_rate": a, "beta2": b} for a in (1, 2, 30) for b in (0.9, 0.99)
    }
    ends = dict(zip(variants, (2.0, 2.1, 2.2, 2.3, 400.0, 500.0)))
    losses = {name: {s: [4.0, 3.0 if end < 3 else 1e8, end + s / 100] for s in (1, 2)} for name, end in ends.items()}
    results = outcomes.read(study(tmp_path, variants, losses))
    low, high = drawn.loss_view(drawn.curves(results))
    assert low < 2 and 4 < high < 4.2
    assert drawn.cut_off(drawn.curves(results)) == "; values up to 1e+08 lie above"
    flat = np.full(3, 2.0)
    assert drawn.cut_off([dataclasses.replace(drawn.curves(results)[0], mean=flat, low=flat, high=flat)]) == ""
    value = drawn.coordinates(results)[-1]
    places = list(value.at.values())
    assert places[0] == 0 and places[4:] == [1, 1] and 0.2 < places[3] < 0.6
    assert value.ticks[2][1] == "≥ 3.2150"  # 2.015 is the best; the axis ends at six times the way to the usual 2.215
    assert places[3] == pytest.approx((2.3 - 2.0) / 1.2)


def test_importance_is_the_share_of_a_main_effect(tmp_path):
    # mean 1.95. By optimizer 2.1 and 1.8: 4 · 0.15² = 0.09; by rate 1.8 and 2.1: 0.09; in all 0.05² · 2 + 0.35² + 0.25²
    results = grid(tmp_path, MEANS)
    total = 2 * 0.05**2 + 0.35**2 + 0.25**2
    assert drawn.importance(results) == pytest.approx({"learning_rate": 0.09 / total, "optimizer": 0.09 / total})
    axes = figures.importance(results, drawn.importance(results)).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([100 * 0.09 / total] * 2)
    assert titles(axes)[0] == "learning_rate explains 47 % of the variance between the variants"


def test_importance_of_many_values_is_that_of_their_ranges():
    rng = np.random.default_rng(0)
    rates = rng.uniform(0, 1, 200)
    settings = {f"v{n}": {"rate": float(rate), "noise": float(rng.uniform())} for n, rate in enumerate(rates)}
    found = drawn.shares(settings, {f"v{n}": float(rate) for n, rate in enumerate(rates)})
    assert list(found) == ["rate", "noise"]
    assert 0.9 < found["rate"] < 0.97 and found["noise"] < 0.05  # four ranges explain 15/16 of a straight line


def test_importance_leaves_out_what_diverged(tmp_path):
    # one run of four that diverged explained all: the setting that it had looked like the one that counts
    results = grid(tmp_path, MEANS)
    (tmp_path / "outcomes.jsonl").write_text(
        (tmp_path / "outcomes.jsonl").read_text().replace('"finished"', '"diverged"', 1)
    )
    # 1.6, 2.2 and 2.0 are left: around their mean, squares add up to 0.56 / 3. Rates have 1.6, 2.1; optimizers 2.2, 1.8
    found = drawn.importance(outcomes.read(tmp_path))
    assert found == pytest.approx({"learning_rate": 0.5 / 0.56, "optimizer": 0.32 / 0.56})
    assert found != drawn.importance(results)
    subject = drawn.importance_subject(outcomes.read(tmp_path), found)
    assert "left out: 1 variant with a run that diverged" in subject and "share what they explain" in subject


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"x": 2, "y": 1}}, {"x"}),  # y is the same in all
        ({"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"x": 3, "y": 2}}, {"y"}),  # x tells all apart
        ({"a": {"x": True, "y": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 1}}, {"x", "y"}),  # True is not 1
    ],
)
def test_importance_leaves_out_what_explains_nothing_or_all(settings, expected):
    assert drawn.shares(settings, {"a": 1.0, "b": 2.0, "c": 4.0}).keys() == expected
    assert drawn.shares(settings, dict.fromkeys("abc", 1.0)) == {}
    assert drawn.shares(settings, dict.fromkeys("abc", math.nan)) == {}


def test_figures_that_make_no_sense_are_left_out(tmp_path):
    one_setting = {"a": {"n_layer": 1}, "b": {"n_layer": 2}}
    fall = {seed: [4.0, 3.0, 2.0 + seed] for seed in (1, 2)}
    cases = {
        "one setting": (one_setting, {"a": fall, "b": fall}, ALL[:4]),
        "one seed": (one_setting, {name: {1: fall[1]} for name in "ab"}, ALL[:3]),
        "alone": ({"a": {}}, {"a": fall}, ALL[:3]),
        "none": (one_setting, {name: {1: None} for name in "ab"}, ()),
    }
    for case, (variants, losses, expected) in cases.items():
        results = outcomes.read(study(tmp_path / case, variants, losses))
        with fakes.blank_figures():
            assert tuple(name for name, _ in figures.draw(results)) == expected, case


def test_with_many_variants_the_best_have_colours(tmp_path):
    means = {(rate, name): 2 + rate for rate in range(1, 9) for name in ("adamw", "muon")}
    results = grid(tmp_path, means, baseline="learning_rate=8,optimizer=muon")
    mine = drawn.coloured(results)
    assert len(mine) == len(COLOURS) == len({*mine.values()})
    assert {"learning_rate=8,optimizer=muon", "learning_rate=1,optimizer=adamw"} <= mine.keys()
    assert "learning_rate=7,optimizer=adamw" not in mine
    axes = axes_of(results)
    assert sum(line.get_color() == figures.OTHERS for line in axes.lines) == 16 - 7


def test_names_with_dollars_and_underscores_are_drawn_as_they_are(tmp_path, monkeypatch):
    # $ begins a formula, and a legend leaves out names that begin with _
    losses = {name: {seed: [4.0, 3.0, 2.0 + seed] for seed in (1, 2)} for name in "ab"}
    results = outcomes.read(study(tmp_path, {"a": {"n_layer": 1}, "b": {"n_layer": 2}}, losses))
    results = renamed(results, {"a": "_a$x$", "b": r"b\frac{"})
    monkeypatch.setattr(figures, "SUFFIXES", (".svg",))
    assert len(figures.write(results, tmp_path)) == 4
    texts = axes_of(results).figure.legends[0].get_texts()
    assert [text.get_text().strip("\u200b") for text in texts] == [r"_a\$x\$ (2 seeds)", "b\\frac{ (2 seeds)"]
