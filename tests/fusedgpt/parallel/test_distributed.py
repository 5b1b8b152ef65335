"""Processes that start together connect, whatever earlier ones left; and a lost one ends them in one sentence."""

import datetime
import math
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from torch import distributed as c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from fusedgpt.errors import UserError
from fusedgpt.machine.device import graphs_compiled
from fusedgpt.parallel import distributed
from model import GPT, GPTConfig
from tests.launch import ROOT, sentence

WORKER = """
import os, sys, time, torch
from fusedgpt.parallel import distributed
from fusedgpt.errors import one_sentence
ranks, late, dies, timeout = distributed.ranks(), *map(int, sys.argv[1:])
with one_sentence():
    time.sleep(2 * (ranks.rank == late))
    distributed.join(ranks, "gloo", torch.device("cpu"), timeout)
    if ranks.rank == dies:
        os._exit(9)
    print(ranks.all_reduce(torch.tensor([1.0, ranks.rank])).tolist())
    distributed.leave(ranks)
"""

CHOICE = """
import sys, time, torch
from fusedgpt.parallel import distributed
from fusedgpt.errors import UserError, one_sentence
takes, distributed.CHOOSING = map(float, sys.argv[1:])
ranks = distributed.ranks(timeout=2)
def choose():
    time.sleep(takes)
    if not takes:
        raise UserError("nothing fits")
    return f"the choice of rank {ranks.rank}"
with one_sentence():
    distributed.join(ranks, "gloo", torch.device("cpu"), ranks.timeout)
    began = time.monotonic()
    try:
        assert ranks.from_main(lambda: "the first choice") == "the first choice"
        print(ranks.from_main(choose))
    finally:
        print(time.monotonic() - began)
    distributed.leave(ranks)
"""

DRIFT = """
import sys, torch
from fusedgpt.parallel import distributed
ranks = distributed.ranks()
distributed.join(ranks, "gloo", torch.device("cpu"))
model = torch.nn.Linear(3, 2)
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.5)
distributed.require_same_weights(model, ranks, 6)
print("same at first")
if ranks.rank == 1:
    model.bias.data[1] = torch.nextafter(model.bias.data[1], torch.tensor(1.0))
try:
    distributed.require_same_weights(model, ranks, 7)
except ValueError as error:
    print(f"rank {ranks.rank}: {error}")
distributed.leave(ranks)
"""


LISTENING = """
import os, torch
from fusedgpt.parallel import distributed
ranks = distributed.ranks()
distributed.join(ranks, "gloo", torch.device("cpu"))
assert ranks.broadcast(ranks.rank) == 0
files = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
mine = {os.readlink(file) for file in files if os.path.islink(file)}
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:  # listens
            print(fields[1].split(":")[0])
distributed.leave(ranks)
"""

THREADS = """
import atexit, glob, torch
from fusedgpt.parallel import distributed
from model import GPT, GPTConfig
def gloo():
    return sum("gloo" in open(name).read() for name in glob.glob("/proc/self/task/*/comm"))
atexit.register(lambda: print(gloo()))  # the last one to be called
ranks = distributed.ranks()
distributed.join(ranks, "gloo", torch.device("cpu"))
model = GPT(GPTConfig(block_size=8, vocab_size=8, n_layer=1, n_head=1, n_embd=8))
parallel = distributed.parallelize(model, ranks, torch.device("cpu"), torch.float32, False, 1)
parallel(*torch.zeros(2, 1, 8, dtype=torch.long))[1].backward()
print(gloo() > 0)
del model, parallel
distributed.leave(ranks)
"""


def run_ranks(code, *args, address="127.0.0.1", port, only=(0, 1), **env):
    """[(exit status, stdout, stderr)] of two processes, or of those in `only`, that run `code` as ranks."""
    place, processes = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}, []
    for rank in only:
        where = os.environ | place | env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", code, *map(str, args)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(subprocess.Popen(command, cwd=ROOT, env=where, **pipes))
    outputs = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs)]


def start(store, late=-1, dies=-1, timeout=30, only=(0, 1)):
    """What WORKER does in ranks that meet at `store`, as torchrun starts them."""
    agent = dict(TORCHELASTIC_USE_AGENT_STORE="True")
    return run_ranks(WORKER, late, dies, timeout, port=store.port, only=only, **agent)


