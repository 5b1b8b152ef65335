"""slurm/train.sh, with stand-ins for SLURM's commands, trains, and requeues itself if its time is up."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

import train
from tests.conftest import flags, rows, small, wait_for_lines
from tests.launch import ROOT

SCRIPT = ROOT / "slurm" / "train.sh"
COMMANDS = {  # stand-ins for SLURM's, on one node
    "srun": 'shift\nexec "$@"',  # without its option
    "scontrol": 'echo "$@" >> "$CALLS"\n[ "$1" = show ] && echo localhost',
}


@pytest.fixture
def job(tmp_path):
    """The environment of a job on one node with two processes; CALLS is the file with the calls of scontrol."""
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = dict(SLURM_JOB_ID=str(os.getpid()), SLURM_JOB_NODELIST="localhost", SLURM_JOB_NUM_NODES="1")
    return os.environ | slurm | dict(PATH=path, SLURM_GPUS_ON_NODE="2", CALLS=str(tmp_path / "calls"))


def start(job, settings):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(["bash", str(SCRIPT), *flags(settings)], cwd=ROOT, env=job, **pipes)


def test_a_job_that_runs_to_its_end_is_not_queued_again(tmp_path, data, job):
    script = start(job, small(tmp_path / "out", data, gradient_accumulation_steps=2, init_from="auto"))
    output, _ = script.communicate(timeout=120)
    assert script.returncode == 0, output
    assert len(rows(tmp_path / "out")) == 10
    assert pathlib.Path(job["CALLS"]).read_text() == "show hostnames localhost\n"


def test_a_job_whose_time_is_up_saves_and_is_queued_again(tmp_path, data, job):
    endless = dict(max_iters=100_000, eval_interval=100_000, gradient_accumulation_steps=2, init_from="auto")
    script = start(job, small(tmp_path / "out", data, **endless))
    wait_for_lines(script, tmp_path / "out" / "metrics.jsonl", 10)
    script.send_signal(signal.SIGTERM)  # to the script alone, as --signal=B:TERM does
    output, _ = script.communicate(timeout=60)
    assert script.returncode != 0 and "saved: go on" in output, output
    assert (tmp_path / "out" / "ckpt.pt").exists()
    assert pathlib.Path(job["CALLS"]).read_text().endswith(f"requeue {job['SLURM_JOB_ID']}\n")


def test_the_scripts_settings_are_train_pys():
    names = re.findall(r"(?:train\.py|train\.sh config/\w+\.py) --(\w+)=", SCRIPT.read_text())
    assert {"init_from", "out_dir"} == set(names) <= vars(train.Settings()).keys()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_shellcheck_has_nothing_to_say():
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
