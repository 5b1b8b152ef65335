"""One attention computation, on which kernels are tried, compared with float64, timed and reported.

B batch, nh heads, T queries, Tk keys, hs head size.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

# (q, k, v, dropout_p, documents) -> y; see fusedgpt/attention/functions.py
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """Causal attention of `shape` (B, nh, T, hs) on `device` in `dtype`."""

    shape: tuple[int, int, int, int]
    device: torch.device
    dtype: torch.dtype
    dropout: float = 0.0
    backward: bool = True  # training, which needs dq, dk and dv too
    keys: int | None = None  # Tk; None: as many as queries
    packed: bool = False  # whether the tokens are of several documents, and attention stays within each

    @classmethod
    def of_model(cls, config: Any, batch_size: int, device: torch.device, dtype: torch.dtype, **rest) -> Self:
        """The attention of a model's layer. `config` has n_head, n_embd and block_size: a GPTConfig or Settings."""
        shape = (batch_size, config.n_head, config.block_size, config.n_embd // config.n_head)
        return cls(shape, device, dtype, packed=getattr(config, "packed", False), **rest)

    def one_query(self) -> Self:
        """The same attention for one new token after T - 1 cached ones, as generation computes it."""
        B, nh, T, hs = self.shape
        return replace(self, shape=(B, nh, 1, hs), keys=T)

    @property
    def documents(self) -> Tensor | None:
        """The document of each key, (B, Tk), if `packed`. Sequences have about 3 and 24 documents, in turn."""
        return _documents(self.shape[0], self.keys or self.shape[2], self.device) if self.packed else None

    def inputs(self, scale: float = 1.0) -> tuple[Tensor, ...]:
        """q, k, v and dy, the gradient of y: normal numbers, the same on every device. `scale` multiplies q and k.

        q and dy are (B, nh, T, hs), k and v (B, nh, Tk, hs).
        """
        q, k, v, dy = self._drawn()
        return self._placed(q * scale, k * scale, v, dy)

    def inputs_of_large_scores(self) -> tuple[Tensor, ...]:
        """Like `inputs`, but each score is a whole number from 0 to 7, times one number between 16 and 32.

        So in every dtype a query gives equal weight to all keys with the largest score that it sees, and none to
        others. q is 0 in all channels but one, so a score is one product of few bits, and equal scores round alike.
        """
        q, k, v, dy = self._drawn()
        step = 2.0 ** math.ceil(math.log2(16 * q.size(-1) ** 0.5))
        levels = (k[..., :1] * 100).int().remainder(8)  # 0 ... 7, about equally likely
        return self._placed(F.one_hot(q.argmax(-1), q.size(-1)), (levels * step).expand_as(k), v, dy)

    def _drawn(self):
        return _drawn(self.shape, self.keys or self.shape[2])

    def _placed(self, q, k, v, dy):
        q, k, v, dy = (x.to(self.device, self.dtype, copy=True) for x in (q, k, v, dy))
        return *(x.requires_grad_(self.backward) for x in (q, k, v)), dy

    def run(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """Run `attend` forward and, if `backward`, backward. Returns (y,) or (y, dq, dk, dv)."""
        # a user's own kernel need not know of documents
        y = attend(q, k, v, self.dropout, *([self.documents] if self.packed else []))
        return (y, *torch.autograd.grad(y, (q, k, v), dy)) if self.backward else (y,)


@functools.lru_cache(maxsize=1)  # flex makes a new mask unless it gets the same tensor of documents as last time
def _documents(B, Tk, device):
    lengths = torch.tensor([Tk // 3 + 1, Tk // 24 + 1]).repeat(B)[:B, None]
    shifted = torch.arange(Tk) + 7 * torch.arange(B)[:, None]  # sequences begin their documents at different places
    return shifted.div(lengths, rounding_mode="floor").to(device)


@functools.lru_cache(maxsize=1)  # kernels take turns with the same numbers, and drawing them takes seconds if T is long
def _drawn(shape, keys):
    B, nh, _, hs = shape
    past = (B, nh, keys, hs)
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, generator=generator) for size in (shape, past, past, shape))