@pytest.fixture
def store():
    """The store that torchrun keeps for all its restarts."""
    return c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_restart_does_not_look_for_the_dead(store):
    # the process that started first read the other's old address, and was refused or waited for PyTorch's 30 minutes
    (died, _, _), (status, _, stderr) = start(store, dies=0)
    assert (died, status) == (9, 1)
    for late in (0, 1):
        assert [(status, out) for status, out, _ in start(store, late=late)] == [(0, "[2.0, 1.0]\n")] * 2

    # a process that died is one sentence for the others
    assert "terminate" not in stderr
    error = sentence(stderr)
    assert error.startswith("error: rank 1 failed while adding up over the processes, because another process has")
    assert "Connection" in error and "third_party" not in error and error.endswith("--max_restarts")


def test_a_process_that_never_comes_ends_the_others_in_time(store):
    began = datetime.datetime.now()
    ((status, _, stderr),) = start(store, timeout=3, only=(1,))
    assert status == 1 and "error: rank 1 failed while connecting" in sentence(stderr)
    assert (datetime.datetime.now() - began).total_seconds() < 3 + 27  # the timeout, and Python's start


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
def test_no_thread_of_gloo_is_left_after_a_run(store):
    # functions that PyTorch defined once there was a group kept it as their default: now and then a run that had ended
    # well was ended by a signal, as its threads met the interpreter's shutdown
    ended = run_ranks(THREADS, port=store.port, TORCHELASTIC_USE_AGENT_STORE="True")
    assert [(status, out) for status, out, _ in ended] == [(0, "True\n0\n")] * 2, ended


def test_rank_0_may_choose_for_longer_than_the_timeout(store):
    # the others waited for it in a broadcast, which gave up while rank 0 compiled kernels
    ended = run_ranks(CHOICE, 6, 60, port=store.port, TORCHELASTIC_USE_AGENT_STORE="True")
    for status, out, stderr in ended:
        said, seconds = out.splitlines()
        assert (status, said) == (0, "the choice of rank 0"), stderr
        assert 6 <= float(seconds) < 60


@pytest.mark.parametrize(
    ("takes", "why"),
    [
        (0, "rank 0 could not choose for all processes: nothing fits"),
        (6, "rank 1 failed while waiting for what rank 0 chooses, .*it did not answer within 4 s"),
    ],
)
def test_a_choice_that_does_not_come_ends_the_others_in_time(store, takes, why):
    # they entered a broadcast that rank 0 never joined; the second choice of a start did not wait for rank 0 at all
    (first, _, chose), (status, out, stderr) = run_ranks(
        CHOICE, takes, 4, port=store.port, TORCHELASTIC_USE_AGENT_STORE="True"
    )
    assert first == status == 1 and ("nothing fits" in chose) == (not takes)
    assert re.search(f"error: {why}", sentence(stderr)), stderr
    assert float(out) < takes + 8 and (float(out) > 4) == bool(takes)


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs Linux's /proc")
def test_ranks_of_one_machine_listen_on_it_alone(tmp_path):
    # the store of rank 0 listened on all interfaces: whoever reached it could write what ranks unpickle
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address in ("localhost", "127.0.0.1"):
        found = [(status, out.split()) for status, out, _ in run_ranks(LISTENING, address=address, port=port)]
        assert found == [(0, ["0100007F"] * 2), (0, ["0100007F"])]  # 127.0.0.1: the store's and gloo's; gloo's


def test_an_error_that_is_no_fault_of_others_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("atexit.register", lambda *_: None)
    with pytest.raises(RuntimeError, match="shapes"), distributed.others_needed("trying"):
        raise RuntimeError("shapes misfit")
    with pytest.raises(UserError, match="failed while trying"), distributed.others_needed("trying"):
        raise c10d.DistBackendError("NCCL: remote process exited")


def test_one_process_needs_nobody():
    alone = distributed.Ranks()
    distributed.join(alone, "nccl", torch.device("cpu"))
    assert alone.all_reduce(torch.tensor([2, 3])).tolist() == [2, 3] and alone.broadcast("x") == "x"
    distributed.leave(alone)
    assert not c10d.is_initialized()


def test_a_rank_that_drifts_by_one_bit_is_named_on_every_rank(store):
    ended = run_ranks(DRIFT, port=store.port, TORCHELASTIC_USE_AGENT_STORE="True")
    for rank, (status, out, stderr) in enumerate(ended):
        assert status == 0 and out.startswith("same at first\n"), stderr
        assert f"rank {rank}: after 7 steps, rank 1 no longer has the weights of rank 0 (1 differ, such as bias)" in out


def test_one_process_has_nobody_to_compare_with():
    distributed.require_same_weights(torch.nn.Linear(2, 2), distributed.Ranks(), 0)
    assert distributed.Ranks().gather("a") == ["a"]


PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NO_PLACE = [{"RANK": text} for text in ("x", "", "-1", "1.0", "2", "３", "9" * 5000)]
NO_PLACE += [{"RANK": "3"}, {"LOCAL_RANK": "y"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "two"}, {"MASTER_PORT": "http"}]
NO_PLACE += [{"MASTER_PORT": "65536"}]
NO_PLACE += [{name: None} for name in PLACE if name != "RANK"]


@pytest.mark.parametrize("wrong", NO_PLACE, ids=lambda wrong: " ".join(f"{n}={t}"[:30] for n, t in wrong.items()))
def test_a_place_that_cannot_be_is_one_sentence(wrong, monkeypatch):
    # RANK=x, a missing variable and a rank beyond the world were tracebacks, or waited for others in vain
    for name, text in (PLACE | wrong).items():
        monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match="which is no place among the processes of a run") as raised:
        distributed.ranks()
    for name, text in (PLACE | wrong).items():
        assert (f"{name}={text}"[:99] if text is not None else f"no {name}") in str(raised.value)


@pytest.mark.parametrize("given", [{}, {"RANK": "0", "LOCAL_RANK": "0"}, {"RANK": "9", "WORLD_SIZE": "16"}])
def test_a_place_is_what_torchrun_says(given, monkeypatch):
    for name, text in (PLACE | given).items():
        monkeypatch.setenv(name, text)
    expected = [int((PLACE | given)[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    found = distributed.ranks()
    assert [found.rank, found.local_rank, found.world] == expected
    monkeypatch.setenv("RANK", "0")
    for name, text in {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MASTER_ADDR")  # a single process meets nobody
    assert distributed.ranks().world == 1
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
    where, process, *began = distributed.launch()["torchrun"].split(":")
    assert (where, int(process)) == (socket.gethostname(), os.getppid())
    assert len(began) == os.path.exists("/proc/self/stat")  # containers reuse process ids


def test_buckets_cut_the_compiled_model_and_the_graphs_are_counted(tmp_path, monkeypatch):
    # DDP's default of 25 MiB makes 14 graphs of GPT-2 124M; run.json and the console say how many there are
    idx = torch.zeros(1, 16, dtype=torch.long)
    c10d.init_process_group("gloo", store=c10d.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        found = []
        for mib in (distributed.BUCKET_MB, 1):
            torch.compiler.reset()
            monkeypatch.setattr(distributed, "BUCKET_MB", mib)
            model = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=3, n_head=2, n_embd=256))
            model.compile(backend="aot_eager")
            parallel = distributed.parallelize(
                model, distributed.Ranks(world=2), torch.device("cpu"), torch.float32, False, 0
            )
            before = graphs_compiled()
            for _ in range(2):
                parallel(idx, idx, logits=False)[1].backward()
            found.append(graphs_compiled() - before)
        assert found[0] == 2 < found[1]  # the first bucket always has 1 MiB, so that sending begins early
    finally:
        c10d.destroy_process_group()


def test_nccl_is_told_its_device(monkeypatch):
    # without the device, the first collective guesses which GPU a rank has
    told = []
    monkeypatch.setattr(c10d, "rendezvous", lambda *_, **__: iter([(c10d.HashStore(), 0, 2)]))
    monkeypatch.setattr(distributed, "_roll_call", lambda *_: "together")
    monkeypatch.setattr(c10d, "init_process_group", lambda backend, **options: told.append((backend, options)))
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        distributed.join(distributed.Ranks(1, 1, 2), "nccl", device)
    assert [(backend, options["device_id"]) for backend, options in told] == [
        ("nccl", torch.device("cuda", 1)),
        ("gloo", None),
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradients_norm_is_that_of_float64(tmp_path, shared):
    # PyTorch's own norm adds up ten million squares one by one in float32: 0.04 % too small, also for a rank's part
    model = torch.nn.Sequential(torch.nn.Linear(10**4, 10**3), torch.nn.LayerNorm(10**3))
    drawn = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in model.parameters()]
    exact = math.sqrt(sum(g.double().square().sum() for g in drawn))
    c10d.init_process_group("gloo", store=c10d.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        if shared:
            fully_shard(model)
        for p, g in zip(model.parameters(), drawn):
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if shared else g
        assert distributed.is_shared(model) == shared
        assert distributed.gradient_norm(model).item() == pytest.approx(exact, rel=1e-6)
    finally:
        c10d.destroy_process_group()
