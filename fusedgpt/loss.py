"""The loss of a model with a padded vocabulary, from all logits at once or from a chunk of them at a time."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedgpt.dimensions import CHUNKS


def whole(z: Tensor, targets: Tensor, vocab_size: int, reduction: str = "mean") -> Tensor:
    """The loss of `targets` (B, T) or (N,) under the first `vocab_size` of the logits z, (B, T, V) or (N, V).

    A target of -1 does not count. Log-probabilities are float32, or float64 if z is. CUDA's autocast would leave them
    in bfloat16, off by up to 0.03. Compiled, the cast makes no tensor, and the slice costs no pass over the padding.
    """
    z = z[..., :vocab_size].flatten(0, -2)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return F.cross_entropy(z, targets.flatten(), ignore_index=-1, reduction=reduction)


def chunked(x: Tensor, targets: Tensor, weight: Tensor, vocab_size: int, bias: Tensor | None = None) -> Tensor:
    """The mean loss of `targets` (B, T) given hidden states x (B, T, C); `weight` (V, C) and `bias` make logits.

    A chunk's logits are freed after its forward and computed again in its backward. PyTorch 2.13's linear_cross_entropy
    is no substitute: it rounds the loss to bfloat16, and on a CPU it takes more time and memory than all logits do.
    """

    def summed(x, y, weight):
        return whole(F.linear(x, weight, bias), y, vocab_size, reduction="sum")

    if torch.is_autocast_enabled(x.device.type):  # cast once: autocast would do it again in each chunk's backward
        weight = weight.to(torch.get_autocast_dtype(x.device.type))
    chunks = zip(x.flatten(0, 1).chunk(CHUNKS), targets.flatten().chunk(CHUNKS))
    checkpointed = functools.partial(checkpoint, summed, use_reentrant=False, preserve_rng_state=False)
    return sum(checkpointed(x, y, weight) for x, y in chunks) / (targets >= 0).sum()
