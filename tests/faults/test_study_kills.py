"""A study that is killed again and again ends with the table of an unbroken one."""

import signal
import sys
import time

import pytest

from fusedgpt.runs.metrics import Run
from fusedgpt.studies import outcomes, report
from tests.faults.processes import rng
from tests.fusedgpt.studies import fakes
from tests.fusedgpt.studies.test_runner import plan, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere runs outlive a study that was killed"),
]

RATES = {f"learning_rate={rate}": {"learning_rate": rate} for rate in (0.01, 100.0)}


def broken_off(folder, code, chance, kills):
    """Run a study to its end, killing it `kills` times; how often it was killed."""
    killed, study = 0, start(folder, code, 0.1)
    while True:
        time.sleep(chance.uniform(0.3, 3))
        if study.poll() is not None:
            if study.returncode == 0:
                return killed
            study = start(folder, code, 0.1)
        elif killed < kills:
            study.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            killed += 1
            study.wait()


def test_a_study_that_is_killed_again_and_again_ends_with_the_same_table(tmp_path):
    code, tables = fakes.code(tmp_path / "code"), []
    for name in ("whole", "broken"):
        folder = tmp_path / name
        folder.mkdir()
        plan(RATES, max_iters=30).save(folder)
        if name == "whole":
            assert start(folder, code, 0).wait() == 0
        else:
            killed = broken_off(folder, code, rng("study"), kills=8)
        found = outcomes.read(folder)
        runs = [Run(outcomes.folder_of(folder, o.variant, o.seed)) for o in found.outcomes]
        ended = [(o.variant, o.seed, o.status, repr(o.value)) for o in found.outcomes]
        losses = [repr(run.train["loss"].tolist()) for run in runs]
        tables.append((ended, losses, report.sentences(found), report.markdown(found)))
        assert {o.status for o in found.outcomes} == {"finished", "diverged"}
    assert killed and tables[0] == tables[1]
