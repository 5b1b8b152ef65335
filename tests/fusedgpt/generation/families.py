"""Small models of each family, with random weights, for the tests of generation. Odd sizes on purpose."""

import torch

from fusedgpt.generation import generate
from model import GPT, GPTConfig

S, V = 48, 101
LLAMA = dict(position="rotary", norm="rmsnorm", mlp="swiglu", bias=False, n_inner=88)
FAMILIES = {
    "gpt2": dict(),
    "llama": LLAMA | dict(n_kv_head=2, rope_theta=5e5, rope_scaling=8.0, rope_context=16, tie_embeddings=False),
    "mistral": LLAMA | dict(n_kv_head=2, window=5, tie_embeddings=False),  # shorter than the prompts
    "pattern": LLAMA | dict(n_kv_head=2, window=6, window_pattern="SSL", bigrams=67),
    "qwen3": LLAMA | dict(n_kv_head=2, head_size=24, qk_norm=True, rope_theta=1e6),
    "qwen2": LLAMA | dict(n_kv_head=1, attention_bias="qkv"),
    "phi": dict(position="rotary", rope_fraction=0.5, parallel_block=True, tie_embeddings=False, output_bias=True),
    "odd": LLAMA | dict(n_head=3, n_embd=120, n_kv_head=1, tie_embeddings=False, window=1, window_pattern="LS"),
}
# (a family, the id at which its documents begin)
WITHIN = [*((name, None) for name in FAMILIES), *((name, 3) for name in ("llama", "mistral", "pattern", "odd"))]


def family(name, **changes):
    """A random GPT of a family, whose logits are far from uniform: near ties would hide or feign errors."""
    torch.manual_seed(0)
    small = dict(block_size=S, vocab_size=V, n_layer=3, n_head=4, n_embd=64)
    net = GPT(GPTConfig(**{**small, **FAMILIES[name], **changes})).eval()
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() > 1:
                p *= 5
            elif not p.any():  # a bias
                p.normal_(std=0.5, generator=torch.Generator().manual_seed(p.numel()))
    return net


def ids(B, T, seed=1):
    """Random ids (B, T)."""
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def greedy(model, idx, new, **kwargs):
    """The likeliest next `new` ids (B, new) after `idx`, generated with a cache."""
    return torch.cat(list(generate.new_tokens(model, idx, new, temperature=0, **kwargs)), dim=1)
