"""Bytes at the peak."""

import math
import sys
import types

import pytest
import torch

from fusedgpt.machine import memory
from fusedgpt.machine.memory import peak_bytes
from tests.conftest import script

MIB = 1 << 20


def test_peak_bytes_are_those_held_at_once(device):
    def held(*sizes):
        return torch.empty(sum(sizes), dtype=torch.uint8, device=device)

    def one_after_the_other():
        held(2 * MIB)
        held(4 * MIB)

    def together():
        return held(2 * MIB), held(4 * MIB)

    for step, mib in ((one_after_the_other, 4), (together, 6), (lambda: None, 0)):
        assert peak_bytes(step, device) == mib * MIB


def test_bandwidth_is_bytes_a_second(device, monkeypatch):
    assert 1e8 < memory.bandwidth(device) < 1e14
    monkeypatch.setattr(memory.timing, "samples", lambda *_, **__: [1.0, 2.0, 90.0])  # milliseconds: the median counts
    assert memory.bandwidth(torch.device("cpu")) == 2**30 / 2e-3


def test_what_a_system_does_not_say_is_no_number(monkeypatch):
    # on Windows each report of a run ended it: it has neither resource nor os.sysconf
    cpu = torch.device("cpu")
    assert 0 < memory.peak_memory(cpu) < memory.total_memory(cpu) < math.inf
    monkeypatch.setattr(memory, "sys", types.SimpleNamespace(platform="win32"))
    monkeypatch.setattr(memory, "resource", None)
    monkeypatch.delattr(memory.os, "sysconf")
    assert math.isnan(memory.peak_memory(cpu)) and memory.total_memory(cpu) == math.inf and memory.page_faults() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_of_this_process_and_remembers():
    # getrusage starts a child with the peak of its parent
    code = """
import torch
from fusedgpt.machine.memory import peak_memory
cpu = torch.device("cpu")
before = peak_memory(cpu)
torch.ones(64 << 20, dtype=torch.uint8)
print(peak_memory(cpu) - before)
"""
    parent = (
        f"import subprocess, sys; x = b'x' * (1 << 29); subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    )
    assert 60 * MIB < int(script("-c", parent).stdout) < 80 * MIB


def test_the_machine_has_at_least_what_this_process_holds(device):
    assert memory.peak_memory(device) < memory.total_memory(device) < 1 << 50
