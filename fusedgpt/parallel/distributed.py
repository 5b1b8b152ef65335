"""The ranks of a run, which are one process or those that torchrun started, and what they do together."""

import atexit
import contextlib
import datetime
import hashlib
import importlib
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from fusedgpt.errors import UserError, first_line

ON_THIS_MACHINE = ("localhost", "127.0.0.1")  # values of MASTER_ADDR; torchrun sets one of them if it has no other node
# MiB of gradients in one message. torch.compile cuts the model at each bucket: the 498 MB of GPT-2 124M make 5 graphs
# with this size, 14 with PyTorch's 25
BUCKET_MB = 100
CHOOSING = 30 * 60.0  # seconds that rank 0 may take to choose for all: it may compile each kernel that it times


@dataclass(frozen=True)
class Ranks:
    """This process's place among the `world` processes of a run."""

    rank: int = 0
    local_rank: int | None = None  # None: not started by torchrun
    world: int = 1
    shards: int = 1  # ranks that hold a copy of the model together; with more than 1, a forward needs all of them
    timeout: float = 300.0  # seconds after which a rank that waits for another gives up

    @property
    def main(self) -> bool:
        """Whether this rank is the one that prints and writes files."""
        return self.rank == 0

    def micro_steps(self, n: int) -> range:
        """This rank's share of the `n` micro-steps of all ranks. Raises UserError if they cannot be shared evenly."""
        if n % self.world:
            how = f"it counts over all of them, so make it a multiple of {self.world}"
            raise UserError(f"gradient_accumulation_steps={n} cannot be shared by {self.world} processes: {how}")
        return range(self.rank, n, self.world)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Each of `values` added up over the ranks, in float64. On GPUs over nccl, it does not wait for the device."""
        if self.world > 1:
            values = values.double()
            distributed.all_reduce(values)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        box = [value]
        if self.world > 1:
            distributed.broadcast_object_list(box)
        return box[0]

    def from_main(self, choose: Callable[[], Any]) -> Any:
        """What `choose` returns on rank 0, on every rank. The others wait for up to CHOOSING seconds."""
        if self.world == 1:
            return choose()
        box, limit = [None], datetime.timedelta(seconds=max(CHOOSING, self.timeout))
        group = distributed.new_group(backend="gloo", timeout=limit)
        if self.main:
            box = [choose()]
        distributed.broadcast_object_list(box, group=group)
        return box[0]

    def gather(self, value: Any) -> list:
        """The `value` of each rank, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            distributed.all_gather_object(values, value)
        return values


def ranks(parallel: str = "ddp", shard_size: int | None = None, timeout: float = 300.0) -> Ranks:
    """This process's place, from torchrun's environment variables and three settings.

    Raises UserError if the variables name no place, or if `shard_size` does not divide the processes.
    """
    if "RANK" not in os.environ:
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):  # srun and mpirun start a process each
            if os.environ.get(name, "1") != "1":
                how = "start one torchrun on each node, as slurm/train.sh does"
                raise UserError(f"with {name}={os.environ[name]} and no RANK, each process would train alone: {how}")
        return Ranks()
    found = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    numbers = [int(text) for text in found.values() if re.fullmatch("[0-9]{1,9}", text)]
    if len(numbers) < len(found) or numbers[0] >= numbers[2]:
        there = ", ".join(f"{name}={text:.99}" for name, text in found.items())
        how = "RANK must be a number below WORLD_SIZE. Let torchrun set them, or unset RANK to train alone"
        raise UserError(f"the environment has {there}, which is no place among the processes of a run: {how}")
    rank, local_rank, world = numbers
    shards = (shard_size or world) if parallel == "fsdp" and world > 1 else 1
    if world % shards:
        how = "give a divisor, such as the GPUs of a node, or --shard_size=None, to share each weight among all"
        raise UserError(f"shard_size={shards} does not divide {world} processes: {how}")
    return Ranks(rank, local_rank, world, shards, timeout)


