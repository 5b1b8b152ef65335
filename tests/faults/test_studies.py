"""Studies that are killed again and again, and workers that share one on a real PostgreSQL, which goes away too."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from fusedgpt.runs.metrics import LoggedRun
from fusedgpt.studies import outcomes, study_report
from tests.faults.processes import rng
from tests.fusedgpt.studies import fakes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
optuna = pytest.importorskip("optuna")
psycopg = pytest.importorskip("psycopg")
pytest.importorskip("tyro")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere runs outlive a study that was killed")
def test_a_study_that_is_killed_again_and_again_ends_with_the_same_table(tmp_path):
    code, chance, tables = fakes.code(tmp_path / "code"), rng("study"), []
    flags = ("--learning_rate=0.01,100.0", "--seed=1,2", "--max_iters=30", "--jobs=2")
    for folder, kills in ((tmp_path / "whole", 0), (tmp_path / "broken", 8)):
        statuses = []
        for _ in range(kills):
            study = fakes.start(folder, code, *flags, pause=0.1)
            time.sleep(chance.uniform(0.3, 4))
            study.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            study.communicate()
            statuses.append(study.returncode)
        assert any(statuses) == bool(kills)  # not all came after its end
        last = fakes.start(folder, code, *flags)
        assert last.wait(120) == 0, last.communicate()[0]
        found = outcomes.read(folder)
        ended = [(o.variant, o.seed, o.status, repr(o.value)) for o in found.outcomes]
        losses = [LoggedRun(outcomes.folder_of(folder, *each[:2])).train["loss"].tolist() for each in ended]
        tables.append((ended, repr(losses), study_report.sentences(found), study_report.markdown(found)))
    assert tables[0] == tables[1] and {each[2] for each in ended} == {"finished", "diverged"}


class Server:
    """A PostgreSQL of its own, at `url`. It refuses to run as root, so root starts it as another user."""

    def __init__(self, programs):
        self.programs, self.user = programs, []
        self.folder = pathlib.Path(tempfile.mkdtemp())  # pytest's folders are closed to other users
        self.url = f"postgresql://me@/postgres?host={self.folder}"
        if os.getuid() == 0:
            self.user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            shutil.chown(self.folder, "postgres")
        self.call("initdb", "-A", "trust", "-U", "me", "--no-sync")

    def call(self, program, *args):
        command = [*self.user, self.programs / program, "-D", self.folder / "data", *args]
        subprocess.run(command, check=True, cwd=self.folder, stdout=subprocess.DEVNULL)

    def start(self):
        self.call("pg_ctl", "-l", self.folder / "log", "-o", f"-h '' -k {self.folder}", "-w", "start")

    def stop(self):
        self.call("pg_ctl", "-m", "immediate", "-w", "stop")


@pytest.fixture
def server():
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [shutil.which("initdb")]
    if not found[-1]:
        pytest.skip("needs the server of PostgreSQL: apt-get install postgresql")
    server = Server(pathlib.Path(found[-1]).parent)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(server.folder)


def test_a_killed_worker_and_a_server_that_goes_away_cost_no_trial(tmp_path, server):
    folder, code = tmp_path / "study", fakes.code(tmp_path / "code")
    flags = ("--search=learning_rate=1e-4..1e-1:log, optimizer=adamw|muon", "--trials=8", f"--storage={server.url}")
    first, *others = (fakes.start(folder, code, *flags, pause=0.05) for _ in range(3))
    while len(list(folder.glob("runs/*/*/metrics.jsonl"))) < 3:
        time.sleep(0.1)
    first.kill()
    first.communicate()
    while len(list(folder.glob("runs/*/*/metrics.jsonl"))) < 4:
        time.sleep(0.1)
    server.stop()
    time.sleep(1)
    server.start()
    for each in others:
        said = each.communicate(timeout=120)[0]
        assert each.returncode == 0 or ("the storage fails" in said and "give the same command again" in said), said
    time.sleep(5)  # past the grace of trials whose workers have ended
    again = fakes.start(folder, code, *flags, "--trials=10")  # two workers end with nine at most
    assert again.wait(120) == 0, again.communicate()[0]
    storage = server.url.replace("postgresql:", "postgresql+psycopg:")
    trials = optuna.load_study(study_name=folder.name, storage=storage).trials  # by Optuna itself
    counted = [each for each in trials if each.state.name == "COMPLETE"]
    left = "SELECT * FROM trials NATURAL JOIN trial_heartbeats WHERE state = 'RUNNING'"
    with psycopg.connect(server.url) as database:  # Optuna leaves a trial as it is that had no heartbeat yet
        assert len(counted) >= 10 and not database.execute(left).fetchall()
    found = outcomes.read(folder).outcomes
    assert len(found) == len({each.user_attrs["variant"] for each in counted})
    assert (folder / "outcomes.jsonl").read_text().count("\n") == len(found)  # nothing twice
    assert {o.status for o in found} == {"finished"}
