"""FlashAttention-3 and -4 in place of PyTorch's own, with functions that stand in for their packages on a CPU."""

import dataclasses
import importlib.util

import pytest
import torch
from torch.library import Library
from torch.nn import attention
from torch.nn.attention._fa4 import _FA4Handle

from fusedgpt.attention import parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION, VERSIONS, make_ready
from fusedgpt.attention.table import KERNELS
from fusedgpt.errors import UserError
from model import GPT, GPTConfig
from tests.fusedgpt.attention.test_receipt import watch

CPU = torch.device("cpu")
TRAINING = Case((2, 2, 64, 32), CPU, torch.float32)
EVERYWHERE = {name: dataclasses.replace(kernel, gpu_only=False) for name, kernel in KERNELS.items()}
OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture
def called(monkeypatch):
    """The names of the packages that computed attention, in order. Afterwards PyTorch's own kernel is back."""
    monkeypatch.setattr(permitted, "KERNELS", EVERYWHERE)
    monkeypatch.setattr(attention._registry, "_FLASH_ATTENTION_IMPLS", {})
    called = []

    def package(name):
        def computed(q, k, v, *_, **__):
            called.append(name)
            (y,) = parity.reference(q, k, v, None)
            of_backward = torch.zeros(q.size(0), q.size(2), q.size(1)).transpose(1, 2)  # the logsumexp of scores
            return torch.empty_like(q).copy_(y), of_backward

        def register():
            library = Library("aten", "IMPL", "CPU")
            library.impl(OPERATOR, computed)
            return _FA4Handle(library)

        attention.register_flash_attention_impl(VERSIONS[name], register_fn=register)

    for name in VERSIONS:
        package(name)
    yield called
    make_ready("flash")


def test_each_name_runs_its_own_version_whatever_ran_before(called):
    # the version is the process's: `flash` after `flash3` used to be FlashAttention-3
    case = dataclasses.replace(TRAINING, backward=False)
    for name in ("flash", "flash3", "flash", "flash4", "flash3", "sdpa", "flash4", "masked", "flash3", "flash"):
        called.clear()
        assert parity.passes(parity.compare(ATTENTION[name], case), torch.float32)
        assert set(called) == {name} & VERSIONS.keys(), name


def test_a_compiled_model_follows_use_attention_back_and_forth(called):
    # the graph of `flash` is reused without tracing: it used to run FlashAttention-3 from then on
    model = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=1, n_head=2, n_embd=32)).eval()
    model.compile(backend="aot_eager")
    with torch.no_grad():
        for name in ("flash", "flash3", "flash", "flash3"):
            model.use_attention(name)
            called.clear()
            model(torch.zeros(1, 16, dtype=torch.long))
            assert set(called) == {name} & VERSIONS.keys(), name


def test_a_package_of_which_only_pytorchs_operator_is_seen_is_not_taken_for_its_version(called):
    case = dataclasses.replace(TRAINING, backward=False)
    assert "the profiler saw flash in the forward pass" in permitted.refusal("flash3", case)


@pytest.mark.parametrize(("name", "module"), [("flash3", "flash_attn_interface"), ("flash4", "flash_attn")])
def test_without_the_package_the_reason_names_it(monkeypatch, name, module):
    with pytest.raises(UserError, match="on GPUs only"):
        permitted.require(name, TRAINING)
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    monkeypatch.setattr(permitted, "KERNELS", EVERYWHERE)
    assert permitted.refusal(name, TRAINING) == f"No module named '{module}'"
    assert watch("flash")["forward"] == ["flash"]  # a failed activation leaves it alone