def launch() -> dict | None:
    """The id and the process, on this node, of one call of torchrun with its restarts; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return {"id": os.environ["TORCHELASTIC_RUN_ID"], "torchrun": f"{socket.gethostname()}:{os.getppid()}"}


def restarted() -> bool:
    """Whether torchrun has started this process again, after a process of the run had failed, or SLURM its job."""
    return any(os.environ.get(f"{who}_RESTART_COUNT", "0") != "0" for who in ("TORCHELASTIC", "SLURM"))


@contextlib.contextmanager
def others_needed() -> Iterator[None]:
    """A context for what needs all ranks. If a rank is gone, raises UserError in place of PyTorch's error."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors; the path of the line that raised them says gloo
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        # skip the interpreter's shutdown: it ends gloo's threads with "terminate called without an active exception"
        atexit.register(os._exit, 1)
        reason = re.sub(r"\[\S*gloo\S*\] ", "", first_line(str(error).rpartition("Last error:")[2])).split(". ")[0]
        what = f"because another process has ended or cannot be reached ({reason})"
        how = "restart all of them with --init_from=resume, or let torchrun do so with --max_restarts"
        raise UserError(f"rank {os.environ['RANK']} cannot go on, {what}: {how}") from error


def _roll_call(store: distributed.Store, ranks: Ranks) -> str:
    """A name that only the processes of this start agree on.

    torchrun keeps one store for all its restarts, and PyTorch writes the same keys into it each time: a process that
    starts first would read the addresses of dead ones. So each process draws a ticket, and the name is made of all
    tickets. If a rank sees the old ticket of a late rank, nobody else agrees on that name, and the rank looks again.
    """
    store.set(f"ticket of {ranks.rank}", uuid.uuid4().hex)
    names, deadline, name = [f"ticket of {rank}" for rank in range(ranks.world)], time.monotonic() + ranks.timeout, None
    while time.monotonic() < deadline:
        seen = hashlib.sha256(b"".join(store.multi_get(names))).hexdigest()
        if store.add(seen, int(seen != name)) == ranks.world:
            return seen
        name = seen
        time.sleep(0.05)
    raise distributed.DistStoreError(f"not all of {ranks.world} processes were there within {ranks.timeout:.0f} s")


def _store(ranks: Ranks, limit: datetime.timedelta) -> distributed.Store:
    """The store in which the ranks meet: torchrun's, or one that rank 0 opens.

    Ranks of one machine listen on it alone, because they send each other pickles; PyTorch would listen everywhere.
    """
    if os.environ.get("MASTER_ADDR") in ON_THIS_MACHINE:
        for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            address = "127.0.0.1", int(os.environ["MASTER_PORT"])
            listener = socket.create_server(address, backlog=ranks.world).detach()  # closed by the store
            return distributed.TCPStore(*address, ranks.world, True, limit, master_listen_fd=listener)
    return next(distributed.rendezvous("env://", ranks.rank, ranks.world, timeout=limit))[0]


def join(ranks: Ranks, backend: str, device: torch.device) -> None:
    """Connect to the other ranks: over `backend` on GPUs, otherwise over gloo, because nccl needs GPUs."""
    if ranks.world == 1:
        return
    # before there is a process group: its functions would keep the group as a default argument until the interpreter
    # shuts down, which can end a thread of gloo with "terminate called without an active exception"
    importlib.import_module("torch.distributed.nn.functional")
    limit = datetime.timedelta(seconds=ranks.timeout)
    store = _store(ranks, limit)
    store.set_timeout(limit)
    store = distributed.PrefixStore(_roll_call(store, ranks), store)
    backend = backend if device.type == "cuda" else "gloo"
    # given the device, nccl connects here, and no collective guesses which GPU this rank has
    place = dict(rank=ranks.rank, world_size=ranks.world, device_id=device if backend == "nccl" else None)
    distributed.init_process_group(backend, store=store, timeout=limit, **place)


