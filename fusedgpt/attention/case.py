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

# (q, k, v, dropout_p, documents, window) -> y; see fusedgpt/attention/functions.py
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
    kv_heads: int | None = None  # nkv; None: nh
    window: int | None = None  # keys that a query sees; None: all earlier ones

    @classmethod
    def of_layers(cls, config: Any, batch_size: int, device: torch.device, dtype: torch.dtype, **rest) -> list[Self]:
        """Each attention that layers of a model have: one, or one with a window and one without.

        config: a GPTConfig, or Settings, whose mask says whether the tokens are `packed`.
        """
        T, of_all = config.block_size, {"packed": getattr(config, "packed", False), **rest}
        shape = (batch_size, config.n_head, T, config.head_channels)
        windows = {window if window and window < T else None: None for window in config.windows}
        return [cls(shape, device, dtype, kv_heads=config.n_kv_head, window=w, **of_all) for w in windows]

    def one_query(self) -> Self:
        """The same attention for one new token after T - 1 cached ones; a cache of a window holds no other keys."""
        B, nh, T, hs = self.shape
        return replace(self, shape=(B, nh, 1, hs), keys=min(T, self.window or T), window=None)

    def of_heads(self, B: int, heads: int) -> Self:
        """The same attention with fewer sequences and heads of keys and values; queries share these as before."""
        _, nh, T, hs = self.shape
        group = nh // (self.kv_heads or nh)
        return replace(self, shape=(B, heads * group, T, hs), kv_heads=heads)

    @property
    def documents(self) -> Tensor | None:
        """The document of each key, (B, Tk), if `packed`. Sequences have about 3 and 24 documents, in turn."""
        return _document(self.shape[0], self.keys or self.shape[2], self.device, self.backward) if self.packed else None

    def inputs(self, scale: float = 1.0) -> tuple[Tensor, ...]:
        """q (B, nh, T, hs), k and v (B, nkv, Tk, hs), and dy like q, the gradient of y: normal numbers.

        They are the same on every device. `scale` multiplies q and k.
        """
        q, k, v, dy = _drawn(self)
        return self._placed(q * scale, k * scale, v, dy)

    def inputs_of_large_scores(self) -> tuple[Tensor, ...]:
        """Like `inputs`, but each score is a whole number from 0 to 7, times one number between 16 and 32.

        So in every dtype a query gives equal weight to all keys with the largest score that it sees, and none to
        others. q is 0 in all channels but one, so equal scores round alike.
        """
        q, k, v, dy = _drawn(self)
        step = 2.0 ** math.ceil(math.log2(16 * q.size(-1) ** 0.5))
        levels = (k[..., :1] * 100).int().remainder(8)  # 0 ... 7, about equally likely
        return self._placed(F.one_hot(q.argmax(-1), q.size(-1)), (levels * step).expand_as(k), v, dy)

    def _placed(self, q, k, v, dy):
        # as in the model, views of (B, T, nh, hs): a kernel was wrong for these alone (pytorch#181133)
        to = dict(device=self.device, dtype=self.dtype, copy=True, memory_format=torch.contiguous_format)
        q, k, v, dy = (x.transpose(1, 2).to(**to).transpose(1, 2) for x in (q, k, v, dy))
        return *(x.requires_grad_(self.backward) for x in (q, k, v)), dy

    def run(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """Run `attend` forward and, if `backward`, backward. Returns (y,) or (y, dq, dk, dv)."""
        # a user's own kernel need not know of documents or windows
        masks = {"documents": self.documents} if self.packed else {}
        masks |= {"window": self.window} if self.window else {}
        with torch.set_grad_enabled(self.backward):  # evaluation and generation call it without
            y = attend(q, k, v, self.dropout, **masks)
        return (y, *torch.autograd.grad(_Loss.apply(y, dy), (q, k, v))) if self.backward else (y,)


class _Loss(torch.autograd.Function):
    """A number whose gradient by y is dy. torch.autograd.grad(y, …, dy) would import sympy, to compare two shapes."""

    @staticmethod
    def forward(ctx, y, dy):
        ctx.save_for_backward(dy)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return *ctx.saved_tensors, None


@functools.lru_cache(maxsize=1)  # flex makes a new mask unless it gets the same tensor of documents as last time
def _document(B, Tk, device, other):  # others without gradients: a kernel may not keep a mask for its shape
    lengths = torch.tensor([Tk // 3 + 1, Tk // 24 + 1]).repeat(B)[:B, None]
    shifted = torch.arange(Tk) + 7 * torch.arange(B)[:, None] + other  # each sequence begins at its own place
    return shifted.div(lengths, rounding_mode="floor").to(device)


@functools.lru_cache(maxsize=1)  # kernels take turns with the same numbers, and drawing them takes seconds if T is long
def _drawn(case):
    B, nh, T, hs = case.shape
    past = (B, case.kv_heads or nh, case.keys or T, hs)
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, generator=generator) for size in (case.shape, past, past, case.shape))
