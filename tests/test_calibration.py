"""A small calibration of verdicts on simulated studies, and its rows."""

import json

import numpy as np
import pytest
from scipy import stats

from tests import calibration
from tests.calibration import added, at_looks, equal, intervals, planted, ranges, simulated

pytestmark = pytest.mark.slow  # of thousands of studies; test_verdict.py has the numbers of single ones


def almost_surely(studies, share):
    """The smallest and the largest share of `studies` that a true share makes likely: one in a thousand is outside."""
    return stats.binom.ppf([0.0005, 0.9995], studies, share) / studies


@pytest.mark.parametrize("row", [
    lambda: equal(300, 5, 1, "normal"),
    lambda: equal(300, 5, 1, "heavy tails"),
    lambda: equal(300, 2, 5, "counts"),
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


def test_a_simulated_pair_shares_an_effect_of_its_seed():
    values = simulated(np.random.default_rng(0), 4000, 2, gain=0.5)
    base, better, other = (np.array([*values[name].values()]) for name in "012")
    assert np.corrcoef(base, other)[0, 1] == pytest.approx(0.9, abs=0.02)  # 0.03² / (0.03² + 0.01²)
    assert (better - base).mean() == pytest.approx(-0.5, abs=0.001)
    assert (other - base).std() == pytest.approx(calibration.SPREAD, rel=0.05)


def test_the_rows_are_written(tmp_path):
    said = []
    calibration.main(calibration.Settings(str(tmp_path), studies=5), said.append)
    header, *rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert header["what"] == "header" and header["environment"]["torch"] and list(map(json.loads, said)) == rows
    assert all(0 <= row["low"] <= row["share"] <= row["high"] <= 1 for row in rows)
