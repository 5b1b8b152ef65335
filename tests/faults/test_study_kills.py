"""A study that is killed again and again, or whose runs are, ends with the table of an unbroken one."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from fusedgpt.settings import Settings
from fusedgpt.studies import design, outcomes
from fusedgpt.studies.command import Request, StudySettings
from tests.faults.processes import rng
from tests.fusedgpt.studies import fakes
from tests.fusedgpt.studies.test_runner import STUDY
from tests.launch import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")]

RATES = {f"learning_rate={rate}": {"learning_rate": rate} for rate in (0.01, 0.1, 100.0)}


def study(folder, seeds, **shared):
    plan = design.of(Request(StudySettings(), Settings(**shared), RATES, seeds), "grid", "", "", {}, 1)
    folder.mkdir(parents=True)
    plan.save(folder)
    return folder


def start(folder, code, pause):
    command = [sys.executable, "-c", STUDY, folder, code]
    return subprocess.Popen(command, env=os.environ | {"FAKE_PAUSE": str(pause)}, stdout=subprocess.DEVNULL, cwd=ROOT)


def runs_in(folder):
    """The ids of the processes of a study's runs."""
    needle = f"--out_dir={folder}/".encode()
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if needle in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            pass
    return found


def kill(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def table(folder):
    """What a verdict rests on: values and statuses, and every loss of every run."""
    results = outcomes.read(folder)
    runs = [(o.variant, o.seed, o.status, repr(o.value), o.run.train["loss"].tolist()) for o in results.outcomes]
    return json.dumps(runs), results.differences


def broken_off(folder, code, pause, chance, patience, kills):
    """Run a study to its end, killing it or one of its runs `kills` times; the number of kills of each."""
    killed, study = {"study": 0, "run": 0}, start(folder, code, pause)
    while True:
        time.sleep(chance.uniform(*patience))
        if study.poll() is not None:
            if study.returncode == 0:
                return killed
            study = start(folder, code, pause)
        elif sum(killed.values()) < kills:
            runs = runs_in(folder)
            if chance.random() < 0.5 and runs:
                killed["run"] += kill(chance.choice(runs), chance.choice([signal.SIGKILL, signal.SIGTERM]))
            else:
                killed["study"] += kill(study.pid, chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
                study.wait()


def test_thirty_kills_of_a_study_and_of_its_runs(tmp_path, tell):
    code = fakes.code(tmp_path / "code")
    shared = dict(max_iters=60, eval_interval=5)
    whole, broken = (study(tmp_path / name, [1, 2, 3], **shared) for name in ("whole", "broken"))
    assert start(whole, code, 0).wait() == 0
    killed = broken_off(broken, code, 0.04, rng("study"), (0.5, 1.4), kills=30)
    tell(f"a study of 9 runs was killed {killed['study']} times, and its runs {killed['run']} times")
    assert sum(killed.values()) >= 15  # 30, if the machine is not so fast that the study ends before
    assert table(broken) == table(whole)
    assert {o.status for o in outcomes.read(broken).outcomes} == {"finished", "diverged"}
