"""The peak that MFU is a share of."""

import torch

from fusedgpt.flops import peak_flops


def test_peak_is_from_the_table_or_measured(monkeypatch):
    # T11: use was counted against an A100 whatever the device: 104 % on an H100
    measured, source = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e9 < measured < 1e14 and source.startswith("measured: ")
    names = {"NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312}
    for name, tflops in {
        **names,
        "AMD Instinct MI300X": 1307,
        "Tesla T4": 65,
        "NVIDIA L4": 121,
        "NVIDIA L40S": 362,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), torch.bfloat16)[0] == tflops * 1e12, name
