"""make gpu as a whole, and the processes of its steps: none is left behind."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import bench
from fusedgpt.bench import campaign, disturbance, kinds, rows
from fusedgpt.machine import timing
from tests import launch
from tests.conftest import wait_for
from tests.launch import ROOT

CPU = torch.device("cpu")


def test_a_rehearsal_has_rows_of_each_kind():
    for step in campaign.STEPS:
        if step.kind != "tests":
            assert 1 <= kinds.left(step.kind, campaign.TINY[step.kind])[0] <= 30, step.kind


HOLDS = "import fcntl, pathlib, time; file = open({0!r} + '.lock', 'w'); fcntl.flock(file, fcntl.LOCK_EX)"
HOLDS += "; pathlib.Path({0!r}).touch(); time.sleep({1})"


def is_gone(path):
    """Whether a process that ran HOLDS with `path` has ended: its lock is free. It may take a moment to die."""
    import fcntl  # not on Windows

    with open(f"{path}.lock") as file:
        for _ in range(300):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.1)
    return False


@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path, capsys):
    # bench.py's train.py would go on computing, and disturb whatever is measured next
    begun = tmp_path / "begun"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDS.format(str(begun), 60)!r}])"
    for limit in (0.5, 2, 8, 32):  # on a busy machine the child may not have started
        status, took = campaign._step("slow", ["-c", parent], limit, 1, math.inf)
        assert status is None and took >= limit
        if begun.exists():
            break
    assert "slow was killed at its limit after 0.5" in capsys.readouterr().out
    assert is_gone(begun)


def step_in_a_session(step, number, ignored):
    """What a campaign does while it has a step, with `number` ignored as under nohup, or not."""
    signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    campaign.end_with_steps()
    campaign._step("slow", ["-c", step], 60, 1, math.inf)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM"])
def test_a_lost_session_ends_the_step_too(tmp_path, name, ignored):
    # after SIGHUP the step went on alone, and disturbed the next campaign
    begun, late, number = tmp_path / "begun", tmp_path / "late", getattr(signal, name)
    step = f"{HOLDS.format(str(begun), 0.5 if ignored else 60)}; pathlib.Path({str(late)!r}).touch()"
    process = launch.FORKS.Process(target=step_in_a_session, args=(step, number, ignored))
    process.start()
    wait_for(begun, seconds=60)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (0 if ignored else 128 + number)
    assert is_gone(begun) and late.exists() == ignored


def make(*args):
    """`make gpu`; its output, whose last line is what counts."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # `make test` runs this
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.run(["make", "gpu", *args], cwd=ROOT, env=alone, check=False, **pipes).stdout


@pytest.mark.slow  # all kinds, each in a process of its own or here, take a minute and a half
@pytest.mark.timeout(900)
def test_make_gpu_rehearsed(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    folder.mkdir()

    def all_tests_passed():  # in an earlier call, with the code of now
        passed = {"status": 0, "seconds": 1.0, "passed": 1, "failed": [], "skipped": [], "began": []}
        found = {"of": campaign._of(CPU), "files": dict.fromkeys(campaign.TESTS, passed)}
        (folder / "tests.json").write_text(json.dumps(found))

    # the benchmarks in this process: they take seconds, and as long to start
    def step(name, command, *times):
        monkeypatch.setattr(rows, "BEGAN", time.monotonic())  # as in a process of its own
        bench.main(command[1], command[2:])
        return 0, 1.0

    monkeypatch.setattr(campaign, "_step", step)
    monkeypatch.setattr(campaign, "LIMIT", 3600.0)  # on a busy machine a row may take minutes
    monkeypatch.setattr(campaign.signal, "signal", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(timing, "reference", lambda device: 1.0)  # a disturbed row is measured three times
    monkeypatch.setattr(disturbance, "usage", lambda: (0, 0.0))
    settings = campaign.Settings(rehearse=True, results=str(folder))
    all_tests_passed()
    whole = campaign.run(settings, CPU, kinds.left)
    assert whole.endswith("; nothing is missing"), whole
    for kind in campaign.KINDS:
        assert (folder / kind / "report.md").exists() and list((folder / kind).glob("*.png")), kind
    all_tests_passed()
    again = make(f"PYTHON={sys.executable}", f"ARGS=--rehearse=True --results={folder}")
    assert again.splitlines() == [whole]


def test_make_gpu_says_what_to_install():
    said = make(f"PYTHON={sys.executable} -S -E")  # without site-packages and PYTHONPATH
    assert "error: not installed: torch, numpy, tyro" in said and "-m pip install torch numpy tyro" in said
