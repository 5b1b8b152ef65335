"""A worker dies under torchrun, and a machine loses its network and its power. Training goes on, and nothing is lost.

The machines are two network namespaces, joined by a cable (veth). They belong to processes of the test in a user
namespace, so that they need no rights and vanish with these processes.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from fusedgpt.runs import checkpoint
from tests.conftest import assert_same_bytes, flags, rows, small
from tests.faults.processes import Background, finish, rng, start, succeeds_or_skips

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds the workers in Linux's /proc"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
BOUND = 120  # most seconds until a run that goes on has ended; most of it is to import PyTorch
SETTINGS = dict(max_iters=100, eval_interval=10, eval_iters=2, dropout=0.1, gradient_accumulation_steps=2)
TIMEOUT = 5  # --timeout: seconds that a process waits for another
SLACK = 10  # most seconds from then to the message, on a busy machine
INSIDE = ["unshare", "--user", "--map-root-user", "--net"]


def workers(run):
    """The process ids of torchrun's workers."""
    return [*map(int, pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())]


def assert_nothing_is_lost(out_dir, data, **settings):
    """A run has the weights and the evaluations of one with the same `settings` in which nothing died."""
    whole = out_dir.with_name("whole")
    log = out_dir.with_name("log")
    finish(start(small(whole, data, **settings), log, 2), log)
    assert_same_bytes(*(checkpoint.load(folder / "ckpt.pt")["model"] for folder in (out_dir, whole)))
    assert rows(out_dir, "eval") == rows(whole, "eval")


def test_after_the_death_of_a_worker_nothing_is_lost(tmp_path, data):
    # restarted workers found the addresses of dead ones in torchrun's store: they hung, or were refused a connection
    settings = SETTINGS | dict(parallel="fsdp", optimizer="muon")  # whose matrices are sent around between the ranks
    asked = flags(small(tmp_path / "out", data, **settings, init_from="auto"))
    run = Background(*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max_restarts=1", "train.py", *asked)
    chance = rng("deaths")
    try:
        run.says("iter ")
        time.sleep(chance.uniform(0, 0.4))
        os.kill(chance.choice(workers(run)), signal.SIGKILL)
        assert run.wait(BOUND) == 0, run.output()[-5000:]
    finally:
        run.terminate()  # a kill would leave the workers behind
        run.wait(60)
    said = run.output()
    assert said.count("tokens per iteration") == 2 and "Traceback" not in said  # the survivor ends with one sentence
    assert_nothing_is_lost(tmp_path / "out", data, **settings)


class Machine:
    """A network namespace. `beside`: the first machine, for the second."""

    def __init__(self, address, beside=None):
        self.address = address
        enter = [*beside.enter, "unshare", "--net"] if beside else INSIDE
        self.holder = subprocess.Popen([*enter, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
        self.holder.stdout.readline()  # said inside
        self.enter = ["nsenter", f"--target={self.holder.pid}", "--user", "--net", "--preserve-credentials"]

    def ip(self, *args):
        subprocess.run([*self.enter, "ip", *args], check=True)

    def start(self, host, settings):
        """One node of the run, with what docs/many-gpus.md says to set."""
        nodes = ["--nnodes=2", "--nproc_per_node=1", "--max_restarts=5", f"--local_addr={self.address}"]
        meet = ["--rdzv_backend=c10d", "--rdzv_id=1", f"--rdzv_endpoint={host.address}:29500"]
        # both machines have the same name, so tell torchrun which one is the host
        meet.append(f"--rdzv_conf=is_host={int(self is host)}")
        env = dict(GLOO_SOCKET_IFNAME="eth0", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        return Background(*self.enter, *TORCHRUN, *nodes, *meet, "train.py", *flags(settings), **env)


@pytest.fixture
def machines():
    for command in ([*INSIDE, "ip", "link", "add", "type", "veth"], ["nsenter", "--version"]):
        succeeds_or_skips(command)
    first = Machine("10.0.0.1")
    second = Machine("10.0.0.2", beside=first)
    first.ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second.holder.pid))
    for machine in (first, second):
        machine.ip("address", "add", f"{machine.address}/24", "dev", "eth0")
        machine.ip("link", "set", "lo", "up")
        machine.ip("link", "set", "eth0", "up")
    yield first, second
    for machine in (first, second):
        machine.holder.kill()
        machine.holder.wait()


def test_a_machine_loses_its_network_and_its_power_and_nothing_is_lost(tmp_path, data, machines):
    first, second = machines
    settings = SETTINGS | dict(max_iters=250, eval_interval=50)
    asked = small(tmp_path / "out", data, **settings, init_from="auto", timeout=TIMEOUT)
    here, there = runs = [machine.start(first, asked) for machine in machines]
    try:
        here.says("iter ")
        second.ip("link", "set", "eth0", "down")  # no packet says so
        for run in runs:
            assert "another process has ended or cannot be reached" in run.says("error: ", TIMEOUT + SLACK)
        for pid in (*workers(there), there.pid):
            os.kill(pid, signal.SIGKILL)
        second.ip("link", "set", "eth0", "up")
        runs.append(second.start(first, asked))
        for run in (here, runs[-1]):
            assert run.wait(BOUND) == 0, run.output()[-5000:]
    finally:
        for run in runs:
            run.terminate()
            run.wait(60)
    assert "Traceback" not in here.output()
    assert_nothing_is_lost(tmp_path / "out", data, **settings)
