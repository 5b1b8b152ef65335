"""Device, dtype, seeds, time and peaks, as the machine has them."""

import time

import pytest
import torch

from parts import clock, cost, machine
from parts.errors import UserError
from tests.conftest import fails

CPU = torch.device("cpu")


def test_device_and_dtype_are_resolved():
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert machine.device("auto").type == best
    assert machine.device("cpu") == CPU
    assert machine.dtype("float32", CPU) == torch.float32
    assert machine.dtype("auto", CPU) in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "dtype"), [("avx512_bf16", "bfloat16"), ("amx_tile", "bfloat16"), ("avx2", "float32")]
)
def test_auto_dtype_on_a_cpu_follows_its_instructions(monkeypatch, capability, dtype):
    # T24: bfloat16 used to be assumed
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    assert machine.dtype("auto", CPU) == machine.DTYPES[dtype]


def test_streams_of_random_numbers_are_their_own():
    def draw(*stream):
        machine.seed(*stream)
        return torch.rand(4).tolist()

    assert draw(1, "dropout", 0, 0) == draw(1, "dropout", 0, 0)
    different = [(1, "init"), (2, "init"), (1, "dropout", 0, 0), (1, "dropout", 0, 1), (1, "dropout", 1, 0)]
    assert len({tuple(draw(*stream)) for stream in different}) == len(different)


def test_samples_leave_warm_up_out(monkeypatch):
    told = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: told[0])
    costs = iter([9.0, 9.0, 0.001, 0.002, 0.003])  # seconds; the first two are warm-up

    def step():
        told[0] += next(costs)

    assert clock.samples(step, CPU, count=3, warmup=2) == pytest.approx([1.0, 2.0, 3.0])
    assert clock.summary([1.0, 2.0, 3.0]) == {"median_ms": 2.0, "p10_ms": 1.2, "p90_ms": 2.8, "samples": 3}


def test_peak_is_from_the_table_or_measured(monkeypatch):
    # T11: use was counted against an A100 whatever the device: 104 % on an H100
    flops, source = cost.peak_flops(CPU, torch.float32)
    assert 1e9 < flops < 1e14 and source.startswith("measured: ")
    names = {"NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312}
    for name, tflops in {
        **names,
        "AMD Instinct MI300X": 1307,
        "Tesla T4": 65,
        "NVIDIA L4": 121,
        "NVIDIA L40S": 362,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert cost.peak_flops(torch.device("cuda"), torch.bfloat16)[0] == tflops * 1e12, name


def test_environment_names_what_a_figure_depends_on():
    found = machine.environment(CPU)
    assert found["torch"] == torch.__version__ and found["device"] and found["threads"] >= 1


def test_a_device_that_is_not_here_is_named():
    with pytest.raises(UserError, match="'tpu' is no device"):
        machine.device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device='cuda' is not here: PyTorch finds cpu"):
            machine.device("cuda")


def test_full_memory_is_one_sentence():
    code = """
import torch
from parts.errors import one_sentence
with one_sentence():
    torch.empty(1 << 50)
"""
    sentence = fails("-c", code)
    assert "out of memory. Halve --batch_size" in sentence
