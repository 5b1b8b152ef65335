"""What reports and titles say of ratios: faster, slower, or no difference if the spread hides it."""

import pytest

from fusedgpt.bench import report


def row(ms, low=None, high=None, **more):
    return {"status": "measured", "median_ms": ms, "p10_ms": low or 0.99 * ms, "p90_ms": high or 1.01 * ms} | more


BASE = row(100.0)


@pytest.mark.parametrize(
    ("mine", "noise", "beside", "ratio", "time"),
    [
        (row(80.0), 0, "1.25 times as fast", "1.25x", "80 ms, 1.25 times as fast"),
        (row(220.0), 0, "2.2 times as long", "2.20x as long", "220 ms, 2.2 times as long"),
        (row(95.0), 0.1, "no difference", "1.05x", "95 ms, no difference"),
        (row(95.0, 80, 110), 0, "no difference", "1.05x", "95 ms, no difference"),
        (row(80.0, disturbed=True), 0, "None", "", "80 ms"),
        (BASE, 0, "no difference", "", "100 ms"),
    ],
)
def test_a_row_beside_its_base(mine, noise, beside, ratio, time):
    # a slower row read -54.6 %, and a gain within the noise looked like one
    assert str(report.beside(mine, BASE, noise)) == beside
    clauses = {"None": None, "no difference": "shows no difference from it beyond the noise"}
    verb = "is" if beside.endswith("fast") else "takes"
    assert report.clause([(mine, BASE)], "it", noise) == clauses.get(beside, f"{verb} {beside} as it")
    assert report.ratio(mine, BASE) == ratio
    assert report.time(mine, BASE, noise) == time


def test_several_rows_are_one_clause():
    fast, faster, slow, same = row(80.0), row(50.0), row(125.0), row(100.5)

    def said(*rows):
        return report.clause([(each, BASE) for each in rows], "it")

    assert said(fast, faster) == "is 1.25 to 2 times as fast as it"
    assert said(fast, faster, same) == "is up to 2 times as fast as it"
    assert said(fast, slow) == "is up to 1.25 times as fast and takes up to 1.25 times as long as it"
    assert said(slow, row(150.0)) == "takes 1.25 to 1.5 times as long as it"
    assert said() is None and report.clause([(fast, None)], "it") is None


def test_the_times_of_rounds_are_the_means_of_their_ratios():
    rounds = row(60.0, rounds={1: 50.0, 2: 100.0}), row(110.0, rounds={1: 100.0, 2: 150.0})
    assert report.ratio(*rounds, spread=True) == "1.75x (1.50-2.00)"
    assert report.ratio(*rounds[::-1], spread=True) == "1.75x as long (1.50-2.00)"
    assert str(report.beside(*rounds)) == "1.75 times as fast"


def test_why_a_row_has_no_ratio():
    refused = {"status": "refused", "reason": "GPUs only"}
    assert [report.why_not(each) for each in (None, refused, row(1.0, disturbed=True))] == [
        "not measured",
        "refused",
        "disturbed",
    ]
