"""Rotary positions (RoFormer, arXiv:2104.09864): queries and keys turn, so that a score depends on their distance.

T tokens, R rotated channels of a head, of its hs. Channel i is paired with channel i + R / 2, as in the weights of all
families on the Hugging Face hub. Llama 3.1's stretching of long wavelengths is only in its published code.
"""

import math
from typing import Any

import torch
from torch import Tensor

LONG, SHORT = 1, 4  # wavelengths above context / LONG are stretched whole, those below context / SHORT stay


def frequencies(config: Any, device: torch.device | None = None) -> Tensor:
    """Radians by which each pair of channels turns from a token to the next, (R / 2,) in float32."""
    exponents = torch.arange(0, config.rotated, 2, dtype=torch.float32, device=device) / config.rotated
    plain = 1 / config.rope_theta**exponents
    if config.rope_scaling == 1:
        return plain
    waves = config.rope_context * plain / (2 * math.pi)  # in the context before stretching
    kept = ((waves - LONG) / (SHORT - LONG)).clamp(0, 1)
    return (1 - kept) * plain / config.rope_scaling + kept * plain


def rotation(positions: Tensor, config: Any) -> Tensor:
    """Cosines and sines of the angles at `positions` (T,): (2, T, 1, R / 2) in float32, for `rotate`."""
    angles = positions[:, None, None].float() * frequencies(config, positions.device)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Queries or keys x (B, T, heads, hs), with their first R channels turned. In float32 at least, then x's dtype."""
    cos, sin = rotation  # (T, 1, R / 2) each: all heads turn alike
    pairs = cos.size(-1)
    *halves, rest = x.split([pairs, pairs, x.size(-1) - 2 * pairs], dim=-1)
    # cast once, not in each product; and back before cat, or a compiled graph would write both to memory in float32
    a, b = (half.to(torch.promote_types(x.dtype, cos.dtype)) for half in halves)
    return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), dim=-1)
