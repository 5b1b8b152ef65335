"""Workers that share a study on a real PostgreSQL: one is killed, and the server goes away and comes back."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

import pytest

from fusedgpt.studies import outcomes
from tests.fusedgpt.studies import fakes, workers

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


def trials(server, folder):
    """The trials of a study, by Optuna itself."""
    url = server.url.replace("postgresql:", "postgresql+psycopg:")
    return optuna.load_study(study_name=folder.name, storage=url).trials


def wait_for_a_trial(server, folder, process):
    """Wait until a worker runs a trial."""
    name = f"process {process.pid} on {socket.gethostname()}"  # how it names itself
    for _ in range(600):
        with contextlib.suppress(KeyError):  # the study does not exist yet
            if any(
                each.state.name == "RUNNING" and each.user_attrs.get("worker") == name
                for each in trials(server, folder)
            ):
                return
        time.sleep(0.1)
    raise AssertionError(f"{name} never had a trial")


def test_a_killed_worker_and_a_server_that_goes_away_cost_no_trial(tmp_path, server, tell):
    folder, code = tmp_path / "study", fakes.code(tmp_path / "code")
    flags = (SEARCH, "--trials=8", f"--storage={server.url}")
    first, *others = (workers.start(folder, code, *flags, pause=0.05, patience=60) for _ in range(3))
    wait_for_a_trial(server, folder, first)
    first.kill()
    first.communicate()
    wait_for_a_trial(server, folder, others[0])
    server.stop("immediate")
    time.sleep(1)
    server.start()
    waited = sum(text.count("the database is gone") for text in workers.finish(others))
    counted = [each for each in trials(server, folder) if each.state.name != "FAIL"]
    assert waited and [each.state.name for each in counted] == ["COMPLETE"] * 8
    names = [each.user_attrs["variant"] for each in counted]
    results = outcomes.read(folder)
    assert len(set(names)) == 8 and sorted(results.design.variants) == sorted(names)
    assert [each.status for each in results.outcomes] == ["finished"] * 8
    assert len((folder / "outcomes.jsonl").read_text().splitlines()) == 8
    tell(f"two workers waited {waited} times for the server")
