"""A step of each variant is timed in turns, with a train.py whose steps sleep."""

import os
import signal
import sys
import time

import pytest

from fusedgpt.errors import UserError
from fusedgpt.studies import step_time
from tests.fusedgpt.studies.test_runner import plan

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process")

SLEEPS = """
import json, pathlib, sys, time
flags = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
out, rate = pathlib.Path(flags["out_dir"]), float(flags.get("learning_rate", 0.01))
if rate > 10:
    sys.exit("error: n_layer=13 is unlucky")
(out / "pid").write_text(str(__import__("os").getpid()))
(out / "run.json").write_text(json.dumps({"attention": "settled", "dtype": "float32", "compile": False}))
with open(out / "metrics.jsonl", "w", buffering=1) as file:
    for n in range(10**9):
        began = time.perf_counter()
        time.sleep(rate)
        ms = 1e3 * (time.perf_counter() - began)
        file.write(json.dumps({"kind": "train", "iter": n, "loss": 1.0, "ms": ms}) + "\\n")
"""
RATES = {f"learning_rate={rate}": {"learning_rate": rate} for rate in (0.01, 0.02)}


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """measure(plan) with short turns."""
    monkeypatch.setattr(step_time, "TURN", 0.05)
    monkeypatch.setattr(step_time, "SECONDS", 1.0)
    (tmp_path / "train.py").write_text(SLEEPS)
    said = []

    def measure(plan, names=None):
        return step_time.measure(plan, names or list(plan.variants), {"a": tmp_path}, tmp_path / "study", said.append)

    return measure


def is_gone(pid):
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_a_step_that_takes_twice_as_long_is_found(measure, tmp_path):
    one = plan(RATES)
    found = measure(one)
    base, other = found["learning_rate=0.01"], found["learning_rate=0.02"]
    assert 10 <= base["ms"] < 14 and other["times"] == pytest.approx(2, rel=0.15)
    assert other["low"] <= other["times"] <= other["high"] and other["laps"] >= 10
    assert other["ms"] == pytest.approx(base["ms"] * other["times"])
    assert one.settled == {"attention": "settled", "dtype": "float32", "compile": False}
    pids = [int(path.read_text()) for path in tmp_path.glob("study/turns/*/pid")]
    assert len(pids) == 2 and all(map(is_gone, pids))  # none is left stopped or running


def test_a_variant_that_is_added_has_the_baselines_time(measure):
    one = plan(RATES)
    one.times = {"learning_rate=0.01": {"ms": 100.0}}
    assert measure(one, ["learning_rate=0.02"])["learning_rate=0.02"]["ms"] == pytest.approx(200, rel=0.15)


def test_a_variant_that_cannot_train_ends_the_study_with_its_sentence(measure, tmp_path):
    with pytest.raises(UserError, match=r"learning_rate=11\.0 cannot train: n_layer=13 is unlucky"):
        measure(plan(RATES | {"learning_rate=11.0": {"learning_rate": 11.0}}))
    assert all(is_gone(int(path.read_text())) for path in tmp_path.glob("study/turns/*/pid"))


def test_the_step_in_which_a_process_was_stopped_does_not_count(measure, tmp_path):
    (tmp_path / "study").mkdir()
    training = step_time._Training(plan(RATES), "learning_rate=0.01", {"a": tmp_path}, tmp_path / "study")
    try:
        training.warm_up()
        time.sleep(1)  # another has the turn
        assert max(training.turn(0.05)) < 500
    finally:
        training.close()
    assert training.process.returncode == -signal.SIGKILL
