"""The peak that MFU is a share of."""

import types

import pytest
import torch

from fusedgpt.machine import flops
from fusedgpt.machine.flops import peak_flops  # by name: the tests' own measures once

# a name of each form that PyTorch gives, and TFLOP/s; None: this very device has no figure, so it must be measured
DEVICES = {
    "Tesla V100-SXM2-16GB": 125,
    "Tesla T4": 65,
    "NVIDIA T400": None,  # T4's figure was taken for it
    "A100-SXM-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-SXM-64GB": None,  # built for one machine, with more multiprocessors
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,  # a seventh of one
    "NVIDIA L40": None,  # L4's figure was taken for it
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "AMD Instinct MI300X": 1307,
}


class OnTheCPU(torch.Generator):
    def __new__(cls, device):
        return super().__new__(cls)


@pytest.mark.parametrize("name", DEVICES)
def test_the_peak_of_a_gpu_is_of_that_very_gpu(name, monkeypatch):
    # T11: use was counted against an A100 whatever the device: 104 % on an H100
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch, "Generator", OnTheCPU)  # no GPU here
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: None)  # a product of 256 in 20 ms
    monkeypatch.setattr(flops.timing, "Steps", lambda *_: types.SimpleNamespace(make=lambda count: [20.0]))
    peak, source = peak_flops(torch.device("cuda"), torch.bfloat16)
    if DEVICES[name]:
        assert peak == pytest.approx(DEVICES[name] * 1e12) and source.startswith("data sheet of ")
    else:
        assert peak == pytest.approx(2 * 256**3 / 20e-3) and source.startswith("measured: ")


def test_a_cpu_is_measured():
    before = torch.get_rng_state()
    measured, source = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e9 < measured < 1e14 and source.startswith("measured: ")
    # what a step of one's own drew depended on whether this had run
    assert torch.equal(torch.get_rng_state(), before)
