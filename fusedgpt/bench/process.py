"""A contender in a process of its own, which is stopped while others have the turn.

Compiled graphs, environment variables and memory then belong to one contender alone. The process builds, proves and
warms up, says that it is ready, and waits for turns. Where the system can stop a process, it is stopped between turns,
so that none of its threads waits actively.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from fusedgpt.bench.rows import Ended, status_of
from fusedgpt.machine.turns import Turn

BUILD_LIMIT, TURN_LIMIT = 900.0, 900.0  # seconds after which a contender that builds, or makes a turn, hangs
STOP, CONTINUE = getattr(signal, "SIGSTOP", None), getattr(signal, "SIGCONT", None)  # Windows has neither


class Contender:
    """A process that makes steps when it has the turn.

    build(*args) -> (its turn, what it found out about the contender) runs in the process, so both must be picklable.
    variables: environment variables of the process. log: the file for all that it prints.
    """

    def __init__(self, build: Callable[..., tuple[Turn, dict]], args: tuple, variables: Mapping, log: pathlib.Path):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.log, self.waits = log, False
        self.process = spawn.Process(target=_serve, args=(theirs, build, args, log, os.getpid()), daemon=True)
        with mock.patch.dict(os.environ, variables):
            self.process.start()
        theirs.close()
        # multiprocessing's own way to end it at exit is SIGTERM, on which a stopped process does not act
        atexit.register(self.process.kill)

    def ready(self) -> dict:
        """What the contender found out, once it is built. Raises Ended, with a status and a reason, if it ends."""
        return self._answer(BUILD_LIMIT)

    def turn(self, seconds: float) -> list[float]:
        """The ms of the steps that it made in its turn. Raises Ended if it ends instead."""
        self._signal(CONTINUE)
        with contextlib.suppress(OSError):  # it has ended: the answer says how
            self.pipe.send(seconds)
        self.waits = False
        return self._answer(TURN_LIMIT + 10 * seconds)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self.waits:  # let it end by itself, which frees its semaphores
            self._signal(CONTINUE)
            with contextlib.suppress(OSError):
                self.pipe.send(None)
            self.process.join(5)
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):  # it has ended, and so have its children
                os.killpg(self.process.pid, signal.SIGKILL)  # SIGKILL, which ends stopped processes too
        self.process.kill()
        self.process.join(10)

    def _signal(self, number):
        if number is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def _answer(self, limit):
        try:
            if not self.pipe.poll(limit):
                self.close()
                raise Ended("failed", f"it hung: no answer for {limit:.0f} s")
            kind, *value = self.pipe.recv()
        except (EOFError, ConnectionError):  # it ended without a word
            self.process.join(10)
            raise Ended(*self._how_it_ended()) from None
        if kind == "ended":
            self.process.join(10)
            raise Ended(*value)
        self.waits = True
        self._signal(STOP)
        return value[0]

    def _how_it_ended(self):
        code = self.process.exitcode
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        last = (text.strip().splitlines() or [""])[-1]
        if code == -getattr(signal, "SIGKILL", 9):
            return "out of memory", "the system killed it, as it does if memory is full"
        return "failed", f"its process ended with status {code}" + (f": {last}" if last else "")


def _serve(pipe: Connection, build: Callable, args: Any, log: pathlib.Path, parent: int) -> None:
    """The process of a contender: build it, then make steps whenever seconds come through the pipe."""
    _end_with(parent)
    if hasattr(os, "setpgid"):  # a group of its own: Ctrl-C is for the parent alone, and its children end with it
        os.setpgid(0, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        turn, found = build(*args)
        pipe.send(("ready", found))
        while (seconds := pipe.recv()) is not None:
            pipe.send(("ms", turn(seconds)))
    except EOFError:  # the parent is gone
        pass
    except Exception as error:
        pipe.send(("ended", *status_of(error)))
        raise  # the log gets the traceback


def _end_with(parent):
    """Let the system kill this process when its parent ends, even if it is stopped then (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before
            os._exit(1)
