"""A small calibration of verdicts on simulated studies, and its rows."""

import json

import pytest
from scipy import stats

from tests import calibration

pytestmark = pytest.mark.slow  # of thousands of studies; test_verdict.py has the numbers of single ones


def almost_surely(studies, share):
    """The smallest and the largest share that a true share makes likely: one in ten thousand is outside."""
    return stats.binom.ppf([0.00005, 0.99995], studies, share) / studies


def test_each_row_keeps_what_a_verdict_promises(tmp_path):
    said = []
    calibration.main(calibration.Settings(str(tmp_path), studies=200), said.append)
    header, *rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert header["what"] == "header" and header["environment"]["torch"] and list(map(json.loads, said)) == rows
    assert {row["what"] for row in rows} == {"equal", "looks", "added", "intervals", "range", "planted"}
    for row in rows:
        least, most = almost_surely(200, row.get("promised", 0.95))
        if row["what"] in ("equal", "looks", "added"):
            assert row["share"] <= almost_surely(200, 0.05)[1], row
        else:
            assert row["share"] >= least and (row["share"] <= most or row.get("comparisons") != 1), row
        assert row["low"] <= row["share"] <= row["high"]
        assert row.get("of_smallest") != 1 or row["promised"] == pytest.approx(0.8)
