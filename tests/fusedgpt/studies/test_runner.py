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
from tests.fusedgpt.studies import fakes

RATES = {f"learning_rate={rate}": {"learning_rate": rate} for rate in (0.01, 0.1)}


def plan(variants=RATES, seeds=(1, 2), threads=None, **shared):
    settings = Settings(**{"max_iters": 10, "eval_interval": 5, **shared})
    one = design.of(Request(StudySettings(), settings, dict(variants), list(seeds), []), "grid", "", {}, {}, threads)
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


def run(tmp_path, plan, at_once=1, processes=False):
    """Run a study, with or without processes; the jobs in the order in which they ended, and the outcomes by job."""
    where = contextlib.nullcontext() if processes else fakes.in_this_process()
    with where, runner_of(tmp_path, plan) as own:
        ended = list(own.run(runner.order(plan), at_once))
    return ended, {(each.variant, each.seed): each for each in outcomes.read(tmp_path / "study").outcomes}


def test_variants_take_turns():
    names = [name for name, _ in runner.order(plan(seeds=[1, 2, 3]))]
    first, second = RATES
    assert names == [first, second, second, first, first, second]


def test_auto_is_settled_by_the_first_run_alone_and_what_varies_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5,absent")
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 2)
    the_plan = plan({"n_layer=2": {"n_layer": 2}, "attention=flash": {"attention": "flash"}}, threads=3)
    _, found = run(tmp_path, the_plan, at_once=4)
    assert {each.row["ran"]["threads"] for each in found.values()} == {"3"}  # runs at once share the cores
    # eight runs at once were all on the first of eight GPUs; here one runs alone, then three at once
    assert sorted(each.row["ran"]["device"] for each in found.values()) == ["2", "2", "2", "GPU-5"]
    assert the_plan.settled == {"attention": "settled", "dtype": "settled", "compile": "settled"}
    assert design.load(tmp_path / "study").settled == the_plan.settled
    records = [record_of(outcomes.folder_of(tmp_path / "study", *job)) for job in found]
    asked = [each["settings"].get("dtype", "auto") for each in records]
    assert sorted(asked) == ["auto", "settled", "settled", "settled"]
    assert {each.row["ran"]["attention"] for (name, _), each in found.items() if name == "attention=flash"} == {"flash"}
    # what variants can run differs: all with dropout failed because the first, without, had settled on flash
    dropout = plan({f"dropout={p}": {"dropout": p} for p in (0.0, 0.1)})
    dropout.settled, dropout.given = {"attention": "flash", "dtype": "float32"}, ["beta2"]
    flags = runner.settings_of(dropout, "dropout=0.1", 1, tmp_path)
    assert "attention" not in flags and flags["dtype"] == "float32"
    assert flags["beta2"] == Settings.beta2  # given, so that another version's default does not count
    # this setting was dropped, so that each run began from scratch, without a word
    assert runner.settings_of(plan(init_from="hf"), "learning_rate=0.1", 1, tmp_path)["init_from"] == "hf"


def test_runs_of_equal_minutes_have_the_iterations_of_their_variant(tmp_path):
    # seeds of one variant made 482, 627 and 566 iterations
    the_plan = plan(minutes=0.001)
    the_plan.times = {"learning_rate=0.01": {"ms": 5.0}, "learning_rate=0.1": {"ms": 10.0, "times": 2.0}}
    found = {(job[0], each.row["iterations"]) for job, each in run(tmp_path, the_plan)[1].items()}
    assert found == {("learning_rate=0.01", 12), ("learning_rate=0.1", 6)}


