"""The order of a campaign, that it goes on where it stopped, and that it leaves no process behind."""

import json
import math
import os
import pathlib
import subprocess
import sys
import time
import types

import pytest
import torch

import bench
from fusedgpt.bench import campaign, disturbance, kinds, rows
from fusedgpt.errors import UserError
from fusedgpt.machine import timing
from tests.conftest import ROOT

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Intel(R) Xeon(R) Processor", "xeon-processor"),
    ],
)
def test_results_go_to_a_folder_named_after_the_device(monkeypatch, name, short):
    monkeypatch.setattr(campaign, "environment", lambda device: {"device": name})
    assert campaign.folder(campaign.Settings(), torch.device("cuda")) == ROOT / "results" / short


def test_without_a_gpu_it_says_so():
    with pytest.raises(UserError, match=r"there is no GPU to measure: .* --rehearse=True"):
        campaign.folder(campaign.Settings(), CPU)


class Machine:
    """A stand-in for the processes that a campaign starts: each brings as many rows as it is told to."""

    def __init__(self, monkeypatch, folder, rows_a_step):
        self.rows = {kind: 0 for kind in campaign.KINDS}
        self.rows_a_step, self.ran, self.failing, self.ends = rows_a_step, [], (), {}
        self.asked = []
        monkeypatch.setattr(campaign, "_step", self.step)
        monkeypatch.setattr(campaign, "folder", lambda *_: folder)  # as if there were a GPU
        monkeypatch.setattr(campaign.signal, "signal", lambda *_: None)

    def step(self, name, command, limit, guess, deadline):
        """What campaign._step does; `ends` has {part of a name: (status, seconds)} of steps that do not end well."""
        self.ran.append(name)
        self.asked.append(command)
        status, took = next((end for part, end in self.ends.items() if part in name), (0, 1.0))
        if command[0] == "bench.py":
            self.rows[command[1]] += self.rows_a_step if status == 0 else 0
        else:
            path = next(word.removeprefix("--outcomes=") for word in command if word.startswith("--outcomes="))
            outcomes = ["passed"] * 7 + ["skipped"] * 2
            if name in self.failing:
                outcomes[0], status = "failed", 1
            if status != 1 and status != 0:
                outcomes = outcomes[:3] if status is None else []
            lines = [json.dumps({"test": f"{name}::{n}", "outcome": its}) for n, its in enumerate(outcomes)]
            pathlib.Path(path).write_text("\n".join(lines))
        return status, took

    def left(self, kind, args):
        total = 2 if campaign.FIRST_RUNGS in args else 10
        return max(total - self.rows[kind], 0), int(kind == "sweep"), total

    def run(self, **settings):
        """What a campaign says, and which steps it ran."""
        self.ran.clear()
        return campaign.run(campaign.Settings(**settings), CPU, self.left), [*self.ran]


TESTS = [f"test_{name}.py" for name in campaign.TESTS]
BEFORE_TESTS = ["ladder, 2 rows", "numerics, 10 rows", "sweep, 10 rows", "prefill, 10 rows"]


def test_the_most_useful_comes_first_and_the_next_call_goes_on(tmp_path, monkeypatch):
    # 18 test files used to come before the first figure, and a lent machine has half an hour
    machine = Machine(monkeypatch, tmp_path, rows_a_step=5)
    said, ran = machine.run()
    assert ran == [
        *BEFORE_TESTS,
        *TESTS,
        "ladder, 5 rows",
        *("anatomy, 10 rows", "peers, 10 rows", "max_batch, 10 rows", "sweep, 5 rows"),
    ]
    assert f"{7 * len(TESTS)} tests ran ({2 * len(TESTS)} skipped); rows: ladder 10 of 10, " in said
    missing = ", ".join(f"{kind} (5 rows)" for kind in ("numerics", "prefill", "anatomy", "peers", "max_batch"))
    assert said.endswith(f"missing: {missing}. The same command goes on")
    said, ran = machine.run()
    assert ran == [f"{kind}, 5 rows" for kind in ("numerics", "prefill", "anatomy", "peers", "max_batch")]
    assert "sweep 10 of 10 (1 disturbed)" in said and said.endswith("; nothing is missing")
    assert machine.run()[1] == []


def test_tests_that_do_not_pass_hold_no_measurement_up(tmp_path, monkeypatch):
    # they used to run first in each call, and a call with a budget came no further
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    machine.failing, machine.ends = (TESTS[3],), {TESTS[0]: (None, 540.0)}
    said, ran = machine.run()
    assert TESTS[0] in ran and ran[-1] == "max_batch, 10 rows"
    assert f"{TESTS[0]} was killed at its limit after 9 min, 3 passed; {TESTS[3]} failed 1 of 7; " in said
    machine.failing, machine.ends = (), {}
    said, ran = machine.run()
    assert ran == [TESTS[0], TESTS[3]] and "failed" not in said and "killed" not in said


def test_a_step_that_dies_at_once_is_not_said_to_have_taken_its_limit(tmp_path, monkeypatch):
    # with a package hidden, pytest died at once; tests.json said "ended_after": 540.0, and nothing was missing
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    machine.ends = {TESTS[1]: (4, 1.2), "numerics": (1, 2.0), "anatomy": (None, 540.0)}
    said, _ = machine.run()
    found = json.loads((tmp_path / "tests.json").read_text())["files"][campaign.TESTS[1]]
    assert found == {"status": 4, "seconds": 1.2, "passed": 0, "failed": [], "skipped": []}
    assert f"{TESTS[1]} ended with status 4 after 1.2 s, 0 passed" in said
    assert (
        "numerics (10 rows, ended with status 1 after 2 s), anatomy (10 rows, was killed at its limit after 9 min)"
        in said
    )


