"""What the settings device and dtype mean on this machine."""

import os
import subprocess
import sys
import time

import pytest
import torch
from torch._inductor import config

from fusedgpt.errors import UserError
from fusedgpt.machine import device
from fusedgpt.machine.device import DTYPES, cuda_graphs, require_no_accumulation, resolve_device, resolve_dtype
from tests.launch import ROOT

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
    monkeypatch.setattr(device, "_bfloat16_is_faster", lambda: True)
    assert resolve_dtype("auto", CPU) == DTYPES[dtype]


@pytest.mark.skipif(not device.cpu_multiplies_bfloat16(), reason="this CPU has no instructions for bfloat16")
def test_auto_takes_bfloat16_on_a_cpu_only_if_products_gain_by_it(monkeypatch):
    # an Intel Xeon without AMX has the instructions, and GPT-2 124M trained 1.7 times as long in bfloat16 there
    least = dict.fromkeys(DTYPES.values(), float("inf"))
    for _ in range(10):
        for dtype in (torch.float32, torch.bfloat16):
            a, began = torch.ones(1024, 768).to(dtype), time.process_time()
            a @ a.T
            least[dtype] = min(least[dtype], time.process_time() - began)
    faster = torch.bfloat16 if least[torch.bfloat16] < least[torch.float32] else torch.float32
    assert resolve_dtype("auto", CPU) == faster
    monkeypatch.setattr(device, "_bfloat16_is_faster", lambda: faster == torch.float32)
    assert resolve_dtype("auto", CPU) != faster


def test_bfloat16_on_a_cpu_without_it_is_a_warning(monkeypatch, recwarn):
    # config/bench_blog.py asks for it, and a step of GPT-2 124M would take 20 minutes
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    device._warn_once.cache_clear()
    for _ in range(2):
        assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    assert len(recwarn) == 1
    assert "float32 is many times as fast: give --dtype=float32" in str(recwarn.pop(UserWarning).message)


def test_a_device_that_is_not_here_is_named():
    with pytest.raises(UserError, match="'tpu' is unknown to PyTorch"):
        resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device='cuda' is not here: PyTorch finds cpu"):
            resolve_device("cuda")


@pytest.mark.parametrize(("name", "why"), [("cuda", "is not here"), ("xpu", "is not supported")])
def test_an_accelerator_that_we_do_not_support_is_named(name, why, monkeypatch):
    # on a machine with an Intel GPU it said that PyTorch finds cpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    with pytest.raises(UserError) as raised:
        resolve_device(name)
    names = "auto, cpu, cuda, cuda:1 or mps"
    assert str(raised.value) == f"device='{name}' {why}: PyTorch finds xpu on this machine. --device can be {names}"


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
    # to compile the headers beforehand takes longer than one small kernel with them
    environment |= {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    hits = [
        int(subprocess.check_output([sys.executable, "-c", COMPILE], env=environment | fewer, cwd=ROOT))
        for fewer in ({"ATEN_CPU_CAPABILITY": "avx2"}, {}, {})
    ]
    assert hits == [0, 0, 1]  # the last shows that a hit would be seen


def test_cuda_graphs_count_only_if_pytorch_left_none_out(monkeypatch):
    gpu, counts = torch.device("cuda"), {"aot_autograd": {"total": 0}, "inductor": {"cudagraph_skips": 0}}
    monkeypatch.setattr("torch._dynamo.utils.counters", counts)
    with config.patch({"triton.cudagraphs": True}):
        assert not cuda_graphs(gpu)  # nothing is compiled
        counts["aot_autograd"]["total"] = 1
        assert cuda_graphs(gpu) and not cuda_graphs(CPU)
        counts["inductor"]["cudagraph_skips"] = 1
        assert not cuda_graphs(gpu)
    counts["inductor"]["cudagraph_skips"] = 0
    assert not cuda_graphs(gpu)


def test_cuda_graphs_are_refused_with_several_micro_steps():
    # the second micro-step overwrote the gradients of the first: an error, or wrong gradients in silence
    gpu = torch.device("cuda")
    with config.patch({"triton.cudagraphs": True}):
        with pytest.raises(UserError, match="with 4 micro-steps in each process is refused"):
            require_no_accumulation(gpu, True, 4)
        for allowed in ((gpu, True, 1), (gpu, False, 4), (CPU, True, 4)):
            require_no_accumulation(*allowed)
    require_no_accumulation(gpu, True, 4)


def test_tf32_is_as_it_was_after_an_error():
    before = torch.backends.cuda.matmul.allow_tf32
    for allowed in (True, False):
        with pytest.raises(ValueError), device.tf32(allowed):
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
            raise ValueError
        assert torch.backends.cuda.matmul.allow_tf32 is before
    with device.tf32(allowed=True):
        assert device.multiplies_tf32(torch.device("cuda")) and not device.multiplies_tf32(CPU)
