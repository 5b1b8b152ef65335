"""Processes that start together connect, whatever earlier ones left; and a lost one ends them in one sentence."""

import datetime
import glob
import math
import os
import pathlib
import socket
import tempfile
import time

import pytest
import torch
from torch import distributed as c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from fusedgpt.errors import UserError, one_sentence
from fusedgpt.parallel import distributed
from model import GPT, GPTConfig
from tests.launch import FORKS, POOL, sentence, together

CPU = torch.device("cpu")
PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
linux = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")


def start(work, *args, port, only=(0, 1), **env):
    """[(exit status, what it printed)] of two processes, or of those in `only`, that do `work` as torchrun's ranks."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in only:
            where, log = place | env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, pathlib.Path(folder, str(rank))
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
        work(distributed.ranks(), *args)


@pytest.fixture
def store():
    """The store that torchrun keeps for all its restarts."""
    return c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(ranks, late, dies):
    time.sleep(0.3 * (ranks.rank == late))
    distributed.join(ranks, "gloo", CPU, timeout=30)
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


@pytest.fixture
def rank_1(monkeypatch):
    """This process is rank 1 of two, and an error in it leaves no call for its end behind."""
    for name, text in PLACE.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("atexit.register", lambda *_: None)
    return distributed.Ranks(1, 1, 2, timeout=0.0)


def pass_back(ranks):
    distributed.join(ranks, "gloo", CPU)
    model = GPT(GPTConfig(block_size=8, vocab_size=8, n_layer=1, n_head=1, n_embd=8))
    parallel = distributed.parallelize(model, ranks, CPU, torch.float32, False)
    parallel(*torch.zeros(2, 1, 8, dtype=torch.long))[1].backward()
    print(threads_of_gloo() > 0)
    del model, parallel
    distributed.leave(ranks)
    print(threads_of_gloo())


def threads_of_gloo():
    return sum("gloo" in pathlib.Path(name).read_text() for name in glob.glob("/proc/self/task/*/comm"))


@linux
def test_no_thread_of_gloo_is_left_after_a_run(store):
    # now and then a run that had ended well was ended by a signal, as its threads met the interpreter's shutdown
    assert start(pass_back, port=store.port) == [(0, "True\n0\n")] * 2


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


def choose_slowly(ranks, fails):
    distributed.join(ranks, "gloo", CPU, timeout=30)
    c10d.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), None)

    def choose():
        time.sleep(2)
        if fails:
            raise UserError("nothing fits")
        return "chosen by 0"

    print(ranks.from_main(choose))
    distributed.leave(ranks)


def test_a_choice_of_rank_0_may_take_longer_than_a_message(store):
    # the others gave up while rank 0 compiled kernels
    assert start(choose_slowly, False, port=store.port) == [(0, "chosen by 0\n")] * 2


def test_a_choice_that_does_not_come_ends_the_others(store):
    (first, one), (second, other) = start(choose_slowly, True, port=store.port)
    assert first == second == 1 and sentence(one) == "error: nothing fits"
    assert sentence(other).startswith("error: rank 1 cannot go on, because another process has")


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


@linux
@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_ranks_of_one_machine_listen_on_it_alone(address):
    # the store of rank 0 listened on all interfaces: whoever reached it could write what ranks unpickle
    found = POOL.call(2, dict(os.environ), listen, address)
    assert found == [["0100007F"] * 2, ["0100007F"]]  # 127.0.0.1: the store's and gloo's; gloo's


@pytest.mark.usefixtures("rank_1")
def test_an_error_that_is_no_fault_of_others_stays_as_it_is():
    with pytest.raises(RuntimeError, match="shapes"), distributed.others_needed():
        raise RuntimeError("shapes misfit")
    with pytest.raises(UserError, match="rank 1 cannot go on"), distributed.others_needed():
        raise c10d.DistBackendError("NCCL: remote process exited")


def test_one_process_needs_nobody():
    alone = distributed.Ranks()
    distributed.join(alone, "nccl", torch.device("cpu"))
    assert alone.all_reduce(torch.tensor([2, 3])).tolist() == [2, 3] and alone.broadcast("x") == "x"
    distributed.require_same_weights(torch.nn.Linear(2, 2), alone, 0)
    assert alone.gather("a") == ["a"]
    distributed.leave(alone)
    assert not c10d.is_initialized()


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


NO_PLACE = [{"RANK": text} for text in ("x", "", "-1", "2", "３", "9" * 5000)]
NO_PLACE += [{"LOCAL_RANK": "y"}, {"LOCAL_RANK": ""}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": ""}]


@pytest.mark.parametrize("wrong", NO_PLACE, ids=lambda wrong: " ".join(f"{n}={t}"[:30] for n, t in wrong.items()))
def test_a_place_that_cannot_be_is_one_sentence(wrong, monkeypatch):
    # RANK=x, a missing variable and a rank beyond the world were tracebacks, or waited for others in vain
    for name, text in (PLACE | wrong).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match="which is no place among the processes of a run") as raised:
        distributed.ranks()
    assert all(f"{name}={text}"[:99] in str(raised.value) for name, text in wrong.items())


@pytest.mark.parametrize("given", [{}, {"RANK": "0", "LOCAL_RANK": "0"}, {"RANK": "9", "WORLD_SIZE": "16"}])
def test_a_place_is_what_torchrun_says(given, monkeypatch):
    for name, text in (PLACE | given).items():
        monkeypatch.setenv(name, text)
    found = distributed.ranks()
    expected = [int((PLACE | given)[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    assert [found.rank, found.local_rank, found.world] == expected
    monkeypatch.delenv("RANK")
    assert distributed.ranks() == distributed.Ranks()


def test_micro_steps_are_shared_evenly_or_refused():
    shares = [list(distributed.Ranks(rank, rank, 3).micro_steps(9)) for rank in range(3)]
    assert sorted(n for share in shares for n in share) == list(range(9)) and all(len(share) == 3 for share in shares)
    with pytest.raises(UserError, match="gradient_accumulation_steps=8 cannot be shared by 3 processes"):
        distributed.Ranks(0, 0, 3).micro_steps(8)


def test_a_launch_is_known_by_its_id_and_its_process(monkeypatch):
    assert distributed.launch() is None and not distributed.restarted()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert distributed.launch()["id"] == "7" and distributed.restarted()
    assert distributed.launch()["torchrun"] == f"{socket.gethostname()}:{os.getppid()}"


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
