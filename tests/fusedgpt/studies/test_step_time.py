"""A step of each variant is timed in turns, with a train.py that says how long its steps took."""

import contextlib
import sys
import time

import pytest

from fusedgpt.errors import UserError
from fusedgpt.studies import step_time
from tests.conftest import TINY
from tests.fusedgpt.studies import fakes
from tests.fusedgpt.studies.test_runner import is_gone, plan
from tests.launch import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process")


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """measure(plan) with short turns."""
    monkeypatch.setattr(step_time, "TURN", 0.05)
    monkeypatch.setattr(step_time, "SECONDS", 2.0)
    monkeypatch.setenv("FAKE_PAUSE", "0.01")
    code = fakes.code(tmp_path / "code")

    def measure(plan, names=None):
        return step_time.measure(plan, names or list(plan.variants), {"a": code}, tmp_path / "study")

    return measure


def test_a_step_that_takes_twice_as_long_is_found_and_who_cannot_train_is_not_timed(measure, tmp_path):
    # a learning rate that diverges, or two models that do not fit a GPU together, ended the study before its first run
    all_of_them = {f"n_layer={n}": {"n_layer": n} for n in (1, 2, 13)}
    one = plan(all_of_them)
    assert measure(one) == {"n_layer=1": dict(ms=11.0), "n_layer=2": dict(ms=22.0, times=2.0, low=2.0, high=2.0)}
    assert one.settled == {"attention": "settled", "dtype": "settled", "compile": "settled"}
    with pytest.raises(UserError, match="n_layer=13 cannot train: n_layer=13 is unlucky"):
        measure(plan(all_of_them, minutes=1.0), ["n_layer=13"])
    # a grid of four learning rates took four times as many turns; equal settings of two versions are not the same work
    rates = plan({f"{n},{rate}": {"n_layer": n, "learning_rate": rate} for n in (1, 2) for rate in (1e-3, 2e-3)})
    assert [each.get("times") for each in measure(rates).values()] == [None, 1.0, 2.0, 2.0]
    pids = [int(path.read_text()) for path in tmp_path.glob("study/turns/*/pid")]
    assert len(pids) == 4 and all(map(is_gone, pids))  # two and two; none is left stopped or running
    schedules = plan({"wsd": {"schedule": "wsd"}, "long": {"warmup_iters": 99}})
    assert step_time._work(schedules, {}, "wsd") == step_time._work(schedules, {}, "long")  # took turns, 12 % apart
    assert step_time._work(one, {"n_layer=1": "a"}, "n_layer=1") != step_time._work(one, {}, "n_layer=1")
    one.times = {"n_layer=1": {"ms": 100.0}}  # a variant that is added has the baseline's time
    assert measure(one, ["n_layer=2"])["n_layer=2"]["ms"] == 200


def test_train_py_writes_each_step_and_stands_still(tmp_path, data):
    # it wrote them every two seconds, so that turns had the steps of others, and the one in which it was stopped
    settings = {name: value for name, value in TINY.items() if name not in ("n_layer", "learning_rate")}
    one = plan({"n_layer=1": {"n_layer": 1, "learning_rate": 1e20}}, device="cpu", dtype="float32", **settings)
    one.settings["dataset"] = str(data)
    with contextlib.closing(step_time._Training(one, "n_layer=1", {"a": ROOT}, tmp_path)) as training:
        training.warm_up()
        time.sleep(2)
        began = time.perf_counter()
        ms = training.turn(0.1)
        # no more than the turn, though others had theirs before it
        assert 0 < sum(ms) / 1e3 < time.perf_counter() - began + 1
