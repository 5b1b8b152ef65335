"""Matrices that ranks share by rows: each is put together on one rank, its owner, and taken apart again.

Some work needs whole matrices, such as Muon's products. Dealt out to the ranks, each matrix is computed once, not on
every rank, and a rank sends no more than its part of all matrices, and then its own matrices.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, distributed

from fusedgpt.parallel.distributed import others_needed


def owners(matrix: Tensor) -> int:
    """How many ranks share the rows of `matrix`: those of a group of fsdp, or 1 if it is no DTensor."""
    return matrix.device_mesh["shard"].size() if hasattr(matrix, "device_mesh") else 1


@dataclass(frozen=True)
class Deal:
    """For each rank of a group: how many matrices of a batch it owns, and how many rows of each matrix it holds."""

    owned: list[int]
    rows: list[int]
    group: distributed.ProcessGroup

    @classmethod
    def of(cls, matrix: Tensor, number: int) -> Self:
        """How to deal out `number` matrices that are shared as `matrix` is, a DTensor. The first ranks get the rest."""
        ranks, height = owners(matrix), matrix.size(0)
        most = -(-height // ranks)  # as torch.chunk divides: the last ranks may have fewer rows, or none
        rows = [min(most, max(0, height - most * rank)) for rank in range(ranks)]
        owned = [number // ranks + (rank < number % ranks) for rank in range(ranks)]
        return cls(owned, rows, matrix.device_mesh.get_group("shard"))

    def gather(self, parts: Tensor) -> Tensor:
        """This rank's matrices (owned, rows, columns), from `parts`, its rows of every matrix: (n, held, columns)."""
        mine, held = self._mine()
        received = self._exchange(parts.flatten(0, 1), [n * held for n in self.owned], [mine * n for n in self.rows])
        pieces = received.split([mine * n for n in self.rows])
        return torch.cat([piece.view(mine, n, parts.size(2)) for piece, n in zip(pieces, self.rows)], dim=1)

    def scatter(self, whole: Tensor) -> Tensor:
        """The inverse of `gather`: (n, held, columns) from (owned, rows, columns)."""
        mine, held = self._mine()
        sent = torch.cat([piece.flatten(0, 1) for piece in whole.split(self.rows, dim=1)])
        received = self._exchange(sent, [mine * n for n in self.rows], [n * held for n in self.owned])
        return received.view(sum(self.owned), held, whole.size(2))

    def _mine(self):
        rank = distributed.get_rank(self.group)
        return self.owned[rank], self.rows[rank]

    def _exchange(self, sent, to_each, from_each):
        """The rows that all ranks send this one, `from_each` so many; of those in `sent`, `to_each` so many."""
        received = sent.new_empty(sum(from_each), sent.size(1))
        with others_needed("sharing out matrices"):
            distributed.all_to_all_single(received, sent, from_each, to_each, self.group)
        return received
