"""Rotary positions against complex numbers in float64, and against transformers' frequencies."""

import pytest
import torch

from fusedgpt import rotary
from fusedgpt.dimensions import GPTConfig

SHAPE = dict(block_size=64, n_head=2, n_embd=48, position="rotary")


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_channels_turn_as_complex_numbers_do(fraction):
    config = GPTConfig(**SHAPE, rope_theta=100.0, rope_fraction=fraction)
    positions, R = torch.tensor([0, 1, 7, 40_001]), int(24 * fraction)
    x = torch.randn(2, 4, 3, 24, generator=torch.Generator().manual_seed(0))
    turns = positions.double()[:, None] * 100.0 ** (-torch.arange(0, R, 2).double() / R)
    numbers = torch.complex(x[..., : R // 2].double(), x[..., R // 2 : R].double())
    turned = numbers * torch.polar(torch.ones_like(turns), turns)[:, None]
    want = torch.cat((turned.real, turned.imag, x[..., R:].double()), dim=-1)
    found = rotary.rotate(x, rotary.rotation(positions, config))
    torch.testing.assert_close(found[:, :3].double(), want[:, :3], rtol=1e-5, atol=1e-5)
    # 40,001 radians in float32; in float16 they would be 40,000
    torch.testing.assert_close(found[:, 3].double(), want[:, 3], rtol=0, atol=0.02)
    assert torch.equal(found[:, 0], x[:, 0])


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", [1.0, 8.0, 32.0])
def test_frequencies_are_transformers(theta, scaling):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    ours = GPTConfig(**SHAPE, rope_theta=theta, rope_scaling=scaling, rope_context=512)
    rope = {"rope_type": "default", "rope_theta": theta}
    if scaling > 1:
        rope |= {"rope_type": "llama3", "factor": scaling, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 512}
    theirs = transformers.LlamaConfig(hidden_size=48, num_attention_heads=2, rope_parameters=rope)
    make = ROPE_INIT_FUNCTIONS["llama3"] if scaling > 1 else LlamaRotaryEmbedding.compute_default_rope_parameters
    want, factor = make(theirs, device=torch.device("cpu"))
    assert factor == 1.0
    torch.testing.assert_close(rotary.frequencies(ours), want, rtol=1e-6, atol=0)
