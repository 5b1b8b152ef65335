"""A contender in a process of its own: whatever it does, nothing is left running or stopped."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

from fusedgpt.bench import process
from fusedgpt.bench.process import Contender
from fusedgpt.bench.rows import Ended
from fusedgpt.errors import UserError
from fusedgpt.machine import timing
from tests.launch import ROOT

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def build(what):
    """A contender that makes steps of 1 ms, and does `what` in the second one, or while it is built."""
    steps = iter(range(1000))

    def step():
        time.sleep(0.001)
        if next(steps) == 1:
            {"dies": lambda: os._exit(3), "hangs": lambda: time.sleep(600)}.get(what, lambda: None)()
            if what == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)

    print("built", flush=True)
    if what == "is refused":
        raise UserError("on GPUs only")
    return timing.Steps(step, torch.device("cpu"), warmup=1), {
        "variable": os.environ.get("A_VARIABLE"),
        "pid": os.getpid(),
    }


@pytest.fixture
def start(tmp_path):
    """start(what) -> the contender; all have ended after the test."""
    started = []

    def start(what, **variables):
        started.append(Contender(build, (what,), variables, tmp_path / "log.txt"))
        return started[-1]

    yield start
    for contender in started:
        contender.close()
        assert not contender.process.is_alive()


def state(pid):
    """'S' if a process sleeps, 'T' if it is stopped; None if there is none."""
    path = pathlib.Path(f"/proc/{pid}/stat")
    return path.read_text().rpartition(")")[2].split()[0] if path.exists() else None


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@linux
def test_a_contender_is_stopped_unless_it_has_the_turn(start, tmp_path):
    # threads that wait actively would take the time of whoever has the turn
    contender = start("works", A_VARIABLE="of this one")
    found = contender.ready()
    assert found["variable"] == "of this one" and "A_VARIABLE" not in os.environ
    wait_for(lambda: state(found["pid"]) == "T")
    assert min(contender.turn(0.05)) >= 1.0 and len(contender.turn(0.5)) > 1
    wait_for(lambda: state(found["pid"]) == "T")
    contender.close()
    assert state(found["pid"]) is None and "built" in (tmp_path / "log.txt").read_text()


def test_a_contender_that_cannot_be_built_says_why(start):
    with pytest.raises(Ended) as ended:
        start("is refused").ready()
    assert ended.value.args == ("refused", "on GPUs only")


@pytest.mark.parametrize(
    ("what", "status", "reason"),
    [
        ("dies", "failed", "its process ended with status 3: built"),
        ("is killed", "out of memory", "the system killed it, as it does if memory is full"),
        ("hangs", "failed", "it hung: no answer for 1 s"),
    ],
)
def test_how_a_contender_ends_in_its_turn(start, what, status, reason, monkeypatch):
    contender = start(what)
    contender.ready()
    monkeypatch.setattr(process, "TURN_LIMIT", 1.0)
    with pytest.raises(Ended) as ended:
        contender.turn(0.0)
    assert ended.value.args == (status, reason)
    with pytest.raises(Ended):  # and it stays so
        contender.turn(0.0)


PARENT = """
import pathlib, sys
from fusedgpt.bench.process import Contender
from tests.fusedgpt.bench.test_process import build
if __name__ == "__main__":
    contender = Contender(build, ("works",), {}, pathlib.Path(sys.argv[1], "log.txt"))
    print(contender.ready()["pid"], flush=True)
    sys.stdin.read()
"""


@linux
def test_a_killed_parent_leaves_no_stopped_contender(tmp_path):
    # a stopped process does not see that its pipe was closed
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    pid = int(parent.stdout.readline())
    wait_for(lambda: state(pid) == "T")
    parent.kill()
    parent.wait()
    wait_for(lambda: state(pid) in (None, "Z"))
    for pipe in (parent.stdin, parent.stdout):
        pipe.close()
