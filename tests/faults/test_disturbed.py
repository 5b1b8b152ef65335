"""A row that is measured while other processes use every core is marked as disturbed."""

import functools
import os
import subprocess
import sys
import time

import pytest
import torch

from fusedgpt.bench import disturbance
from fusedgpt.machine import timing

pytestmark = pytest.mark.slow


def measure(spec):
    """A row that computes for a second of CPU time."""
    end = time.process_time() + 1
    while time.process_time() < end:
        pass
    return {"status": "measured", "median_ms": 1.0, "p10_ms": 1.0, "p90_ms": 1.0}


@pytest.mark.skipif(sys.platform != "linux", reason="only there the system says how often it took the CPU away")
def test_busy_processes_disturb_a_row():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        time.sleep(0.5)
        row = disturbance.bracketed(measure, {}, functools.partial(timing.reference, torch.device("cpu")))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    (judged,) = disturbance.judged([row])
    assert not disturbance.comparable(judged), row["reference"]
