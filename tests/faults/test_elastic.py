"""Workers die under torchrun, which restarts them. Each time training goes on, and nothing is lost."""

import os
import signal
import time

import pytest

from fusedgpt.runs import checkpoint
from tests.conftest import assert_same_bytes, flags, rows, small
from tests.faults.processes import rng
from tests.faults.torchrun import Torchrun
from tests.launch import ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds the workers in Linux's /proc"),
]
BOUND = 90  # most seconds from a death to the next step; it takes 3 to 10 on two cores, mostly to import PyTorch
# Muon's matrices are sent around between the ranks of fsdp
SETTINGS = dict(parallel="fsdp", optimizer="muon", max_iters=150, eval_interval=10, eval_iters=2, dropout=0.1)
SETTINGS |= dict(gradient_accumulation_steps=2)


def test_after_deaths_at_the_start_and_in_training_nothing_is_lost(tmp_path, data):
    # restarted workers found the addresses of dead ones in torchrun's store: they hung, or were refused a connection
    chance, dead = rng("deaths"), set()
    whole, settings = (small(tmp_path / name, data, **SETTINGS, init_from="auto") for name in ("whole", "broken"))
    ranks(2, "train.py", *flags(whole))
    # as many restarts as deaths, so that the run fails if one restart fails
    run = Torchrun("--standalone", "--nproc_per_node=2", "--max_restarts=2", "train.py", *flags(settings))
    try:
        for starting in (False, True):
            workers = run.wait_for_workers(2, dead, BOUND)
            if starting:
                time.sleep(chance.uniform(0, 4))
            else:
                run.wait_for_a_step(BOUND)
                time.sleep(chance.uniform(0, 0.4))
            os.kill(chance.choice(sorted(workers)), signal.SIGKILL)
            dead |= workers
        run.wait_for_workers(2, dead, BOUND)
        run.wait_for_a_step(BOUND)
        assert run.ended(BOUND) == 0, run.output[-5000:]
    finally:
        run.stop()
    assert "Traceback" not in run.output  # the survivors end with one sentence
    left = [checkpoint.load(tmp_path / name / "ckpt.pt")["model"] for name in ("broken", "whole")]
    assert_same_bytes(*left)
    assert rows(tmp_path / "broken", "eval") == rows(tmp_path / "whole", "eval")
