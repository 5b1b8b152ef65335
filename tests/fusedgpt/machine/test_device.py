"""What the settings device and dtype mean on this machine."""

import os
import subprocess
import sys

import pytest
import torch

from fusedgpt.errors import UserError
from fusedgpt.machine import device
from fusedgpt.machine.device import DTYPES, resolve_device, resolve_dtype
from tests.conftest import ROOT

CPU = torch.device("cpu")


def test_device_and_dtype_are_resolved():
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert resolve_device("auto").type == best
    assert resolve_device("cpu") == CPU
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("auto", CPU) in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "used", "dtype"),
    [
        ("avx512_bf16", True, "bfloat16"),
        ("amx_tile", True, "bfloat16"),
        ("avx2", True, "float32"),
        ("avx512_bf16", False, "float32"),
    ],
)
def test_auto_dtype_on_a_cpu_follows_its_instructions(monkeypatch, capability, used, dtype):
    # T24: bfloat16 used to be assumed; and with ONEDNN_MAX_CPU_ISA=AVX2 it still was, 10 times slower
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: used)
    assert resolve_dtype("auto", CPU) == DTYPES[dtype]


def test_bfloat16_on_a_cpu_without_it_is_a_warning(monkeypatch, recwarn):
    # config/bench_blog.py asks for it, and a step of GPT-2 124M would take 20 minutes
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    device._warn_once.cache_clear()
    for _ in range(2):
        assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    assert len(recwarn) == 1
    assert "takes many times as long as for float32: give --dtype=float32" in str(recwarn.pop(UserWarning).message)


def test_a_device_that_is_not_here_is_named():
    with pytest.raises(UserError, match="'tpu' is no device"):
        resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device='cuda' is not here: PyTorch finds cpu"):
            resolve_device("cuda")


COMPILE = """
from fusedgpt.machine import device
import torch
torch.compile(lambda x: x * 2 + 1)(torch.ones(8))
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.usefixtures("compiler")
def test_a_graph_made_for_fewer_instructions_is_not_run_with_more(tmp_path):
    # make test-avx2 used to leave graphs with which a later make test lost its heap: "double free or corruption"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(tmp_path)}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    hits = [
        int(subprocess.check_output([sys.executable, "-c", COMPILE], env=environment | fewer, cwd=ROOT))
        for fewer in ({"ATEN_CPU_CAPABILITY": "avx2"}, {}, {})
    ]
    assert hits == [0, 0, 1]  # the last shows that a hit would be seen
