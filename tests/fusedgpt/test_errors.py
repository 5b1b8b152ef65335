"""How a script ends on what a user can correct."""

from tests.conftest import fails


def test_full_memory_is_one_sentence():
    code = """
import torch
from fusedgpt.errors import one_sentence
with one_sentence():
    torch.empty(1 << 50)
"""
    sentence = fails("-c", code)
    assert "out of memory. Halve --batch_size" in sentence
