"""What the settings device and dtype mean on this machine."""

import pytest
import torch
from torch._inductor import config

from fusedgpt.errors import UserError
from fusedgpt.machine import device
from fusedgpt.machine.device import DTYPES, cuda_graphs, resolve_device, resolve_dtype

CPU = torch.device("cpu")


def test_device_and_dtype_are_resolved(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (resolve_device("auto").type, resolve_device("auto", local_rank=0)) == ("mps", CPU)  # gloo has no mps
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


def test_bfloat16_on_a_cpu_without_it_is_a_warning(monkeypatch):
    # config/bench_blog.py asks for it, and a step of GPT-2 124M would take 20 minutes
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    with pytest.warns(UserWarning, match="give --dtype=float32"):
        assert resolve_dtype("bfloat16", CPU) == torch.bfloat16


@pytest.mark.parametrize("name", ["tpu", "cuda:1", "xpu"])
def test_a_device_that_cannot_be_is_named(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"device='{name}' is not on this machine.*: give --device=cpu, or leave"):
        resolve_device(name)


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


def test_tf32_is_as_it_was_after_an_error():
    before = torch.backends.cuda.matmul.allow_tf32
    for allowed in (True, False):
        with pytest.raises(ValueError), device.tf32(allowed):
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
            raise ValueError
        assert torch.backends.cuda.matmul.allow_tf32 is before
    with device.tf32(allowed=True):
        assert device.multiplies_tf32(torch.device("cuda")) and not device.multiplies_tf32(CPU)
