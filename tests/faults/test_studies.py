"""Workers that share a study on a real PostgreSQL: one is killed, and the server goes away and comes back."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

import pytest

from fusedgpt.studies import outcomes
from tests.fusedgpt.studies import fakes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
optuna = pytest.importorskip("optuna")
pytest.importorskip("psycopg")
pytest.importorskip("tyro")

SEARCH = "--search=learning_rate=1e-4..1e-1:log, optimizer=adamw|muon"


class Server:
    """A PostgreSQL of its own in `folder`. It refuses to run as root, so root starts it as another user."""

    def __init__(self, programs, folder):
        self.programs, self.folder = programs, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"postgresql://me@127.0.0.1:{self.port}/studies"
        self.user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
        if self.user:
            shutil.chown(folder, "postgres")
        self.call("initdb", "-D", folder / "data", "-A", "trust", "-U", "me", "--no-sync")

    def call(self, program, *args):
        command = [*self.user, self.programs / program, *map(str, args)]
        subprocess.run(command, check=True, cwd=self.folder, stdout=subprocess.DEVNULL)

    def start(self):
        how = f"-p {self.port} -h 127.0.0.1 -k {self.folder}"
        self.call("pg_ctl", "-D", self.folder / "data", "-l", self.folder / "log", "-o", how, "-w", "start")

    def stop(self, mode="fast"):
        self.call("pg_ctl", "-D", self.folder / "data", "-m", mode, "-w", "stop")


@pytest.fixture(scope="module")
def server():
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [shutil.which("initdb")]
    if not found[-1]:
        pytest.skip("needs the server of PostgreSQL: apt-get install postgresql")
    if os.getuid() == 0 and not shutil.which("setpriv"):
        pytest.skip("needs setpriv, of util-linux: PostgreSQL refuses to run as root")
    folder = pathlib.Path(tempfile.mkdtemp())  # pytest's folders are closed to other users
    server = Server(pathlib.Path(found[-1]).parent, folder)
    server.start()
    server.call("createdb", "-h", "127.0.0.1", "-p", server.port, "-U", "me", "studies")
    yield server
    with contextlib.suppress(subprocess.CalledProcessError):
        server.stop("immediate")
    shutil.rmtree(folder)


def wait_for_runs(folder, many):
    """Wait until so many runs have begun."""
    for _ in range(600):
        if len(list(folder.glob("runs/*/*/metrics.jsonl"))) >= many:
            return
        time.sleep(0.1)
    raise AssertionError(f"there were never {many} runs in {folder}")


def test_a_killed_worker_and_a_server_that_goes_away_cost_no_trial(tmp_path, server):
    folder, code = tmp_path / "study", fakes.code(tmp_path / "code")
    flags = (SEARCH, "--trials=8", f"--storage={server.url}")
    first, *others = (fakes.start(folder, code, *flags, pause=0.05) for _ in range(3))
    wait_for_runs(folder, 3)
    first.kill()
    first.communicate()
    wait_for_runs(folder, 4)
    server.stop("immediate")
    time.sleep(1)
    server.start()
    gave_up = 0
    for each in others:
        said = each.communicate(timeout=120)[0]
        assert each.returncode == 0 or ("the storage fails" in said and "give the same command again" in said), said
        gave_up += each.returncode != 0
    again = fakes.start(folder, code, *flags)
    assert again.wait(120) == 0, again.communicate()[0]
    storage = server.url.replace("postgresql:", "postgresql+psycopg:")
    trials = optuna.load_study(study_name=folder.name, storage=storage).trials  # by Optuna itself
    counted = [each for each in trials if each.state.name == "COMPLETE"]
    assert len(counted) >= 8 and not [each for each in trials if each.state.name == "RUNNING"]
    rows = (folder / "outcomes.jsonl").read_text().splitlines()
    names = [json.loads(row)["variant"] for row in rows]
    assert len(set(names)) == len(names) == len({each.user_attrs["variant"] for each in counted})  # nothing twice
    assert {o.status for o in outcomes.read(folder).outcomes} == {"finished"}
