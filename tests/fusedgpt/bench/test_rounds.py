"""Rounds: each counts for all contenders or for none, and ratios are drawn within them."""

import pytest

from fusedgpt.bench import rounds
from fusedgpt.bench.disturbance import speedup


def row(peer, n, ms, **more):
    found = {"peer": peer, "round": n, "status": "measured", "samples_ms": [ms, ms], "median_ms": ms}
    return found | {"p10_ms": ms, "p90_ms": ms, "peak_memory": 10 * n, "tokens_per_s": 1000 / ms} | more


LOUD = {"disturbed": True, "reason": "loud"}


def test_a_round_is_kept_or_dropped_for_all():
    # the second visits of all three others were dropped, none of ours: the one that is left decided who is faster
    rows = [row("ours", 1, 10.0), row("theirs", 1, 20.0), row("ours", 2, 10.0), row("theirs", 2, 90.0, **LOUD)]
    rows += [row("ours", 3, 40.0), row("theirs", 3, 60.0), {"peer": "gpu", "round": 3, "status": "refused"}]
    assert rounds.whole(rows, by="peer") == {1, 3}
    found = rounds.pooled(rows, by="peer")
    assert found["ours"]["rounds"] == {1: 10, 3: 40} and found["ours"]["dropped"] == {2: 10}
    assert found["ours"]["samples_ms"] == [10, 10, 40, 40] and found["ours"]["peak_memory"] == 30
    assert rounds.medians(found["theirs"]) == "20.0, (90.0), 60.0"
    # the machine was four times as slow in the last: medians of all samples would have said 1.6
    assert speedup(found["ours"], found["theirs"]) == (1.75, 1.5, 2.0)
    assert found["ours"]["tokens_per_s"] == pytest.approx(1000 / found["ours"]["median_ms"])


def test_a_round_that_lacks_a_contender_is_not_whole():
    rows = [row("ours", 1, 10.0), row("theirs", 1, 20.0), row("ours", 2, 10.0)]
    assert rounds.whole(rows, by="peer") == {1}


def test_without_a_whole_round_nothing_is_compared():
    found = rounds.pooled([row("ours", 1, 10.0), row("theirs", 1, 20.0, **LOUD)], by="peer")
    assert speedup(found["ours"], found["theirs"]) is None
    assert found["theirs"]["reason"] == "loud" and found["ours"]["reason"].startswith("no round is whole")


def test_a_contender_that_was_wrong_once_has_no_time():
    wrong = {"peer": "theirs", "round": 2, "status": "parity failed", "reason": "its loss"}
    found = rounds.pooled([row("ours", 1, 10.0), row("theirs", 1, 5.0), wrong], by="peer")
    assert found["theirs"] == wrong and found["ours"]["rounds"] == {1: 10}


def test_the_spread_of_a_single_round_is_that_of_its_samples():
    rows = [row("ours", 1, 10.0, p10_ms=9.2, p90_ms=10.8), row("theirs", 1, 20.0)]
    found = rounds.pooled(rows, by="peer")
    assert speedup(found["ours"], found["theirs"]) == pytest.approx((2.0, 20 / 10.8, 20 / 9.2))


def test_what_ran_is_that_of_each_round():
    # auto took flash in one round and blocked in the next, and the report named only the last over the times of both
    def auto(n, kernel, seen, **more):
        return row("auto", n, 10.0, ran={"attention": kernel, "dtype": "float32"}, kernel={"forward": [seen]}) | more

    found = rounds.pooled(
        [auto(1, "flash", "flash"), auto(2, "blocked", "unfused"), auto(3, "math", "math", **LOUD)], "peer"
    )
    assert found["auto"]["ran"] == {"attention": "flash or blocked", "dtype": "float32"}
    assert found["auto"]["kernel"] == {"forward": ["flash", "unfused"]}
    assert rounds.pooled([auto(1, "flash", "flash")] * 2, "peer")["auto"]["ran"]["attention"] == "flash"


def test_rounds_of_several_calls_are_named():
    # "in one run and in turn" was said of 20 rows of one call and 12 of a later one
    rows = [row("ours", 1, 1.0, call=1), row("theirs", 1, 1.0, call=2), row("ours", 2, 1.0, call=2)]
    assert rounds.calls(rows) == ["Round 1 was measured in 2 calls, not in one."]
    assert rounds.calls([row("ours", 1, 1.0)]) == []
    # a round that one call measured counted as two calls', because an earlier one had met the refusals
    refused = {"peer": "gpu", "round": 2, "status": "refused", "call": 1}
    assert rounds.calls([refused, row("ours", 2, 1.0, call=2)]) == []
