"""Processes that can be killed at any instant: runs forked from a process that has imported train.py, and commands."""

import dataclasses
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import pytest
import torch

import train
from fusedgpt.errors import one_sentence
from tests.launch import FORKS, ROOT, free_port

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
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
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
    with one_sentence(train.WITH_LESS):
        train.main(train.Settings(**settings))


def finish(processes: list[multiprocessing.Process], log: pathlib.Path, timeout: float = 120) -> None:
    """Wait for a run to end well."""
    for process in processes:
        process.join(timeout)
        assert process.exitcode == 0, f"status {process.exitcode}: {log.read_text()[-2000:]}"


class Background(subprocess.Popen):
    """A command in the background; its output goes to a file, because a full pipe would hold it up."""

    def __init__(self, *command: str, **env: str):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the command)
        self.read = 0
        streams = dict(stdout=self.log.fileno(), stderr=subprocess.STDOUT)
        super().__init__(command, cwd=ROOT, env=os.environ | env, **streams)

    def output(self) -> str:
        """All that the command has said so far."""
        return os.pread(self.log.fileno(), 1 << 24, 0).decode()

    def until(self, condition: Callable[[], object], seconds: float = 90) -> object:
        """What `condition()` returns, once it is true. The command must not end before that."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert self.poll() is None, self.output()[-2000:]
            assert time.monotonic() < end, f"waited in vain: {self.output()[-2000:]}"
            time.sleep(0.01)
        return found

    def says(self, words: str, seconds: float = 90) -> str:
        """The next line with `words`, once it is said."""
        line = re.compile(f"^.*{re.escape(words)}.*\n", re.MULTILINE)
        found = self.until(lambda: line.search(self.output(), self.read), seconds)
        self.read = found.end()
        return found[0]


def succeeds_or_skips(command: list[str]) -> None:
    """Run a command that not every system lets a test run."""
    if not shutil.which(command[0]):
        pytest.skip(f"this system has no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system does not let tests run {' '.join(command)}: {done.stderr.strip()}")
