"""The runs of a study with a train.py that learns nothing: in this process where it is not about processes."""

import contextlib
import os
import shutil
import signal
import sys
import time

import pytest

from fusedgpt.errors import UserError
from fusedgpt.machine import files
from fusedgpt.runs.metrics import record_of
from fusedgpt.settings import Settings
from fusedgpt.studies import design, outcomes, runner, versions
from fusedgpt.studies.command import Request, StudySettings
from tests.conftest import wait_for
from tests.fusedgpt.studies import fakes
from tests.launch import FORKS

RATES = {f"learning_rate={rate}": {"learning_rate": rate} for rate in (0.01, 0.1)}


def plan(variants=RATES, seeds=(1, 2), threads=None, **shared):
    settings = Settings(**{"max_iters": 10, "eval_interval": 5, **shared})
    one = design.of(Request(StudySettings(), settings, dict(variants), list(seeds)), "grid", "", {}, {}, threads)
    del one.settings["dataset"]  # the fake train.py reads none
    return one


@contextlib.contextmanager
def runner_of(tmp_path, plan):
    """The runner of a study in tmp_path/study, with the fake train.py in tmp_path/code."""
    code = fakes.code(tmp_path / "code")
    with files.lock(tmp_path / "study") as lock:
        plan.code = {"working tree": versions.digest(code)}
        plan.save(tmp_path / "study")
        yield runner.Runner(plan, tmp_path / "study", {"working tree": code}, lock, print)


def run(tmp_path, plan, at_once=1, jobs=None, processes=False):
    """Run a study, with or without processes; the jobs in the order in which they ended."""
    where = contextlib.nullcontext() if processes else fakes.in_this_process()
    with where, runner_of(tmp_path, plan) as own:
        return list(own.run(runner.order(plan) if jobs is None else jobs, at_once))


def settings_of(tmp_path, job):
    """The settings with which a run was started, as it has noted them."""
    return record_of(outcomes.folder_of(tmp_path / "study", *job))["settings"]


def values(tmp_path):
    return {(each.variant, each.seed): each.value for each in outcomes.read(tmp_path / "study").outcomes}


def test_variants_take_turns():
    names = [name for name, _ in runner.order(plan(seeds=[1, 2, 3]))]
    first, second = RATES
    assert names == [first, second, second, first, first, second]


def test_auto_is_settled_by_the_first_run_alone_and_what_varies_is_not(tmp_path):
    the_plan = plan({"n_layer=2": {"n_layer": 2}, "attention=flash": {"attention": "flash"}}, threads=3)
    run(tmp_path, the_plan, at_once=4)
    record = record_of(outcomes.folder_of(tmp_path / "study", "n_layer=2", 2))
    assert record["environment"]["threads"] == "3"  # runs at once share the cores
    assert the_plan.settled == {"attention": "settled", "dtype": "settled", "compile": "settled"}
    asked = [settings_of(tmp_path, job).get("dtype", "auto") for job in runner.order(the_plan)]
    assert sorted(asked) == ["auto", "settled", "settled", "settled"]
    assert design.load(tmp_path / "study").settled == the_plan.settled
    ran = {o.variant: o.row["ran"]["attention"] for o in outcomes.read(tmp_path / "study").outcomes}
    assert ran == {"attention=flash": "flash", "n_layer=2": "settled"}


def test_runs_of_equal_minutes_have_the_iterations_of_their_variant(tmp_path):
    # seeds of one variant made 482, 627 and 566 iterations
    the_plan = plan(minutes=0.001)
    the_plan.times = {"learning_rate=0.01": {"ms": 5.0}, "learning_rate=0.1": {"ms": 10.0, "times": 2.0}}
    run(tmp_path, the_plan)
    found = {(o.variant, o.row["iterations"]) for o in outcomes.read(tmp_path / "study").outcomes}
    assert found == {("learning_rate=0.01", 12), ("learning_rate=0.1", 6)}


def test_runs_begin_from_the_weights_that_the_study_names(tmp_path):
    # the setting used to be dropped, so that each run began from scratch, without a word
    run(tmp_path, plan(init_from="hf"), jobs=[("learning_rate=0.01", 1)])
    for seed, start in ((1, "resume"), (2, "hf")):  # the first has saved
        flags = runner.settings_of(plan(init_from="hf"), "learning_rate=0.01", seed, tmp_path / "study")
        assert flags["init_from"] == start


