"""Matrices that ranks share by rows are whole on one rank each, and go back as they came."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fusedgpt.parallel.owners import Deal, owners
from tests.launch import together

# (matrices of a batch, rows, columns); of 3 ranks, some have fewer rows, none at all, or no matrix
BATCHES = [(6, 6, 4), (5, 7, 3), (2, 2, 4), (1, 1, 1), (4, 5, 2)]


def exchange(rank, ranks, groups):
    """As one of `ranks` ranks in `groups` groups: what it has of each batch, and what it should have."""
    size, found = ranks // groups, []
    if groups == 1:
        mesh, placements = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",)), [Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (groups, size), mesh_dim_names=("copy", "shard"))
        placements = [Replicate(), Shard(0)]
    for (n, rows, columns), dtype in [(batch, dtype) for batch in BATCHES for dtype in (torch.float32, torch.bfloat16)]:
        whole = torch.randn(n, rows, columns, generator=torch.Generator().manual_seed(n)).to(dtype)
        shared = [distribute_tensor(matrix, mesh, placements, src_data_rank=None) for matrix in whole]
        parts = torch.stack([matrix.to_local() for matrix in shared])
        deal = Deal.of(shared[0], n)
        before, mine = sum(deal.owned[: rank % size]), deal.gather(parts)
        found.append({"n": n, "owners": owners(shared[0]), "owned": deal.owned, "mine": mine, "parts": parts})
        found[-1] |= {"whole": whole[before : before + deal.owned[rank % size]], "back": deal.scatter(2 * mine)}
    return found


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (3, 1), (4, 2)], ids=["two", "three", "two groups of two"])
def test_each_matrix_is_whole_on_one_rank_and_goes_back_as_it_came(tmp_path, ranks, groups):
    # rows of another rank or matrix would be orthogonalised without an error, and the model would train on
    for found in together(ranks, exchange, groups):
        assert len(found) == 2 * len(BATCHES)
        for batch in found:
            owned, parts, back = batch["owned"], batch["parts"], batch["back"]
            assert batch["owners"] == ranks // groups
            assert sum(owned) == batch["n"] and max(owned) - min(owned) <= 1
            assert torch.equal(batch["mine"], batch["whole"])
            assert back.dtype == parts.dtype and torch.equal(back, 2 * parts)