def test_a_run_that_ends_without_a_value_has_its_reason(tmp_path):
    refused = {"n_layer=13": {"n_layer": 13}}
    with pytest.raises(UserError, match="the first run, n_layer=13 with seed 1, cannot start: n_layer=13 is unlucky"):
        run(tmp_path, plan(refused))
    _, found = run(tmp_path, plan(RATES | {"learning_rate=100.0": {"learning_rate": 100.0}} | refused))
    diverged, failed = found["learning_rate=100.0", 1], found["n_layer=13", 1]
    assert diverged.status == "diverged" and "no finite gradient" in diverged.why
    assert (failed.status, failed.why) == ("failed", "n_layer=13 is unlucky")
    assert "evals" not in failed.row and diverged.row["evals"]["val_loss"] == [None, None]
    finished = found["learning_rate=0.1", 2]
    row, evals = finished.row, finished.row["evals"]
    assert finished.status == "finished" and (row["iterations"], row["seconds"]) == (10, 0.12)  # of 12 ms
    assert (evals["iter"], evals["tokens"], evals["val_loss"][-1]) == ([0, 5, 10], [0, 500, 1000], finished.value)
    with pytest.raises(UserError, match=r"No space left\. Then give the same command"):
        run(tmp_path / "full", plan({"n_layer=2": {"n_layer": 2}, "n_layer=14": {"n_layer": 14}}))
    assert list(outcomes.statuses(tmp_path / "full" / "study")) == [("n_layer=2", 1)]


def test_a_study_whose_data_or_code_are_changed_ends(tmp_path, data):
    # the bins were replaced after two of six runs: a verdict with p = 0.00135, and no word; then only a sample of the
    # ids was looked at
    copy, the_plan = shutil.copytree(data, tmp_path / "data"), plan()
    the_plan.settings["dataset"] = str(copy)
    the_plan.data = versions.data([the_plan.settings])
    ids, model = (copy / "train.bin").read_bytes(), tmp_path / "code" / "model.py"
    with fakes.in_this_process(), runner_of(tmp_path, the_plan) as own:
        for path, before, after in [(copy / "train.bin", ids, ids[:-2] + b"\1\0"), (model, b"", b"# new")]:
            path.write_bytes(before)
            the_plan.code = {"working tree": versions.digest(tmp_path / "code")}
            running = own.run(outcomes.left(own.folder, runner.order(the_plan)), 1)
            next(running)
            path.write_bytes(after)
            with pytest.raises(UserError, match=r"(/train|the code of working tree) changed since the study"):
                next(running)
            path.write_bytes(before)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_is_resumed_after_the_others_and_fails_if_killed_again(tmp_path, number, monkeypatch):
    jobs, unbroken = run(tmp_path / "unbroken", plan())
    out_dir = outcomes.folder_of(tmp_path / "study", *jobs[1])
    out_dir.mkdir(parents=True)
    (out_dir / "signal").write_text(str(int(number)))
    ended, found = run(tmp_path, plan(), processes=True)
    assert ended == [jobs[0], *jobs[2:], jobs[1]] and not (out_dir / "signal").exists()
    assert {job: each.value for job, each in found.items()} == {job: each.value for job, each in unbroken.items()}
    assert record_of(out_dir)["settings"]["init_from"] == ("resume" if number == signal.SIGTERM else "scratch")
    monkeypatch.setattr(fakes, "FAKE", f"import os\nos.kill(os.getpid(), {int(number)})\n")
    _, found = run(tmp_path / "again", plan({"config": {}}, seeds=[1]), processes=True)
    assert f"signal {int(number)} killed it again" in found["config", 1].why


def is_gone(pid, seconds=10):
    for _ in range(100 * seconds):
        if not os.path.exists(f"/proc/{pid}/exe"):  # nor has one that nobody waits for, as in many containers
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere runs outlive a study that was killed")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_run_outlives_a_study(tmp_path, number):
    folder, runs = tmp_path / "study", []
    flags = ("--learning_rate=0.01,0.1", "--jobs=2", "--max_iters=10000")
    study = fakes.start(folder, fakes.code(tmp_path / "code"), *flags, pause=0.02)
    for rate in (0.01, 0.1):
        out_dir = outcomes.folder_of(folder, f"learning_rate={rate}", 1)
        while runner.steps_of(out_dir) < 3:
            time.sleep(0.01)
        runs.append(int((out_dir / "pid").read_text()))
    study.send_signal(number)
    study.communicate()
    assert study.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert all(map(is_gone, runs)) and not outcomes.statuses(folder)
    assert int((out_dir / "ckpt.pt").read_text()) > 2  # the run has saved
