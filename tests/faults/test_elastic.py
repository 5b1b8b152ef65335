"""Twenty workers die under torchrun, which restarts them. Each time training goes on, and nothing is lost."""

import os
import signal
import time

import pytest

from fusedgpt.runs import checkpoint
from tests.conftest import assert_same_bytes, flags, rows, small
from tests.faults.processes import rng
from tests.faults.torchrun import Torchrun
from tests.launch import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds the workers in Linux's /proc"),
]
DEATHS = {"ddp": 20, "fsdp": 8}
OPTIMIZERS = {"ddp": "adamw", "fsdp": "muon"}  # Muon's matrices are sent around between the ranks of fsdp
ITERATIONS = {"ddp": 2000, "fsdp": 400}  # fsdp ranks take longer for an iteration, and for a save
BOUND = 60  # most seconds from a death to the next step; it takes 3 to 10 on two cores, mostly to import PyTorch
SETTINGS = dict(eval_interval=20, eval_iters=2, dropout=0.1, gradient_accumulation_steps=2)


@pytest.mark.parametrize("parallel", DEATHS)
def test_many_deaths_and_nothing_is_lost(tmp_path, data, tell, parallel):
    # restarted workers found the addresses of dead ones in torchrun's store: they hung, or were refused a connection
    chance, when, recovered = rng(f"deaths {parallel}"), {"starting": 0, "training": 0}, []
    deaths, asked = DEATHS[parallel], dict(SETTINGS, parallel=parallel)
    asked |= dict(max_iters=ITERATIONS[parallel], optimizer=OPTIMIZERS[parallel])
    torchrun(2, "train.py", *flags(small(tmp_path / "whole", data, **asked)))
    settings = flags(small(tmp_path / "broken", data, **asked, init_from="auto"))
    # as many restarts as deaths, so that the run fails if one restart fails
    run = Torchrun("--standalone", "--nproc_per_node=2", f"--max_restarts={deaths}", "train.py", *settings)
    dead, died_at = set(), None
    try:
        for _ in range(deaths):
            workers = run.wait_for_workers(2, dead, BOUND)
            if chance.random() < 0.4:
                when["starting"] += 1
                time.sleep(chance.uniform(0, 4))
            else:
                when["training"] += 1
                wait_for_a_step(run, died_at, recovered)
                time.sleep(chance.uniform(0, 0.4))
            os.kill(chance.choice(sorted(workers)), signal.SIGKILL)
            dead, died_at = dead | workers, time.monotonic()
        run.wait_for_workers(2, dead, BOUND)
        wait_for_a_step(run, died_at, recovered)
        assert run.ended(BOUND) == 0, run.output[-5000:]
    finally:
        run.stop()
    assert "Traceback" not in run.output  # the survivors end with one sentence
    left = [checkpoint.load(tmp_path / name / "ckpt.pt")["model"] for name in ("broken", "whole")]
    assert_same_bytes(*left)
    assert rows(tmp_path / "broken", "eval") == rows(tmp_path / "whole", "eval")
    worst = f"at most {max(recovered):.1f} s to the next step"
    tell(f"{deaths} of {deaths} deaths of {parallel} recovered, {when}, {worst}")


def wait_for_a_step(run, died_at, recovered):
    run.wait_for_a_step(BOUND)
    if died_at:
        recovered.append(time.monotonic() - died_at)