def test_tests_run_again_if_the_code_is_another_and_not_for_a_commit(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    machine.run()
    found = campaign.environment(CPU)
    monkeypatch.setattr(campaign, "environment", lambda device: {**found, "commit": "of the results"})
    assert machine.run()[1] == []
    monkeypatch.setattr(campaign, "environment", lambda device: {**found, "cuda": "13.1"})
    assert machine.run()[1] == TESTS
    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    assert campaign._tests(tmp_path, campaign._of(CPU)) == {}  # of other files


def test_the_largest_batch_trains_for_a_time_that_a_step_has(tmp_path, monkeypatch):
    # figure 3 of PyTorch's article was in no step: it takes --train_seconds, and a run of a few steps has no curve
    machine = Machine(monkeypatch, tmp_path, rows_a_step=5)
    machine.run()
    (command,) = [command for command in machine.asked if command[:2] == ["bench.py", "max_batch"]]
    assert "--train_seconds=180" in command and "--only=manual,flash" in command
    # a run that is begun in the last moment ends before the step is ended, as every other row does
    budgets = {
        command[1]: float(command[-1].removeprefix("--max_seconds=")) for command in machine.asked if "=" in command[-1]
    }
    assert budgets["sweep"] - budgets["max_batch"] == pytest.approx(180, abs=1)
    assert budgets["max_batch"] > 180


def test_no_step_begins_once_the_time_is_up(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    said, ran = machine.run(max_seconds=campaign.LAST_ROW / 2)  # a row might take longer than is left
    assert ran == [] and f"missing: {TESTS[0]}, " in said and "ladder (10 rows), numerics (10 rows)" in said


def test_another_machine_goes_on_with_what_was_kept(tmp_path, monkeypatch):
    keep = tmp_path / "keep"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "one" / "graphs"))
    (tmp_path / "one" / "graphs" / "aa").mkdir(parents=True)
    (tmp_path / "one" / "graphs" / "aa" / "code.py").write_text("compiled")
    machine = Machine(monkeypatch, tmp_path / "one" / "h200", rows_a_step=10)
    machine.run(keep=str(keep))
    written = (tmp_path / "one" / "h200" / "tests.json").read_bytes()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "two" / "graphs"))
    (tmp_path / "two" / "h200").mkdir(parents=True)
    (tmp_path / "two" / "h200" / "tests.json").write_text("{}")  # of an older checkout
    monkeypatch.setattr(campaign, "folder", lambda *_: tmp_path / "two" / "h200")
    said, ran = machine.run(keep=str(keep))
    assert ran == [] and said.endswith("nothing is missing")  # machine.rows stand for rows.jsonl
    assert (tmp_path / "two" / "h200" / "tests.json").read_bytes() == written
    assert (tmp_path / "two" / "graphs" / "aa" / "code.py").read_text() == "compiled"


def test_a_campaign_runs_every_test_that_needs_a_gpu():
    found = types.SimpleNamespace(
        pytest_collection_finish=lambda session: files.update(i.path.stem for i in session.items)
    )
    files = set()
    pytest.main(["-m", "gpu", "--collect-only", str(ROOT / "tests")], plugins=[found])
    assert files == {f"test_{name}" for name in campaign.TESTS}


def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path, capsys):
    # bench.py's train.py would go on computing, and disturb whatever is measured next
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(tmp_path / 'late')!r}).write_text('')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    status, took = campaign._step("slow", ["-c", parent], 0.5, 1, math.inf)
    assert status is None and 0.5 <= took < 2
    assert "slow was killed at its limit after 0.5" in capsys.readouterr().out
    time.sleep(2.5)
    assert not (tmp_path / "late").exists()


def make(*args):
    """`make gpu`; its output, whose last line is what counts."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # `make test` runs this
    done = subprocess.run(["make", "gpu", *args], cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_make_gpu_rehearsed(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    folder.mkdir()
    rehearsed = [f"PYTHON={sys.executable}", f"ARGS=--rehearse=True --results={folder}"]
    passed = {"status": 0, "seconds": 1.0, "passed": 1, "failed": [], "skipped": []}
    ran = dict.fromkeys(campaign.TESTS, passed)  # by an earlier call
    (folder / "tests.json").write_text(json.dumps({"of": campaign._of(CPU), "files": ran}))
    short = make(rehearsed[0], f"{rehearsed[1]} --max_seconds={campaign.LAST_ROW + 15}").splitlines()
    assert short[0] == "== ladder, 3 rows: about 2 min of 2 min that are left", short
    assert "missing: " in short[-1] and "max_batch (1 rows)" in short[-1], short

    # the benchmarks in this process: they take seconds, and as long to start
    def step(name, command, *times):
        bench.main(command[1], command[2:])
        return 0, 1.0

    monkeypatch.setattr(campaign, "_step", step)
    monkeypatch.setattr(campaign.signal, "signal", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(rows, "BEGAN", time.monotonic())
    monkeypatch.setattr(timing, "reference", lambda device: 1.0)  # a disturbed row is measured three times
    monkeypatch.setattr(disturbance, "_usage", lambda: (0, 0.0))
    settings = campaign.Settings(rehearse=True, results=str(folder))
    whole = campaign.run(settings, CPU, kinds.left)
    assert whole.endswith("; nothing is missing"), whole
    for kind in campaign.KINDS:
        assert (folder / kind / "report.md").exists() and list((folder / kind).glob("*.png")), kind
    again = make(*rehearsed).splitlines()
    assert again == [whole]


def test_make_gpu_says_what_to_install():
    said = make(f"PYTHON={sys.executable} -S")  # without site-packages
    assert "error: not installed: torch, numpy, tyro" in said and "-m pip install torch numpy tyro" in said
