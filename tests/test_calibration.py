"""A small calibration of verdicts on simulated studies; real runs, its rows and its figure."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from tests import calibration
from tests.calibration import (
    Settings,
    Trainer,
    added,
    at_looks,
    equal,
    intervals,
    pairing,
    planted,
    power,
    ranges,
    simulated,
)

pytestmark = pytest.mark.slow  # of thousands of studies; test_verdict.py has the numbers of single ones
COLUMNS = {"what", "data", "studies", "share", "low", "high"}


def almost_surely(studies, share):
    """The smallest and the largest share of `studies` that a true share makes likely: one in a thousand is outside."""
    return stats.binom.ppf([0.0005, 0.9995], studies, share) / studies


@pytest.mark.parametrize("row", [
    lambda: equal(300, 5, 1, "normal"),
    lambda: equal(300, 5, 1, "heavy tails"),
    lambda: equal(300, 2, 5, "counts"),
    lambda: equal(300, 3, 5, "counts"),
    lambda: equal(300, 5, 5, "counts"),
    lambda: at_looks(300, (5, 10), 1),
    lambda: added(300),
])  # fmt: skip
def test_equal_variants_differ_in_5_percent_of_studies_at_most(row):
    assert row()["share"] <= almost_surely(300, 0.05)[1]


@pytest.mark.parametrize("row", [lambda: intervals(300, 4), lambda: ranges(300, 3), lambda: ranges(300, 10)])
def test_intervals_and_ranges_hold_in_95_percent_of_studies(row):
    assert row()["share"] >= almost_surely(300, 0.95)[0]


@pytest.mark.parametrize("comparisons, of_smallest", [(1, 0.5), (1, 1.0), (5, 1.0)])
def test_a_planted_difference_is_found_as_often_as_promised(comparisons, of_smallest):
    row = planted(800, comparisons, of_smallest)
    least, most = almost_surely(800, row["promised"])
    assert least <= row["share"] and (row["share"] <= most or comparisons > 1)
    assert of_smallest < 1 or row["promised"] == pytest.approx(0.8)


def test_the_power_of_nothing_is_half_the_level():
    assert power(0.0, 1.0, 5, 1) == pytest.approx(0.025)  # on the right side; the other half is on the wrong one
    assert power(0.1, 1.0, 10**4, 1) == pytest.approx(1)


def test_a_simulated_pair_shares_an_effect_of_its_seed():
    values = simulated(np.random.default_rng(0), 4000, 2, gain=0.5)
    base, better, other = (np.array([*values[name].values()]) for name in "012")
    assert np.corrcoef(base, other)[0, 1] == pytest.approx(0.9, abs=0.02)  # 0.03² / (0.03² + 0.01²)
    assert (better - base).mean() == pytest.approx(-0.5, abs=0.001)
    assert (other - base).std() == pytest.approx(calibration.SPREAD, rel=0.05)


def test_what_pairing_is_worth():
    a, b = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.5, 2.0, 3.5, 4.0])
    row = pairing(a, b, 7, "rate")
    assert row["paired_se"] == pytest.approx(stats.sem(b - a))
    assert row["unpaired_se"] == pytest.approx(math.hypot(stats.sem(a), stats.sem(b)))
    assert row["ratio"] ** 2 * row["worth"] == pytest.approx(1) and row["pairs"] == 4 and row["iterations"] == 7


def test_real_runs_share_what_they_should(data):
    trainer = Trainer(str(data))
    base = trainer.loss(3)
    assert base < math.log(65) - 0.3 and base == trainer.loss(3)
    others = [trainer.loss(3, stream=1), trainer.loss(3, times=1.1), trainer.loss(4)]
    assert len({base, *others}) == 4
    # without a step, only the weights decide
    untrained = [trainer.loss(3, iterations=0), trainer.loss(3, stream=1, iterations=0), trainer.loss(4, iterations=0)]
    assert untrained[0] == untrained[1] != untrained[2]


def test_rows_and_figure(data, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "EQUAL", [(5, 1, "normal"), (5, 5, "normal")])
    monkeypatch.setattr(calibration, "LONGER", {20: 3})
    said = []
    s = Settings(str(tmp_path), studies=20, real=True, real_studies=2, dataset=str(data))
    calibration.main(s, said.append)
    header, *rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert header["what"] == "header" and header["environment"]["torch"] and list(map(json.loads, said)) == rows
    assert [row["what"] for row in rows if row["data"] == "real"] == [
        "equal", *["planted"] * 7, "unpaired", *["pairing"] * 3
    ]  # fmt: skip
    assert all(row.keys() >= COLUMNS and 0 <= row["low"] <= row["share"] <= row["high"] <= 1 for row in rows
               if row["what"] != "pairing")  # fmt: skip
    assert rows[-2]["differs"] == "learning rate" and 0 < rows[-2]["ratio"] < 1
    assert 20_000 < (tmp_path / "calibration.png").stat().st_size < 300_000