def require_same_weights(model: torch.nn.Module, ranks: Ranks, iteration: int) -> None:
    """Raise UserError if copies of a weight differ between ranks in the sum of their bits, read as integers."""
    if ranks.world == ranks.shards:
        return
    sums = [local(p.detach()).view(torch.int32).sum() for p in model.parameters()]
    each = ranks.gather(torch.stack(sums).tolist())
    different = [rank for rank, sums in enumerate(each) if sums != each[rank % ranks.shards]]
    if different:
        bad, good = different[0], different[0] % ranks.shards
        pairs = zip(model.named_parameters(), each[bad], each[good])
        names = [name for (name, _), one, other in pairs if one != other]
        what = f"rank {bad} no longer has the weights of rank {good} ({len(names)} differ, such as {names[0]})"
        how = "a device or its memory computes wrongly. Remove that machine and resume from the last checkpoint"
        raise UserError(f"after {iteration} steps, {what}: {how}")


def leave(ranks: Ranks) -> None:
    """Disconnect from the other ranks, at the end of a run that went well."""
    if ranks.world > 1:
        distributed.barrier()  # ending the group with a message still under way can hang gloo's thread
        distributed.destroy_process_group()
        if ranks.shards > 1:
            # PyTorch's caches of sharded tensors keep the group. If its threads still let go of a message when the
            # interpreter shuts down, they end with "terminate called without an active exception"
            time.sleep(0.1)


def parallelize(model: Any, ranks: Ranks, device: torch.device, dtype: torch.dtype, compiled: bool) -> torch.nn.Module:
    """A GPT, `compiled` or not, whose backward averages gradients over the ranks.

    Every rank has a copy of the model (DDP), or a part of it (FSDP) if `ranks.shards` is more than 1.
    """
    if compiled:
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # flex makes its mask inside
    if ranks.shards > 1:
        from fusedgpt.parallel import fsdp  # takes a second to import

        fsdp.shard(model, ranks.shards, ranks.world // ranks.shards, device, dtype, compiled)
        return model
    if compiled:
        model.compile()  # compiles at the first call: DDP's gradient buckets cut the graph
    if ranks.world == 1:
        return model
    devices = [device.index] if device.type == "cuda" else None
    # bucket views: gradients live in the buffers that are sent, so that there is no second copy of them
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)


def gradient_sync(model: torch.nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
    """A context in which backward averages gradients over the ranks only if `enabled`: in a step's last micro-step."""
    if is_shared(model):
        model.set_requires_gradient_sync(enabled)
    elif isinstance(model, DistributedDataParallel) and not enabled:
        return model.no_sync()
    return contextlib.nullcontext()


def finite_weights(model: torch.nn.Module) -> bool:
    """Whether all weights are finite, including those that other ranks hold."""
    sums = torch.stack([local(p.detach()).sum() for p in model.parameters()])
    bad = (~sums.isfinite()).any().float()
    if is_shared(model):
        distributed.all_reduce(bad)
    return not bad


def gradient_norm(model: torch.nn.Module) -> Tensor:
    """The norm of all gradients that there are, on the device. In a divided model it covers all parts."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if all(g.is_cpu for g in grads):
        # row by row: on a CPU, PyTorch's norm of the 38 million weights of GPT-2's wte is 0.26 % too small. Vectors are
        # short enough, and if ranks share them, a separate norm of each would send a message of its own
        grads = [torch.linalg.vector_norm(g, dim=-1) if g.dim() > 1 else g for g in grads]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if is_shared(model) else norm


def is_shared(model: torch.nn.Module) -> bool:
    """Whether ranks share `model`, so that a forward needs all of them."""
    return hasattr(model, "set_requires_gradient_sync")  # an attribute of FSDPModule, which takes a second to import


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be divided."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
