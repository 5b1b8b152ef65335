"""The ranks of a run: one process, or as many as torchrun started; and what they do together."""

import contextlib
import os
from dataclasses import dataclass

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from parts.errors import UserError


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    local_rank: int | None = None  # None: not under torchrun
    world: int = 1

    @property
    def main(self):
        return self.rank == 0

    def micro_steps(self, gradient_accumulation_steps):
        """This rank's share of the micro-steps of all ranks. Raises UserError where they cannot be shared evenly."""
        if gradient_accumulation_steps % self.world:
            raise UserError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} cannot be shared by {self.world} processes:"
                " it counts micro-batches over the whole world, so make it a multiple"
            )
        return range(self.rank, gradient_accumulation_steps, self.world)

    def sum(self, values, device):
        """Each of `values` (numbers) added up over the ranks."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=device)
        distributed.all_reduce(total)
        return total.tolist()

    def same(self, value):
        """Rank 0's `value`, on every rank."""
        box = [value]
        if self.world > 1:
            distributed.broadcast_object_list(box)
        return box[0]


def ranks():
    """This process's place, as torchrun's environment variables say."""
    if "RANK" not in os.environ:
        return Ranks()
    return Ranks(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))


def join(ranks, backend, device):
    """Meet the other ranks, over `backend` on GPUs and gloo elsewhere: nccl runs on GPUs only."""
    if ranks.world > 1:
        distributed.init_process_group(backend if device.type == "cuda" else "gloo")


def leave(ranks):
    """Part from them, at the end of a run that went well."""
    if ranks.world > 1:
        distributed.barrier()  # nothing may be under way when the group ends: gloo's thread would wait for ever
        distributed.destroy_process_group()


def wrap(model, ranks, device):
    """`model`, its gradients averaged over the ranks in each backward."""
    if ranks.world == 1:
        return model
    devices = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def gradients_stay(model, until_last):
    """A context in which backward does not exchange gradients, unless this is the last micro-step."""
    stays = isinstance(model, DistributedDataParallel) and not until_last
    return model.no_sync() if stays else contextlib.nullcontext()
