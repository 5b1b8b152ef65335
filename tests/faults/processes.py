"""Runs of train.py that start in a moment and can be killed at any: forked from a process that has imported it."""

import dataclasses
import multiprocessing
import os
import pathlib
import random
import socket
import sys
from collections.abc import Callable

import torch

import train
from fusedgpt.errors import TRAIN_WITH_LESS, one_sentence
from tests.launch import FORKS

SEED = int(os.environ.get("FAULTS_SEED", "8"))


def rng(name: str) -> random.Random:
    """Random numbers for one test; FAULTS_SEED in the environment changes them."""
    return random.Random(f"{SEED} {name}")


def start(
    settings: train.Settings, log: pathlib.Path, world: int = 1, before: Callable[[], object] = int
) -> list[multiprocessing.Process]:
    """A run of `settings` in as many processes as `world`, as torchrun would start them.

    before: what each process calls before it trains.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in range(world):
        env = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        processes.append(FORKS.Process(target=_main, args=(dataclasses.asdict(settings), env, log, before)))
        processes[-1].start()
    return processes


def _main(settings, env, log, before):
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    sys.stdin.close()
    torch.set_num_threads(1)
    before()
    with one_sentence(TRAIN_WITH_LESS):
        train.main(train.Settings(**settings))


def finish(processes: list[multiprocessing.Process], log: pathlib.Path, timeout: float = 120) -> None:
    """Wait for a run to end well."""
    for process in processes:
        process.join(timeout)
        assert process.exitcode == 0, f"status {process.exitcode}: {log.read_text()[-2000:]}"
