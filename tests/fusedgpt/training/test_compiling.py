"""When a run on a CPU compiles: by cost and gain, cautious as long as these are unknown."""

import pytest

from fusedgpt.errors import UserError
from fusedgpt.machine.choices import Choices
from fusedgpt.training import compiling

KNOWN = {"eager_ms": 120.0, "compiled_ms": 100.0, "cold_s": 24.0, "warm_s": 3.0}  # saves a sixth
CASE, COST = {"model": "a"}, {"for": "cost of compiling", "model": "a"}


@pytest.fixture(autouse=True)
def cached(monkeypatch, tmp_path):
    """The file that says that graphs are cached."""
    monkeypatch.setattr(compiling, "_marker", lambda case: tmp_path / "marker")
    return tmp_path / "marker"


def attempt_of(found, calls):
    def attempt(compare, before):
        calls.append(compare)
        if isinstance(found, Exception):
            raise found
        return dict(found) if compare else {n: v for n, v in found.items() if not n.endswith("_ms")}

    return attempt


COLD = {"compile_s": 25.0, "was_cached": False, "eager_ms": 120.0, "compiled_ms": 100.0}


def decide(seconds, found=COLD, again=False, calls=None, **length):
    attempt = attempt_of(found, [] if calls is None else calls)
    return compiling.decide(Choices(again), CASE, {"calls": 9, **length}, seconds, 4, attempt)


@pytest.mark.parametrize(
    ("costs", "cached", "seconds", "pays"),
    [
        (KNOWN, False, 24 * 6 * compiling.MARGIN * 0.99, False),
        (KNOWN, False, 24 * 6 * compiling.MARGIN * 1.01, True),
        (KNOWN, True, 3 * 6 * compiling.MARGIN * 0.99, False),
        (KNOWN, True, 3 * 6 * compiling.MARGIN * 1.01, True),
        (KNOWN | {"compiled_ms": 121.0}, True, 1e9, False),  # it gains nothing here
        ({}, False, 60.0, False),
        ({}, False, 3600.0, True),
    ],
)
def test_compiling_pays_if_it_saves_more_than_it_costs(costs, cached, seconds, pays):
    # half an hour was the bound for every model, whatever it gained, and though graphs were cached
    found = compiling.weigh(costs, cached, seconds, layers=4)
    assert found["pays"] is pays and (found["saves_s"] > found["cost_s"]) >= pays


def test_a_run_that_compiles_measures_and_the_next_one_knows(cached):
    calls = []
    first = decide(1e4, calls=calls)
    assert first["compile"] and calls == [True] and cached.exists() and not first["known"]
    assert {n: Choices().recall(COST)[n] for n in ("eager_ms", "compiled_ms", "cold_s")} == {
        "eager_ms": 120.0,
        "compiled_ms": 100.0,
        "cold_s": 25.0,
    }
    short = decide(60.0, COLD | {"compile_s": 2.0, "was_cached": True}, calls=calls, minutes=1)
    assert short["compile"] and short["cached"] and calls == [True, False]  # not compared again
    assert Choices().recall(COST)["warm_s"] == 2.0 and Choices().recall(COST)["cold_s"] == 25.0


def test_without_the_cached_graphs_a_short_run_is_eager_again(cached):
    # a marker that outlives the graphs would cost 25 s in a run of a minute
    decide(1e4)
    assert decide(60.0, minutes=1)["compile"]
    cached.unlink()
    found = decide(60.0, minutes=1)
    assert not found["compile"] and not found["cached"] and "compiling takes about 25 s" in found["why_eager"]


def test_a_command_that_comes_again_decides_as_before(cached):
    # what another run has learnt since must not change the weights that this command ends with
    assert not decide(60.0)["compile"]
    assert decide(1e4, minutes=300)["compile"] and cached.exists()
    again = decide(60.0)
    assert not again["compile"] and again["when"]
    assert decide(60.0, again=True)["compile"]  # unless it is asked to choose again


@pytest.mark.parametrize("error", [UserError("no compiler"), RuntimeError("C++ error"), AssertionError()])
def test_a_compiler_that_fails_leaves_the_run_eager(error):
    found = decide(1e4, error)
    assert not found["compile"] and "torch.compile cannot work here: " in found["why_eager"]


def test_a_run_whose_passes_gain_nothing_goes_on_eager():
    found = decide(1e4, COLD | {"compiled_ms": 119.0})
    assert not found["compile"] and found["why_eager"] == "a pass takes 120 ms, and 119 compiled"
    assert not decide(1e6, minutes=999)["compile"]  # and no later run tries


def test_a_gain_that_was_not_seen_is_sought_again_if_asked():
    # --choose=again kept an eager model for ever, by one comparison on a busy machine
    assert not decide(1e4, COLD | {"compiled_ms": 119.0})["compile"]
    calls = []
    assert not decide(60.0, again=True, calls=calls)["compile"] and not calls  # too short to find out
    assert decide(1e4, again=True, calls=calls)["compile"] and calls == [True]
    assert Choices().recall(COST)["compiled_ms"] == 100.0 and decide(1e4)["compile"]


def test_what_is_compared_takes_turns_and_the_least_counts(monkeypatch):
    # by their mean or median, a load that hits one of the two would decide
    order, told = [], {"e": [9.0, 7.0, 5.0, *[6.0] * 6], "c": [4.0, 3.0, 2.0, *[3.0] * 6]}

    def own_samples(step, device, count, warmup):
        step()
        return [told[order[-1]].pop(0)]

    monkeypatch.setattr(compiling.timing, "own_samples", own_samples)
    found = compiling.measured(lambda: order.append("e"), lambda: order.append("c"), lambda: order.append("v"), True)
    assert "".join(order) == "cv" + "ec" * (1 + compiling.MOST) and found["was_cached"]
    assert (found["eager_ms"], found["compiled_ms"]) == (5.0, 2.0)