def test_a_run_that_ends_without_a_value_has_its_reason(tmp_path):
    with pytest.raises(UserError, match="the first run, n_layer=13 with seed 1, cannot start: n_layer=13 is unlucky"):
        run(tmp_path, plan({"n_layer=13": {"n_layer": 13}}))
    run(tmp_path, plan(RATES | {"learning_rate=100.0": {"learning_rate": 100.0}, "n_layer=13": {"n_layer": 13}}))
    found = {(o.variant, o.seed): (o.status, o.why) for o in outcomes.read(tmp_path / "study").outcomes}
    status, why = found["learning_rate=100.0", 1]
    assert status == "diverged" and "no finite gradient" in why
    assert found["n_layer=13", 1] == ("failed", "n_layer=13 is unlucky")
    assert found["learning_rate=0.1", 2][0] == "finished"


def test_a_full_disk_ends_the_study_which_goes_on_later(tmp_path):
    full = {"n_layer=2": {"n_layer": 2}, "n_layer=14": {"n_layer": 14}}
    with pytest.raises(UserError, match=r"No space left\. Then give the same command"):
        run(tmp_path, plan(full))
    assert list(outcomes.statuses(tmp_path / "study")) == [("n_layer=2", 1)]


def test_a_study_whose_data_or_code_are_changed_ends(tmp_path, data):
    # the bins were replaced after two of six runs: a verdict with p = 0.00135, and no word
    copy, the_plan = shutil.copytree(data, tmp_path / "data"), plan()
    the_plan.settings["dataset"] = str(copy)
    the_plan.data = versions.data([the_plan.settings])
    ids, model = (copy / "train.bin").read_bytes(), tmp_path / "code" / "model.py"
    with fakes.in_this_process(), runner_of(tmp_path, the_plan) as own:
        for path, before, after in [(copy / "train.bin", ids, ids[::-1]), (model, b"", b"# new")]:
            path.write_bytes(before)
            the_plan.code = {"working tree": versions.digest(tmp_path / "code")}
            running = own.run(outcomes.left(own.folder, runner.order(the_plan)), 1)
            next(running)
            path.write_bytes(after)
            with pytest.raises(UserError, match=r"(/train|the code of working tree) changed since the study"):
                next(running)
            path.write_bytes(before)
    assert len(outcomes.statuses(tmp_path / "study")) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_is_resumed_after_the_others(tmp_path, number):
    unbroken = run(tmp_path / "unbroken", plan())
    out_dir = outcomes.folder_of(tmp_path / "study", *unbroken[1])
    fakes.send(number, out_dir)
    assert run(tmp_path, plan(), processes=True) == [unbroken[0], *unbroken[2:], unbroken[1]]
    assert not (out_dir / "signal").exists()
    assert values(tmp_path) == values(tmp_path / "unbroken")
    assert record_of(out_dir)["settings"]["init_from"] == ("resume" if number == signal.SIGTERM else "scratch")


def test_a_run_that_is_killed_again_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(fakes, "FAKE", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert run(tmp_path, plan({"config": {}}, seeds=[1]), processes=True) == [("config", 1)]
    assert "signal 9 killed it again" in outcomes.read(tmp_path / "study").outcomes[0].why


STUDY = """
import pathlib, sys
from fusedgpt.machine import files
from fusedgpt.studies import design, runner
folder, code = map(pathlib.Path, sys.argv[1:])
plan = design.load(folder)
with files.lock(folder) as lock:
    own = runner.Runner(plan, folder, {"working tree": code}, lock, print)
    list(own.run(runner.order(plan), 2))
"""


def study_of(*args):
    sys.argv = ["study", *args]
    os.environ["FAKE_PAUSE"] = "0.02"
    exec(compile(STUDY, "study", "exec"), {})


def process_of(out_dir):
    """The process id of a run, once it has made some steps."""
    wait_for(out_dir / "pid", 60)
    while runner.steps_of(out_dir) < 3:
        time.sleep(0.01)
    return int((out_dir / "pid").read_text())


def is_gone(pid, seconds=10):
    for _ in range(100 * seconds):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere runs outlive a study that was killed")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_run_outlives_a_study(tmp_path, number):
    folder, the_plan = tmp_path / "study", plan(threads=1, max_iters=10_000)
    folder.mkdir()
    the_plan.settled = {"attention": "manual", "dtype": "float32", "compile": False}
    the_plan.save(folder)
    study = FORKS.Process(target=study_of, args=(folder, fakes.code(tmp_path / "code")))
    study.start()
    jobs = runner.order(the_plan)[:2]
    runs = [process_of(outcomes.folder_of(folder, *job)) for job in jobs]
    os.kill(study.pid, number)
    study.join(60)
    assert study.exitcode == (-number if number == signal.SIGKILL else 128 + number)
    assert all(map(is_gone, runs))
    assert not outcomes.statuses(folder)
    assert int((outcomes.folder_of(folder, *jobs[0]) / "ckpt.pt").read_text()) > 2  # the run has saved
