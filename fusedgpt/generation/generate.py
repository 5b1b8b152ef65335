"""Generate new ids after prompt ids: the KV cache, prefill, decode and sampling.

B samples of one length, T prompt ids, S = block_size, nkv heads of keys and values, hs head size, V vocabulary. A model
is a callable `(idx, cache=...) -> (logits of the last position (B, 1, V), None)` with a `.config` (a GPTConfig).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedgpt.errors import UserError

GRAIN = 256  # a cache has room for a multiple of this, so that it seldom grows, and compiled steps seldom change


def cache_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache of a model in `dtype` on `device`: float32 on a CPU, otherwise `dtype`.

    Twelve layers of GPT-2 took 2.7 ms for one query and 1000 keys in float32, 7.4 in bfloat16 and 11.6 in float16.
    """
    return torch.float32 if device.type == "cpu" else dtype


class LayerCache:
    """The keys and values of one layer, each (B, nkv, capacity, hs), in the order of their positions."""

    def __init__(self, capacity: int = 0, window: int | None = None):
        self.capacity, self.window = capacity, window  # positions for which there is room; it grows if need be
        self.length = 0  # positions so far
        self.k = self.v = self.ids = None

    def positions(self, T: int, device: torch.device) -> Tensor:
        """The positions (T,) of the next T ids."""
        return torch.arange(self.length, self.length + T, device=device)

    def make_room(self, T: int) -> None:
        """Let T more keys fit."""
        if self.length + T > self.capacity:
            self.capacity = max(2 * self.capacity, self.length + T)
        if self.k is not None and self.k.size(2) < self.capacity:
            self.k, self.v = (F.pad(x, (0, 0, 0, self.capacity - x.size(2))) for x in (self.k, self.v))

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, nkv, T, hs) of T tokens; return all keys and values that these tokens see, in order."""
        B, nkv, T, hs = k.shape
        self.make_room(T)
        if self.k is None or self.k.size(0) != B:
            # allocate all positions, because torch.cat would copy the cache for each token. Zeros: engines.StaticStep
            # multiplies what is not filled by 0, and 0 x NaN would be NaN
            dtype = cache_dtype(k.device, k.dtype)
            self.k, self.v = (k.new_zeros(B, nkv, self.capacity, hs, dtype=dtype) for _ in "kv")
        held = self.length
        first = held - min(held, self.window - 1) if self.window else 0  # the first key that any of these tokens sees
        self.length += T
        self.k[:, :, held : held + T], self.v[:, :, held : held + T] = k, v
        if held == 0:  # many queries are faster in their own dtype: 2048 in bfloat16 take a third of float32's time
            return k, v
        return self.k[:, :, first : held + T], self.v[:, :, first : held + T]

    def extend_ids(self, idx: Tensor) -> Tensor:
        """Append `idx` (B, T) before `extend` appends its keys; return all ids so far, (B, length + T)."""
        self.make_room(idx.size(1))
        if self.ids is None or self.ids.size(0) != idx.size(0):
            self.ids = idx.new_zeros(idx.size(0), self.capacity)
        elif self.ids.size(1) < self.capacity:
            self.ids = F.pad(self.ids, (0, self.capacity - self.ids.size(1)))
        stop = self.length + idx.size(1)
        self.ids[:, self.length : stop] = idx
        return self.ids[:, :stop]


def capacity(config: Any, length: int) -> int:
    """Positions for which a cache has room, if a text of `length` tokens is generated: not all of a long context."""
    return min(config.block_size, -(-length // GRAIN) * GRAIN)


def new_cache(config: Any, length: int = 0) -> list[LayerCache]:
    """An empty KV cache for a model of `config` (a GPTConfig), with room at once for a text of `length` tokens."""
    return [LayerCache(capacity(config, length), window) for window in config.windows]


def empty(cache: list[LayerCache], capacity: int = 0) -> list[LayerCache]:
    """Empty `cache`, with room for `capacity` positions or more, and return it. Buffers that suffice stay in place."""
    for layer in cache:
        layer.length = 0
        layer.capacity = max(layer.capacity, capacity)
    return cache


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw ids (B, 1) from logits (B, V). Temperature 0 takes the likeliest ids.

    top_k: draw from the k likeliest ids; None or 0: from all.
    top_p: draw from the fewest likeliest ids that together reach this probability ("nucleus sampling",
    arXiv:1904.09751); None, 0 or 1: from all.
    Raises UserError if one of the three is negative, or if top_p is above 1.
    """
    if not (temperature >= 0 and (top_k or 0) >= 0 and 0 <= (top_p or 0) <= 1):
        raise UserError(f"{temperature=}, {top_k=} and {top_p=} must be 0 or more, and top_p at most 1")
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # without the maximum, 1e-30 would overflow
    ids = None
    if top_k and top_k < logits.size(-1):
        # top_k first: a draw among k ids is quick, and one among GPT-2's 50257 takes a millisecond
        logits, ids = logits.topk(top_k)
    if top_p and top_p < 1:  # 1 would drop ids: in float32 the likelier ones already add up to it
        p, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        # drop an id if the likelier ones already reach top_p; the likeliest always stays
        beyond = p.cumsum(dim=-1) - p >= top_p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
    drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
    return drawn if ids is None else ids.gather(-1, drawn)


@torch.no_grad()
def new_tokens(
    model: Callable,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
    cache: list[LayerCache] | None = None,
) -> Iterator[Tensor]:
    """Yield the next ids (B, 1) after `idx` (B, T), T >= 1, `max_new_tokens` times.

    Only the last S ids of a prompt are read. When the text grows beyond S ids, its newer half is kept: from then on,
    each id is drawn with between S / 2 and S ids before it.
    vocab_size: never draw ids from this one on; None: draw from all.
    cache: emptied and used; None: a new one.
    Raises UserError if logits are not finite. On a CPU all logits are checked, elsewhere only those after a prompt.
    """
    S = model.config.block_size
    unread = read = idx[:, -S:]
    cache = empty(cache or new_cache(model.config), capacity(model.config, read.size(1) + max_new_tokens))
    for _ in range(max_new_tokens):
        logits, _ = model(unread, cache=cache)  # (B, 1, V)
        # on a GPU check only after a prompt, because a check waits for the device
        checked = unread is read or logits.device.type == "cpu"
        if checked and not logits[:, -1, :vocab_size].amax(dim=-1).isfinite().all():
            why = "its weights have diverged, or overflow in this dtype"
            raise UserError(f"the model's logits are not finite: {why}. Take another checkpoint, or dtype=float32")
        unread = sample(logits[:, -1, :vocab_size], temperature, top_k, top_p, generator)
        yield unread
        read = torch.cat((read, unread), dim=1)
        if read.size(1) > S:
            # read the kept half again: learned positions cannot shift, and rotary ones beyond S were never trained
            unread = read = read[:, -max(1, S // 2) :]
            empty(cache)
