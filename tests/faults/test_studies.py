"""Workers that share a study on a real PostgreSQL: one is killed, and the server goes away and comes back."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import pytest

from fusedgpt.runs.metrics import read_metrics
from fusedgpt.studies import outcomes
from tests.conftest import TINY, wait_for
from tests.fusedgpt.studies import fakes, workers
from tests.launch import ROOT

pytestmark = pytest.mark.slow
optuna = pytest.importorskip("optuna")
pytest.importorskip("psycopg")
pytest.importorskip("tyro")

SEARCH = "--search=learning_rate=1e-4..1e-1:log, optimizer=adamw|muon"


class Server:
    """A PostgreSQL of its own in `folder`. It refuses to run as root, so root starts it as another user."""

    def __init__(self, programs, folder):
        self.programs, self.folder = programs, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://me@127.0.0.1:{self.port}/studies"
        self.user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
        if self.user:
            shutil.chown(folder, "postgres")
        self.call("initdb", "-D", folder / "data", "-A", "trust", "-U", "me")

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
    """The trials of a study that count, by Optuna itself, and how many broke off."""
    url = server.url.replace("postgresql:", "postgresql+psycopg:")
    found = optuna.load_study(study_name=folder.name, storage=url).trials
    counted = [each for each in found if each.state.name != "FAIL"]
    return counted, len(found) - len(counted)


def assert_each_once(server, folder, number, seeds=1):
    """The study has `number` trials that ended well, and its folder has the same."""
    counted, broken = trials(server, folder)
    assert [each.state.name for each in counted] == ["COMPLETE"] * number
    names = [each.user_attrs["variant"] for each in counted]
    assert len(set(names)) == number
    results = outcomes.read(folder)
    assert sorted(results.design.variants) == sorted(names)
    assert [each.status for each in results.outcomes] == ["finished"] * number * seeds
    lines = (folder / "outcomes.jsonl").read_text().splitlines()
    assert len(lines) == number * seeds
    return broken


def test_three_workers_one_of_which_is_killed_do_each_trial_once(tmp_path, data, server, tell):
    folder = tmp_path / "three-workers"
    settings = TINY | dict(gradient_accumulation_steps=1, max_iters=400, eval_interval=20, eval_iters=2, warmup_iters=1)
    settings |= dict(lr_decay_iters=400, log_interval=1, device="cpu", dtype="float32", compile=False, dataset=data)
    settings |= dict(study_dir=folder, trials=8, storage=server.url, attention="auto")
    flags = (SEARCH, *(f"--{name}={value}" for name, value in settings.items()))
    all_three = [workers.start(folder, ROOT, *flags) for _ in range(3)]
    victim = all_three[1]
    variant = wait_for_a_trial(server, folder, victim)
    wait_for(outcomes.folder_of(folder, variant, 1) / "ckpt.pt", 60)
    victim.kill()
    steps = len(read_metrics(outcomes.folder_of(folder, variant, 1), "train"))
    victim.communicate()
    workers.finish([all_three[0], all_three[2]], timeout=300)

    broken = assert_each_once(server, folder, number=8)
    (again,) = (each for each in trials(server, folder)[0] if each.user_attrs["variant"] == variant)
    assert again.user_attrs["worker"] != name_of(victim)
    results = outcomes.read(folder)
    (run,) = (each.run for each in results.outcomes if each.variant == variant)
    assert run.record["settings"]["init_from"] == "resume"
    assert list(run.train["iter"]) == list(range(400))
    assert len({each.run.record["attention"] for each in results.outcomes}) == 1 and results.differences == []
    tell(f"killed after {steps} steps of {variant}; {broken} trial(s) broke off and were queued again")


def name_of(process):
    """How a worker names itself."""
    return f"process {process.pid} on {socket.gethostname()}"


def wait_for_a_trial(server, folder, process):
    """Wait until a worker runs a trial; its variant."""
    for _ in range(600):
        with contextlib.suppress(KeyError):  # the study does not exist yet
            for each in trials(server, folder)[0]:
                attributes, runs = each.user_attrs, each.state.name == "RUNNING"
                if runs and attributes.get("worker") == name_of(process) and "settings" in attributes:
                    return attributes["variant"]
        time.sleep(0.1)
    raise AssertionError(f"{name_of(process)} never had a trial")


def test_a_server_that_goes_away_is_waited_for(tmp_path, server, tell):
    folder, code = tmp_path / "gone-for-a-moment", fakes.code(tmp_path / "code")
    flags = (SEARCH, "--trials=20", f"--storage={server.url}", "--seed=1,2")
    both = [workers.start(folder, code, *flags, patience=30) for _ in range(2)]
    for each in both:
        wait_for_a_trial(server, folder, each)
    for mode in ("fast", "immediate"):
        server.stop(mode)
        time.sleep(1)
        server.start()
        time.sleep(2)
    said = workers.finish(both)
    broken = assert_each_once(server, folder, number=20, seeds=2)
    waited = sum(text.count("the database is gone") for text in said)
    assert waited
    tell(f"two workers waited {waited} times for the server; {broken} trial(s) broke off and were queued again")


def test_a_server_that_stays_away_ends_workers_with_a_sentence_and_loses_nothing(tmp_path, server):
    folder, code = tmp_path / "gone-for-good", fakes.code(tmp_path / "code")
    flags = (SEARCH, "--trials=6", f"--storage={server.url}")
    both = [workers.start(folder, code, *flags, pause=0.05) for _ in range(2)]
    for each in both:
        wait_for_a_trial(server, folder, each)
    wait_for(folder / "outcomes.jsonl", 60)
    server.stop()
    try:
        for each in both:
            said, _ = each.communicate(timeout=60)
            assert each.returncode == 1, said
            (error,) = re.findall("^error: .*", said, re.M)
            assert "nothing is lost: give the same command once it is back" in error and "Traceback" not in said
        done = (folder / "outcomes.jsonl").read_text()
    finally:
        server.start()
    workers.finish([workers.start(folder, code, *flags)])
    assert_each_once(server, folder, number=6)
    assert (folder / "outcomes.jsonl").read_text().startswith(done)


def test_a_worker_that_is_told_to_stop_gives_its_trial_back(tmp_path, server):
    folder, code = tmp_path / "stopped", fakes.code(tmp_path / "code")
    flags = (SEARCH, "--trials=4", f"--storage={server.url}")
    stopped = workers.start(folder, code, *flags, pause=0.05)
    wait_for(outcomes.folder_of(folder, "learning_rate=0.001+optimizer=adamw", 1) / "ckpt.pt", 60)
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate(timeout=30)
    assert stopped.returncode != 0
    counted, _ = trials(server, folder)
    assert [each.state.name for each in counted] == ["WAITING"]  # at once, with no heartbeat to wait for
    workers.finish([workers.start(folder, code, *flags)])
    assert assert_each_once(server, folder, number=4) == 1


def test_one_database_holds_many_studies(tmp_path, server):
    code = fakes.code(tmp_path / "code")
    for name in ("one", "two"):
        workers.finish([workers.start(tmp_path / name, code, SEARCH, "--trials=1", f"--storage={server.url}")])
        assert_each_once(server, tmp_path / name, number=1)
