"""slurm/train.sh, with stand-ins for SLURM's commands, trains, and requeues itself if its time is up."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import flags, small
from tests.launch import ROOT

SCRIPT = ROOT / "slurm" / "train.sh"
COMMANDS = {  # stand-ins for SLURM's, on one node
    "srun": 'shift\nexec "$@"',  # without its option
    "scontrol": 'echo "$@" >> "$CALLS"\n[ "$1" = show ] && echo localhost',
}
UNTIL_TERM = "trap 'echo saved; exit 143' TERM\necho waits\nwhile :; do sleep 0.05; done"


def start(folder, *args, **stand_ins):
    """The script in a job on one node; calls of scontrol go to the file `calls` in `folder`."""
    for name, body in (COMMANDS | stand_ins).items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    job = dict(SLURM_JOB_ID="1234567", SLURM_JOB_NODELIST="localhost", SLURM_JOB_NUM_NODES="1", SLURM_GPUS_ON_NODE="2")
    job |= dict(PATH=path, CALLS=str(folder / "calls"))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(["bash", str(SCRIPT), *args], cwd=ROOT, env=os.environ | job, **pipes)


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_that_runs_to_its_end_is_not_queued_again(tmp_path, status):
    job = start(tmp_path, "--seed=5", python=f'echo "$@"\nexit {status}')
    said, _ = job.communicate(timeout=60)
    assert job.returncode == status
    assert "--nnodes=1 --nproc_per_node=2" in said and "--rdzv_endpoint=localhost:24567" in said
    assert said.endswith("train.py --init_from=auto --seed=5\n")
    assert (tmp_path / "calls").read_text() == "show hostnames localhost\n"


def test_a_job_whose_time_is_up_waits_for_the_save_and_is_queued_again(tmp_path):
    job = start(tmp_path, python=UNTIL_TERM)
    assert job.stdout.readline() == "waits\n"
    job.send_signal(signal.SIGTERM)  # to the script alone, as --signal=B:TERM does
    said, _ = job.communicate(timeout=60)
    assert job.returncode != 0 and said == "saved\n"
    assert (tmp_path / "calls").read_text().endswith("requeue 1234567\n")


@pytest.mark.slow
def test_a_run_under_torchrun_saves_when_the_time_of_its_job_is_up(tmp_path, data):
    endless = small(tmp_path / "out", data, max_iters=100_000, eval_interval=100_000, gradient_accumulation_steps=2)
    job = start(tmp_path, *flags(endless), "--init_from=auto")
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 10):
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=90)
    assert job.returncode != 0 and "saved: go on" in said, said
    assert (tmp_path / "out" / "ckpt.pt").exists()
