"""The memory of a process, a machine and a container."""

import builtins
import io
import math
import types

import pytest
import torch

from fusedgpt.machine import memory


def test_what_a_system_does_not_say_is_no_number(monkeypatch):
    # on Windows each report of a run ended it: it has no os.sysconf
    cpu = torch.device("cpu")
    assert 0 < memory.peak_memory(cpu) < memory.total_memory(cpu) < math.inf
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", lambda *_, **__: io.StringIO("VmSize: 9 kB\n"))  # as in gVisor
        assert math.isnan(memory.peak_memory(cpu))
    monkeypatch.setattr(memory, "sys", types.SimpleNamespace(platform="win32"))
    assert math.isnan(memory.peak_memory(cpu)) and memory.total_memory(cpu) == math.inf
    assert memory.free_memory(cpu) == math.inf


@pytest.mark.parametrize(
    ("own", "limits", "least"),
    [
        ("0::/\n", {"memory.max": "4096000\n"}, 4096000),  # in a container
        ("0::/a/b\n", {"a/memory.max": "8192000", "a/b/memory.max": "max\n"}, 8192000),  # the parent's
        ("0::/a\n", {"b/memory.max": "4096"}, None),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "4096000"}, None),  # version 1
    ],
)
def test_the_limit_of_a_container_is_its_memory(tmp_path, monkeypatch, own, limits, least):
    # a model that fits the host alone was built in a container, which was killed for it without a word
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    (tmp_path / "own").write_text(own)
    machine = memory.total_memory(cpu)
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit)
        (tmp_path / name).with_name("memory.stat").write_text("file 9\nanon 4000000\nanon_thp 7\n")
    assert memory.total_memory(cpu) == (machine if least is None else least)
    # of 4 GiB a container held 3.9, and 4 were free: contenders were built there until the kernel killed one
    assert least is None or memory.free_memory(cpu) == least - 4000000
