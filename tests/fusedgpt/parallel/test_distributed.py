"""Processes that start together connect, whatever earlier ones left; and a lost one ends them in one sentence."""

import datetime
import math
import os
import pathlib
import tempfile
import time

import pytest
import torch
from torch import distributed as c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from fusedgpt.errors import UserError, one_sentence
from fusedgpt.parallel import distributed
from tests.launch import FORKS, POOL, sentence, together

CPU = torch.device("cpu")
PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def start(work, *args, port):
    """[(exit status, what it printed)] of two processes that do `work` as torchrun's ranks."""
    place = PLACE | {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(2):
            where, log = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, pathlib.Path(folder, str(rank))
            processes.append((FORKS.Process(target=as_rank, args=(where, log, work, args)), log))
            processes[-1][0].start()
        for process, _ in processes:
            process.join(60)
        return [(process.exitcode, log.read_text()) for process, log in processes]


def as_rank(env, log, work, args):
    os.environ.update(env)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with one_sentence(), distributed.others_needed():
        work(distributed.ranks(timeout=30), *args)


@pytest.fixture
def store():
    """The store that torchrun keeps for all its restarts."""
    return c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_nccls_own_reason_is_said(monkeypatch):
    # "unhandled system error" was, of a first start in Docker; the reason stands two lines below
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(distributed.atexit, "register", lambda *_: None)
    said = "NCCL error in: …/NCCLUtils.cpp:94, unhandled system error\nLast error:\nNo space left on device"
    with pytest.raises(UserError, match=r"\(No space left on device\)"), distributed.others_needed():
        raise c10d.DistBackendError(said)


def meet(ranks, late, dies):
    time.sleep(0.3 * (ranks.rank == late))
    distributed.join(ranks, "gloo", CPU)
    if ranks.rank == dies:
        os._exit(9)
    print(ranks.all_reduce(torch.tensor([1.0, ranks.rank])).tolist())
    distributed.leave(ranks)


def test_a_restart_does_not_look_for_the_dead(store):
    # the process that started first read the other's old address, and was refused or waited for PyTorch's 30 minutes
    (died, _), (status, said) = start(meet, None, 0, port=store.port)
    assert (died, status) == (9, 1)
    for late in (0, 1):
        assert start(meet, late, None, port=store.port) == [(0, "[2.0, 1.0]\n")] * 2

    # a process that died is one sentence for the others
    error = sentence(said)
    assert error.startswith("error: rank 1 cannot go on, because another process has")
    assert "Connection" in error and "third_party" not in error and error.endswith("--max_restarts")
    assert "terminate" not in said


@pytest.mark.parametrize("device", [torch.device("cuda", 1), CPU], ids=str)
def test_what_would_keep_the_group_is_imported_first_and_nccl_is_told_its_device(monkeypatch, device):
    # functions that PyTorch defined once there was a group kept it as their default, with its threads. And without the
    # device, the first collective guesses which GPU a rank has
    told = []
    monkeypatch.setattr(c10d, "rendezvous", lambda *_, **__: iter([(c10d.HashStore(), 0, 2)]))
    monkeypatch.setattr(distributed, "_roll_call", lambda *_: "together")
    monkeypatch.setattr(distributed.importlib, "import_module", told.append)
    monkeypatch.setattr(c10d, "init_process_group", lambda backend, **options: told.append((backend, options)))
    distributed.join(distributed.Ranks(1, 1, 2), "nccl", device)
    imported, (backend, options) = told
    assert imported == "torch.distributed.nn.functional"
    assert (backend, options["device_id"]) == (("gloo", None) if device == CPU else ("nccl", device))


def choose_slowly(ranks):
    distributed.join(ranks, "gloo", CPU)
    c10d.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), None)

    def choose():
        time.sleep(2)
        return "chosen by 0"

    print(ranks.from_main(choose))
    distributed.leave(ranks)


def test_a_choice_of_rank_0_may_take_longer_than_a_message(store):
    # the others gave up while rank 0 compiled kernels. Before, PyTorch 2.14 warns of _set_pg_timeout
    assert [(end, said[-12:]) for end, said in start(choose_slowly, port=store.port)] == [(0, "chosen by 0\n")] * 2


def listen(address):
    """The addresses on which a rank listens that has joined another; MASTER_ADDR is `address`."""
    os.environ["MASTER_ADDR"], before = address, listening()
    ranks = distributed.ranks()
    distributed.join(ranks, "gloo", CPU)
    assert ranks.broadcast(ranks.rank) == 0
    found = [addresses for socket, addresses in listening().items() if socket not in before]
    distributed.leave(ranks)
    return found


def listening():
    """{socket: address} of all sockets on which this process listens."""
    files = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    mine = {os.readlink(file) for file in files if os.path.islink(file)}
    tables = (pathlib.Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    lines = (line.split() for table in tables for line in table.splitlines()[1:])
    found = {f"socket:[{fields[9]}]": fields[1].split(":")[0] for fields in lines if fields[3] == "0A"}
    return {socket: address for socket, address in found.items() if socket in mine}


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_ranks_of_one_machine_listen_on_it_alone(address):
    # the store of rank 0 listened on all interfaces: whoever reached it could write what ranks unpickle
    found = POOL.call(2, dict(os.environ), listen, address)
    assert found == [["0100007F"] * 2, ["0100007F"]]  # 127.0.0.1: the store's and gloo's; gloo's


def drift(rank, world):
    model, ranks = torch.nn.Linear(3, 2), distributed.Ranks(rank, rank, world)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    distributed.require_same_weights(model, ranks, 6)
    if rank == 1:
        model.bias.data[1] = torch.nextafter(model.bias.data[1], torch.tensor(1.0))
    with pytest.raises(UserError) as raised:
        distributed.require_same_weights(model, ranks, 7)
    return str(raised.value)


def test_a_rank_that_drifts_by_one_bit_is_named_on_every_rank():
    for said in together(2, drift):
        assert said.startswith("after 7 steps, rank 1 no longer has the weights of rank 0 (1 differ, such as bias)")


@pytest.mark.parametrize("wrong", [{"RANK": "x"}, {"RANK": "2"}, {"LOCAL_RANK": ""}], ids=str)
def test_a_place_is_what_torchrun_says_or_one_sentence(wrong, monkeypatch):
    # RANK=x, a missing variable and a rank beyond the world were tracebacks, or waited for others in vain
    for name, text in PLACE.items():
        monkeypatch.setenv(name, text)
    found = distributed.ranks()
    assert (found.rank, found.local_rank, found.world) == (1, 1, 2)
    for name, text in wrong.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match="which is no place among the processes of a run"):
        distributed.ranks()
    monkeypatch.delenv("RANK")
    assert distributed.ranks() == distributed.Ranks()


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    c10d.init_process_group("gloo", store=c10d.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    c10d.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("shared", [False, True])
def test_the_gradients_norm_is_that_of_float64(shared):
    # PyTorch's own norm adds up ten million squares one by one in float32: 0.04 % too small, also for a rank's part
    model = torch.nn.Sequential(torch.nn.Linear(10**4, 10**3), torch.nn.LayerNorm(10**3))
    drawn = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in model.parameters()]
    exact = math.sqrt(sum(g.double().square().sum() for g in drawn))
    if shared:
        fully_shard(model)
    for p, g in zip(model.parameters(), drawn):
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if shared else g
    assert distributed.is_shared(model) == shared
    assert distributed.gradient_norm(model).item() == pytest.approx(exact, rel=1e-6)
