"""What is written beside a figure."""

import pytest
import torch

from fusedgpt.machine.environment import environment


def test_environment_names_what_a_figure_depends_on():
    found = environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__ and found["device"] and found["threads"] >= 1


@pytest.mark.parametrize(
    ("level", "has", "said"), [("AVX2", "avx2", "AVX2"), ("AVX512", "avx512_bf16", "AVX512+bfloat16")]
)
def test_a_cpu_is_named_with_its_instructions(monkeypatch, level, has, said):
    # rows of two processors were taken for one another: "AMD EPYC" with bfloat16 products, and many times slower
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {has: True})
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert environment(torch.device("cpu"))["device"].endswith(f", {said}")
