"""Run scripts of the project in processes that start in a moment: forked from one that has imported PyTorch.

A script finds none of the project's own modules imported. It has its own command line, environment, folder and streams.
"""

import multiprocessing
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection

ROOT = str(pathlib.Path(__file__).resolve().parent.parent)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "torch.distributed", "torch.profiler", "tyro", "tqdm"])  # slow to import


def run(
    command: list[str], cwd: pathlib.Path, env: dict[str, str], timeout: float, closed: tuple[int, ...] = ()
) -> subprocess.CompletedProcess:
    """The finished process of the script `command[0]`, as subprocess.run gives it.

    closed: the numbers of streams that it starts without. Raises subprocess.TimeoutExpired after `timeout` seconds.
    """
    return _finished(command, cwd, [env], timeout, closed)


def ranks(
    world: int, command: list[str], cwd: pathlib.Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """`world` finished processes of a script, with the variables that torchrun sets: the status of the one that failed,
    or 0, and the text of all. If one fails, the others are ended.

    To start them takes a second, torchrun ten. Raises subprocess.TimeoutExpired after `timeout` seconds.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return _finished(command, cwd, [env | shared | place for place in places], timeout)


def _finished(command, cwd, envs, timeout, closed=()):
    with tempfile.TemporaryDirectory() as folder:
        streams = [[pathlib.Path(folder, f"{name}-{n}") for name in ("stdout", "stderr")] for n in range(len(envs))]
        made = [(command, cwd, env, each, closed) for env, each in zip(envs, streams)]
        processes = [FORKS.Process(target=_main, args=args) for args in made]
        for process in processes:
            process.start()
        running, limit, status = processes, time.monotonic() + timeout, 0
        while running and not status and (left := limit - time.monotonic()) > 0:
            connection.wait([process.sentinel for process in running], left)
            status = next((process.exitcode for process in running if process.exitcode), 0)
            running = [process for process in running if process.exitcode is None]
        for process in running:
            process.terminate()
        for process in running:
            process.join(10)
            process.kill()
            process.join()
        if running and not status:
            raise subprocess.TimeoutExpired(command, timeout)
        said = ["".join(path.read_text() for path in paths) for paths in zip(*streams)]
        return subprocess.CompletedProcess(command, status, *said)


def _main(command, cwd, env, streams, closed):
    for number, path in enumerate(streams, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    for number in closed:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as Python does when it starts
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    sys.path[:] = [
        os.path.dirname(os.path.abspath(command[0])),
        *(path for path in sys.path if path not in ("", ROOT)),  # cwd may be a changed copy of the project
    ]
    runpy.run_path(command[0], run_name="__main__")


def together(ranks: int, folder: pathlib.Path, work: Callable, *args) -> list:
    """What `work(rank, ranks, *args)` returns in each of `ranks` processes, connected over gloo. Fails if one fails.

    folder: for a file in which they meet, and for what they return: numbers and tensors.
    """
    import torch

    processes = [FORKS.Process(target=_rank, args=(rank, ranks, folder / "store", work, args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * ranks
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def _rank(rank, ranks, store, work, args):
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    torch.save(work(rank, ranks, *args), store.with_name(f"{rank}.pt"))
    distributed.destroy_process_group()
