"""How threads wait: passively on a busy machine. Actively, a step of the quick start took 18 times as long there."""

import io
import os

import pytest

from fusedgpt.machine import waiting


@pytest.mark.parametrize(
    ("running", "ours", "cores", "found"),
    [
        (1, 2, 2, {}),  # this process alone
        (2, 2, 2, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (30, 2, 64, {}),  # a container with 2 of 64 cores, whose neighbours leave 35 free
        (64, 2, 64, {"OMP_WAIT_POLICY": "PASSIVE"}),
    ],
)
def test_threads_wait_passively_if_other_programs_want_their_cores(tmp_path, monkeypatch, running, ours, cores, found):
    (tmp_path / "loadavg").write_text(f"9.00 9.00 9.00 {running}/500 1234\n")
    monkeypatch.setattr(waiting, "LOADAVG", tmp_path / "loadavg")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(ours)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert waiting.passively_if_busy() == found
    stream = io.StringIO()
    waiting.announce(stream)
    assert ("wait passively" in stream.getvalue()) == bool(found)
    assert os.environ.get("OMP_WAIT_POLICY") == found.get("OMP_WAIT_POLICY")
    for name, value in (("OMP_WAIT_POLICY", "ACTIVE"), ("RANK", "0")):  # a user knows better; ranks saw each other
        with monkeypatch.context() as patch:
            patch.delenv("OMP_WAIT_POLICY", raising=False)
            patch.setenv(name, value)
            assert waiting.passively_if_busy() == {}
