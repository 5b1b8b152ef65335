"""A call that is killed before one of its changes to files; all of them, one by one, are its kill points."""

import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable

import pytest
import torch

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")
KILLED = 9


def killed_before(number: int, call: Callable[[], object], folder: pathlib.Path) -> str | None:
    """Run `call` in a fork that ends at once before its change `number` (from 0) to a file or folder in `folder`.

    Nothing is cleaned up then, as after SIGKILL. Returns what the change was; None if the call ended well before it.
    """
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    read, write = os.pipe()
    child = os.fork()
    if not child:
        _in_child(number, call, str(folder), write)
    os.close(write)
    with open(read) as told:
        change = told.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED), f"status {status} before change {number}: {change}"
    return change if status else None


def _in_which(event, args):
    """The folder that the path of a change is relative to; shutil.rmtree gives it by number."""
    number = args[1] if event in ("os.remove", "os.rmdir") else -1
    return os.readlink(f"/proc/self/fd/{number}") if number >= 0 else ""


def _in_child(number, call, folder, write):
    changes = 0

    def watch(event, args):
        nonlocal changes
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in CHANGES:
            path = os.path.abspath(os.path.join(_in_which(event, args), str(args[0])))
            if path.startswith(folder) and changes == number:
                os.write(write, f"{event} {path}".encode())
                os._exit(KILLED)
            changes += path.startswith(folder)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)  # a lock that another thread held at the fork stays locked: an end, and no test that never ends
    torch.set_num_threads(1)  # OpenMP's others are not in a fork, and it would wait for them for ever
    try:
        sys.addaudithook(watch)
        call()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
