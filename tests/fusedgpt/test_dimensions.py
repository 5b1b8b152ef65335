"""The dimensions of a GPT: parameters and FLOPs of all combinations of switches, and values that cannot be."""

import random

import pytest

from fusedgpt import eager
from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError
from model import GPT

SHAPE = dict(block_size=16, vocab_size=37, n_head=4, n_embd=32)
CHOICES = dict(
    position=("learned", "rotary"),
    norm=("layernorm", "rmsnorm"),
    mlp=("gelu", "swiglu"),
    n_inner=(None, 24),
    n_kv_head=(None, 1, 2),
    head_size=(None, 6),
    qk_norm=(False, True),
    window=(None, 5, 99),
    tie_embeddings=(True, False),
    parallel_block=(False, True),
    attention_bias=(None, True, False, "qkv"),
    mlp_bias=(None, True, False),
    output_bias=(False, True),
    bigrams=(None, 11),
    bias=(True, False),
    vocab_multiple=(1, 64),
    n_layer=(1, 3),
)


def test_parameters_of_any_switches_are_those_of_the_model(monkeypatch):
    # estimates of memory rest on these formulas
    monkeypatch.setattr(GPT, "init_weights", lambda self: None)
    monkeypatch.setattr(eager, "to_empty", lambda model: None)  # stay on the meta device
    chance = random.Random(0)
    for _ in range(200):
        switches = {name: chance.choice(values) for name, values in CHOICES.items()}
        pattern = chance.choice(("S", "SL", "LLS")) if switches["window"] else "S"
        config = GPTConfig(**SHAPE, **switches, window_pattern=pattern)
        model = GPT(config)
        assert config.num_params == sum(p.numel() for p in model.parameters()), config
        matrices = [tuple(p.shape) for p in model.transformer.h[0].parameters() if p.dim() == 2]
        assert config.block_matrices == sum(rows * columns for rows, columns in matrices), config


def test_a_window_is_what_its_layers_count():
    shape = dict(SHAPE, n_layer=5, window=4)
    assert GPTConfig(**shape, window_pattern="SSL").windows == [4, 4, None, 4, 4]
    plain = GPTConfig(**dict(SHAPE, n_layer=5)).flops_per_token
    saved = plain - GPTConfig(**shape, window_pattern="SSL").flops_per_token
    assert saved == 12 * 32 * 4 * (16 - 4)  # 4 of 5 layers, for each of 32 channels


@pytest.mark.parametrize(
    ("given", "biases"),
    [
        (dict(bias=False), []),
        (dict(bias=False, attention_bias="qkv"), ["qkv"]),  # Qwen2
        (dict(bias=False, attention_bias=True, mlp_bias=True, output_bias=True), ["qkv", "proj", "mlp", "output"]),
        (dict(bias=True, mlp_bias=False), ["qkv", "proj"]),
    ],
)
def test_biases_are_where_a_family_has_them(given, biases):
    assert [name for name, is_there in GPTConfig(**SHAPE, **given).biases.items() if is_there] == biases


ROTARY = dict(position="rotary")
WRONG = [
    (dict(attention="flsh"), "attention='flsh' is unknown"),
    (dict(activation="relu"), "activation='relu' is unknown: it can be gelu_tanh, gelu"),
    (dict(n_kv_head=3), "n_head=4 cannot be split over n_kv_head=3: make it a multiple"),
    (dict(n_head=3), "n_embd=32 cannot be split over n_head=3: make it a multiple, or set head_size"),
    (dict(ROTARY, head_size=5), "5 of a head's 5 channels would rotate, but they rotate in pairs"),
    (dict(ROTARY, rope_fraction=1.5), "12 of a head's 8 channels would rotate"),
    (dict(rope_theta=5e5), "rope_theta=500000.0 has no effect with learned positions: set position=rotary too"),
    (dict(window=4, window_pattern="SX"), "window_pattern='SX' must have a letter S or L for each layer"),
    (dict(norm_eps=0.0), "norm_eps=0.0 must be more than 0, and finite"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=str)
def test_what_cannot_be_is_one_sentence(wrong, said):
    with pytest.raises(UserError) as refused:
        GPTConfig(**dict(SHAPE, **wrong))
    assert str(refused.value).startswith(said)
