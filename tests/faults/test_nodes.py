"""Two machines train one model. One is cut off, comes back, loses its power, and comes back again.

The machines are two network namespaces, joined by a cable (veth). They belong to processes of the test in a user
namespace, so that they need no rights and vanish with these processes.
"""

import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.conftest import assert_same_bytes, flags, rows, small, weights
from tests.faults.processes import finish, start
from tests.faults.torchrun import Torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TIMEOUT = 10  # --timeout: seconds that a process waits for another
SLACK = 10  # most seconds from then to the message, on a busy machine
BOUND = 90  # most seconds from the cable's return to the next step: TCP tells the far torchrun late
SETTINGS = dict(max_iters=500, eval_interval=50, eval_iters=2, dropout=0.1, gradient_accumulation_steps=2)
INSIDE = ["unshare", "--user", "--map-root-user", "--net"]


def why_not():
    """Why the machines cannot be made here, or None."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if not shutil.which(tool)]:
        return f"needs {missing[0]}, of util-linux or iproute2"
    made = subprocess.run([*INSIDE, "ip", "link", "add", "type", "veth"], capture_output=True, text=True, check=False)
    return f"needs network namespaces: {made.stderr.strip()}" if made.returncode else None


class Machine:
    """A network namespace. `beside`: the first machine, for the second."""

    def __init__(self, address, beside=None):
        self.address = address
        start = [*beside.enter, "unshare", "--net"] if beside else INSIDE
        self.holder = subprocess.Popen([*start, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
        self.holder.stdout.readline()  # said inside
        self.enter = ["nsenter", f"--target={self.holder.pid}", "--user", "--net", "--preserve-credentials"]

    def ip(self, *args):
        subprocess.run([*self.enter, "ip", *args], check=True)

    def start(self, rendezvous, settings):
        """One node of the run, with what docs/many-gpus.md says to set."""
        nodes = ["--nnodes=2", "--nproc_per_node=1", "--max_restarts=5", f"--local_addr={self.address}"]
        meet = ["--rdzv_backend=c10d", "--rdzv_id=1", f"--rdzv_endpoint={rendezvous.address}:29500"]
        # both machines have the same name, so tell torchrun which one is the host
        meet.append(f"--rdzv_conf=is_host={int(self is rendezvous)}")
        env = dict(GLOO_SOCKET_IFNAME="eth0", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        return Torchrun(*nodes, *meet, "train.py", *flags(settings), prefix=self.enter, **env)


@pytest.fixture
def machines():
    if reason := why_not():
        pytest.skip(reason)
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


def test_a_machine_is_cut_off_and_loses_power_and_nothing_is_lost(tmp_path, data, machines, tell):
    first, second = machines
    finish(start(small(tmp_path / "whole", data, **SETTINGS), tmp_path / "log", 2), tmp_path / "log")
    settings = small(tmp_path / "broken", data, **SETTINGS, init_from="auto", timeout=TIMEOUT)
    here, there = runs = [machine.start(first, settings) for machine in machines]
    try:
        wait_for_a_step(here)
        cut_at = cut(second)
        noticed = [wait_for_the_message(run, cut_at) for run in runs]
        second.ip("link", "set", "eth0", "up")
        back = [wait_for_a_step(here)]

        cut_at = cut(second)
        lose_power(there)
        noticed.append(wait_for_the_message(here, cut_at))
        second.ip("link", "set", "eth0", "up")
        runs[1] = second.start(first, settings)
        back.append(wait_for_a_step(here))
        for run in runs:
            assert run.ended(240) == 0, run.output[-5000:]
    finally:
        for run in runs:
            run.stop()
    assert "Traceback" not in here.output
    assert_same_bytes(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    assert rows(tmp_path / "broken", "eval") == rows(tmp_path / "whole", "eval")
    tell(f"noticed after {noticed} s, of which timeout={TIMEOUT}; the next step {back} s after the return")


def cut(machine):
    """Take a machine off the network, without a packet that says so. Returns the time."""
    machine.ip("link", "set", "eth0", "down")
    return time.monotonic()


def wait_for_a_step(run):
    """The seconds until a start of the run has done a step."""
    began = time.monotonic()
    run.wait_for_a_step(BOUND)
    return round(time.monotonic() - began, 1)


def wait_for_the_message(run, since):
    """Wait for the one sentence that a process ends with. Returns the seconds from `since`."""
    message = run.wait_for("error: ", TIMEOUT + SLACK)
    assert "another process has ended or cannot be reached" in message
    return round(time.monotonic() - since, 1)


def lose_power(run):
    (worker,) = run.workers()
    for pid in (run.process.pid, worker):
        os.kill(pid, signal.SIGKILL)
