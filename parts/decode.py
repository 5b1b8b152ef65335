"""Prompt ids to new ids, one at a time, with a cache of keys and values.

B samples of one length, T prompt ids, S = block_size, V vocabulary. A model is a callable
`(idx, cache=...) -> (logits of the last position (B, 1, V), None)` with `.config.block_size` and `.config.n_layer`.
"""

import torch


class LayerCache:
    """The keys and values of one layer, each (B, nh, length, hs), in buffers of S."""

    def __init__(self, capacity):
        self.capacity, self.length = capacity, 0

    def extend(self, k, v):
        """Append k and v (B, nh, T, hs); return all that is held, (B, nh, length, hs)."""
        if self.length == 0:
            B, nh, _, hs = k.shape
            self.k, self.v = k.new_empty(B, nh, self.capacity, hs), v.new_empty(B, nh, self.capacity, hs)
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start : self.length], self.v[:, :, start : self.length] = k, v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


def new_cache(config):
    """An empty cache for a model of `config`: one LayerCache a layer."""
    return [LayerCache(config.block_size) for _ in range(config.n_layer)]


def pick(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Ids (B, 1) drawn from logits (B, V). Temperature 0 takes the likeliest; top_k and top_p None or 0 admit all.

    top_k admits the k likeliest; top_p the fewest likeliest that together reach that probability ("nucleus sampling",
    arXiv:1904.09751).
    """
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # at most 0: a small divisor cannot overflow
    if top_k:
        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p:
        p, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        beyond = p.cumsum(dim=-1) - p >= top_p  # what comes before it already reaches top_p: the first never is
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)


@torch.no_grad()
def stream(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None, vocab_size=None):
    """Yield `max_new_tokens` times the next ids (B, 1) after `idx` (B, T), T >= 1.

    A prompt longer than S keeps its last S ids. When S ids are in the window it drops its older half and goes on, so
    each id is drawn with between S / 2 and S before it. Ids from `vocab_size` on are never drawn (None: all may be).
    """
    S = model.config.block_size
    window, cache = idx[:, -S:], new_cache(model.config)
    fresh = window
    for _ in range(max_new_tokens):
        logits, _ = model(fresh, cache=cache)  # (B, 1, V)
        fresh = pick(logits[:, -1, :vocab_size], temperature, top_k, top_p, generator)
        yield fresh
        window = torch.cat((window, fresh), dim=1)
        if window.size(1) > S:  # learned positions cannot shift: what is kept is computed anew
            window, cache = window[:, -max(1, S // 2) :], new_cache(model.config)
            fresh = window
