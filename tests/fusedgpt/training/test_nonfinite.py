"""What a run names if a number is not finite."""

import contextlib

import pytest
import torch

from fusedgpt.training.nonfinite import first_tensors
from model import GPT, GPTConfig


@pytest.fixture(params=["none", "block"])  # recomputed blocks: the look at an output was an error in the backward
def model(request):
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=16, recompute=request.param))


def first(model):
    x = torch.arange(8).view(1, 8)
    return first_tensors(model, x, x + 1, contextlib.nullcontext())


def test_a_healthy_step_names_nothing_and_leaves_nothing(model):
    before = {name: w.clone() for name, w in model.state_dict().items()}
    assert first(model) is None
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_weight_comes_first_then_the_first_output_and_what_inherits_from_it(model):
    model.transformer.h[0].mlp.c_fc.bias.data.fill_(100)
    model.transformer.h[0].mlp.c_proj.weight.data.fill_(1e38)  # finite, but its products are not
    found = first(model)
    assert found.startswith("outputs: transformer.h.0.mlp.c_proj, transformer.h.0.mlp.dropout, transformer.h.0.mlp")
    model.transformer.h[1].mlp.c_fc.weight.data[3, 3] = torch.nan
    assert first(model) == "weights: transformer.h.1.mlp.c_fc.weight"


def test_the_first_gradient_in_the_order_of_the_backward(model):
    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.nan

    model.transformer.h[1].mlp.register_forward_hook(lambda module, inputs, output: Poison.apply(output))
    assert first(model).startswith("gradients: transformer.h.1.mlp.c_proj.bias, transformer.h.1.mlp.c_proj.weight")
