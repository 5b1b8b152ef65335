"""Read batches from bins. Each sample follows from (seed, iteration, sample), so a loader has no state to save.

A batch has B = batch_size windows of T = block_size tokens; y is x shifted by one token. The samples of an iteration
are its gradient_accumulation_steps · B windows, numbered over all ranks.
"""

import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from fusedgpt.data.dataset import TokenFile
from fusedgpt.errors import UserError

Batch = tuple[torch.Tensor, torch.Tensor]


class DataLoader:
    """The two splits of a data folder as batches on `device`. An evaluation is shared by `world` ranks.

    Raises UserError if a split is missing, damaged, or not longer than block_size.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        meta: dict,
        block_size: int,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
    ):
        self.files = {split: TokenFile(folder, split, meta) for split in ("train", "val")}
        for file in self.files.values():
            if len(file) <= block_size:
                raise UserError(f"{file.paths[0]} has {len(file):,} tokens, too few. Lower --block_size, or add text")
        self.block_size, self.batch_size, self.seed, self.device = block_size, batch_size, seed, device
        self.rank, self.world = rank, world

    def train(self, iteration: int, micro_step: int) -> Batch:
        """x and y, each (B, T), of one micro-batch of `iteration`. `micro_step` counts over all ranks."""
        return self._batch("train", self.starts(iteration, micro_step))

    def starts(self, iteration: int, micro_step: int) -> np.ndarray:
        """Where the windows of a micro-batch begin in the training split, in tokens: (B,)."""
        first = micro_step * self.batch_size
        # Use a counter-based generator for each iteration: its first n samples are the same, however many are drawn.
        # The iteration is the highest word of the counter, so that the streams of two iterations never overlap.
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, iteration]))
        positions = len(self.files["train"]) - self.block_size
        return generator.integers(0, positions, size=first + self.batch_size)[first:]

    def batches(self, iteration: int, micro_steps: Iterable[int]) -> Iterator[Batch]:
        """Training batches of the given micro-steps, for `iteration` and all after it, without end."""
        while True:
            for micro_step in micro_steps:
                yield self.train(iteration, micro_step)
            iteration += 1

    def evaluation(self, split: str, windows: int) -> Iterator[Batch]:
        """Batches of this rank's part of `windows` fixed, non-overlapping windows, spread evenly over `split`.

        With `windows` 0, every token but the first is a target once. Batches are (B, T), padded with targets of -1. All
        ranks get as many batches, because fsdp ranks compute each batch together; some may have no target.
        """
        starts = self._evaluation_starts(split, windows)[self.rank :: self.world]
        for first in range(0, self._batches_a_rank(split, windows) * self.batch_size, self.batch_size):
            some = starts[first : first + self.batch_size]
            x, y = self._batch(split, some)
            for row in np.flatnonzero(some % self.block_size):  # the last window, which ends with the split
                y[row, : -some[row] % self.block_size] = -1  # the previous window has these targets already
            yield x, y

    def evaluation_batches(self, windows: int) -> int:
        """How many batches `evaluation` has for this rank, over both splits."""
        return sum(self._batches_a_rank(split, windows) for split in self.files)

    def _batches_a_rank(self, split, windows):
        return -(-len(self._evaluation_starts(split, windows)) // (self.world * self.batch_size))

    def _evaluation_starts(self, split, windows):
        last = len(self.files[split]) - 1
        fit, rest = divmod(last, self.block_size)
        chosen = min(windows or fit, fit)
        starts = np.arange(chosen) * fit // chosen * self.block_size
        if rest and not windows:
            starts = np.append(starts, last - self.block_size)
        return starts

    def _batch(self, split, starts):
        T = self.block_size
        ids = np.array([self.files[split].window(int(start), T + 1) for start in starts], np.int64).reshape(-1, T + 1)
        x, y = torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())
        if len(starts) < self.batch_size:
            missing = self.batch_size - len(starts)
            x = torch.cat((x, x.new_zeros(missing, T)))
            y = torch.cat((y, y.new_full((missing, T), -1)))
        if cuda := self.device.type == "cuda":  # Python need not wait then; on mps other memory may be freed too early
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(self.device, non_blocking=cuda), y.to(self.device, non_blocking=cuda)
