"""What the settings device and dtype mean on this machine."""

import os
import runpy
import subprocess
import sys

import pytest
import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

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


@pytest.mark.parametrize("gains", [True, False])
def test_auto_takes_bfloat16_on_a_cpu_only_if_products_gain_by_it(monkeypatch, gains):
    # an Intel Xeon without AMX has the instructions, and GPT-2 124M trained 1.7 times as long in bfloat16 there
    told, ones = [0.0], torch.ones

    class Product(torch.Tensor):
        """A matrix whose product takes 2 s in float32, and in bfloat16 1 s if this CPU gains by it."""

        def __matmul__(self, other):
            told[0] += 2.0 if self.dtype == torch.float32 else 1.0 if gains else 3.0

    monkeypatch.setattr(torch, "ones", lambda *shape, **how: ones(2, 2).as_subclass(Product))
    monkeypatch.setattr(device.timing.time, "perf_counter", lambda: told[0])
    assert device._bfloat16_is_faster.__wrapped__() == gains
    monkeypatch.setattr(device, "cpu_multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(device, "_bfloat16_is_faster", lambda: gains)
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if gains else torch.float32)


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


@pytest.mark.slow  # it compiles in three processes
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


@pytest.mark.parametrize(("fewer", "folder"), [("avx2", f"{default_cache_dir()}_avx2"), ("", None)])
def test_graphs_for_fewer_instructions_are_kept_apart(monkeypatch, fewer, folder):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", fewer)
    runpy.run_path(device.__file__)
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == folder


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
