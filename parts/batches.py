"""Bins to batches. What is trained on is a pure function of (seed, iteration, sample), and so needs no saving.

B = batch_size windows of T = block_size tokens; y is x one token on. Sample s of an iteration is one of the
gradient_accumulation_steps · B windows of that step, over all ranks.
"""

import bisect
import itertools
import pathlib

import numpy as np
import torch

from parts.errors import UserError


class TokenFile:
    """The ids of `<split>.bin`, or of its shards `<split>_0000.bin …`, as one row; read by window, never mapped.

    A memory map keeps every page it has touched in the process's memory; a read keeps none (nanoGPT issue 287).
    """

    def __init__(self, folder, split, meta):
        folder = pathlib.Path(folder)
        whole, shards = folder / f"{split}.bin", sorted(folder.glob(f"{split}_[0-9][0-9][0-9][0-9].bin"))
        if not whole.exists() and not shards:
            raise UserError(f"{whole} does not exist: run python {folder / 'prepare.py'}")
        if whole.exists() and shards:
            raise UserError(
                f"{folder} has {whole.name} and {shards[0].name}: which one counts? Remove one or the other"
            )
        self.paths = shards or [whole]
        self.dtype = np.dtype(meta.get("dtype", "uint16")).newbyteorder("<")
        self.vocab_size = meta["vocab_size"]
        sizes = [path.stat().st_size for path in self.paths]
        self.starts = [0, *itertools.accumulate(size // self.dtype.itemsize for size in sizes)]
        expected = meta.get("tokens", {}).get(split, len(self))
        if any(size % self.dtype.itemsize for size in sizes) or len(self) != expected:
            raise UserError(
                f"{self.paths[0]} is truncated or not what meta.json describes: {sum(sizes):,} bytes are"
                f" {sum(sizes) / self.dtype.itemsize:,} {self.dtype.name} tokens, not {expected:,}."
                f" Run python {folder / 'prepare.py'} again"
            )
        self.files = [open(path, "rb") for path in self.paths]  # noqa: SIM115 (open as long as the run)

    def __len__(self):
        return self.starts[-1]

    def window(self, start, length):
        """`length` ids from position `start`, int64. Raises UserError where one is beyond the vocabulary."""
        ids = np.empty(length, np.int64)
        done = 0
        while done < length:
            shard = bisect.bisect_right(self.starts, start + done) - 1
            self.files[shard].seek((start + done - self.starts[shard]) * self.dtype.itemsize)
            count = min(length - done, self.starts[shard + 1] - start - done)
            ids[done : done + count] = np.fromfile(self.files[shard], self.dtype, count)
            done += count
        if ids.max() >= self.vocab_size:
            raise UserError(
                f"{self.paths[0]} holds the id {ids.max()}, but the vocabulary has {self.vocab_size}:"
                " it was made with another tokenizer. Prepare it again, or set --vocab_size"
            )
        return ids


class Batches:
    """The two splits of a data folder as batches on `device`; `rank` of `world` takes its share of an evaluation."""

    def __init__(self, folder, meta, block_size, batch_size, seed, device, rank=0, world=1):
        self.files = {split: TokenFile(folder, split, meta) for split in ("train", "val")}
        for file in self.files.values():
            if len(file) <= block_size:
                least = f"block_size={block_size} needs at least {block_size + 1}"
                raise UserError(f"{file.paths[0]} has {len(file):,} tokens: {least}. Lower --block_size, or add text")
        self.block_size, self.batch_size, self.seed, self.device = block_size, batch_size, seed, device
        self.rank, self.world = rank, world

    def train(self, iteration, micro_step):
        """Micro-batch `micro_step` (counted over the whole world) of `iteration`: x and y, (B, T)."""
        first = micro_step * self.batch_size
        # one counter-based stream an iteration; its first samples are the same however many are drawn
        stream = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, iteration]))
        positions = len(self.files["train"]) - self.block_size
        starts = stream.integers(0, positions, size=first + self.batch_size)[first:]
        return self._batch("train", starts)

    def stream(self, iteration, micro_steps):
        """Training batches from `iteration` on, without end: of each iteration those that `micro_steps` names."""
        while True:
            for micro_step in micro_steps:
                yield self.train(iteration, micro_step)
            iteration += 1

    def evaluation(self, split, windows):
        """Batches of this rank's share of `windows` fixed, non-overlapping windows, spread evenly over `split`.

        The same whatever the world size; all there are where there are fewer. Every batch is (B, T): the last is filled
        up with targets of -1, which do not count.
        """
        fit = (len(self.files[split]) - 1) // self.block_size
        windows = min(windows, fit)
        mine = np.arange(windows)[self.rank :: self.world] * fit // windows * self.block_size
        for first in range(0, len(mine), self.batch_size):
            yield self._batch(split, mine[first : first + self.batch_size])

    def _batch(self, split, starts):
        T = self.block_size
        rows = np.stack([self.files[split].window(int(start), T + 1) for start in starts])
        x, y = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
        if len(starts) < self.batch_size:
            missing = self.batch_size - len(starts)
            x = torch.cat((x, x.new_zeros(missing, T)))
            y = torch.cat((y, y.new_full((missing, T), -1)))
        if self.device.type == "cuda":  # pinned, the copy need not hold up Python
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
