"""The loss of a model on both splits of its data, in nats per token and in bits per byte of text."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fusedgpt.data.dataloader import DataLoader
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.errors import UserError
from fusedgpt.parallel.distributed import Ranks


def token_bytes(
    meta: dict, ranks: Ranks, device: torch.device, status: Callable[[str], None], say: Callable[[str], None]
) -> Tensor | None:
    """The bytes of each id's text, for bits per byte, with a 0 at the end; None if the tokenizer cannot be loaded here.

    status: shows what is being done. say: prints why there are none.
    """
    sizes = None
    if ranks.main:
        status("loading the tokenizer")  # tiktoken may have to download it
        try:
            known = Tokenizer(meta).byte_lengths()[: meta["vocab_size"]]
            sizes = np.pad(known, (0, meta["vocab_size"] + 1 - len(known)))
        except UserError as error:  # no itos, or no BPE files here
            say(f"evaluations have no bits per byte: {error}")
    sizes = ranks.broadcast(sizes)
    return None if sizes is None else torch.from_numpy(sizes).to(device)


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    loader: DataLoader,
    cast: torch.autocast,
    ranks: Ranks,
    token_bytes: Tensor | None,
    stopped_by: Sequence[int],
    status: Callable[[str], None],
    windows: int,
) -> dict[str, float] | None:
    """Mean loss of each split over `windows` fixed windows (0: over all of it), which are divided among the ranks.

    With `token_bytes`, adds bits per byte. status: shows what is being done. Returns None if a signal ends it.
    """
    model.eval()
    losses = {}
    done, of = 0, loader.evaluation_batches(windows)
    for split in ("train", "val"):
        sums = [torch.zeros(3, device=loader.device)]  # a signal may come before the first batch
        for x, y in loader.evaluation(split, windows):
            if stopped_by and ranks.shards == 1:  # ranks that share the model need this one until all stop
                break
            status(f"evaluating, batch {(done := done + 1)} of {of}")
            with cast:
                _, loss = model(x, y, logits=False)
            count = (y >= 0).sum()
            size = count if token_bytes is None else token_bytes[y].sum()  # a target of -1 takes the last size, 0
            # the sums stay on the device: reading them here would wait. The loss of a batch without a target is NaN
            sums.append(torch.stack((torch.where(count > 0, loss.float() * count, 0.0), count, size)))
        here = map(sum, zip(*torch.stack(sums).tolist()))
        total, count, size, stop = map(sum, zip(*ranks.gather([*here, len(stopped_by)])))
        if stop:
            model.train()
            return None
        losses[f"{split}_loss"] = total / count
        if token_bytes is not None and size:
            losses[f"{split}_bits_per_byte"] = total / math.log(2) / size
    model.train()
    return losses
