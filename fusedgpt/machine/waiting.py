"""How the threads of a CPU wait for each other: actively, or passively if other programs want the cores.

At each barrier, a thread that waits actively keeps a core from the thread that it waits for. Beside six programs that
compute, a step of the quick start took 7 and 18 times as long so on two cores. On an idle machine it is faster.
"""

import os
import pathlib
import time
from typing import TextIO

LOADAVG = pathlib.Path("/proc/loadavg")  # Linux: its fourth field begins with the number of threads that run or could


def passively_if_busy() -> dict[str, str]:
    """The variable, for PyTorch's import, that lets threads wait passively if others are busy; {} if it is set."""
    # ranks would take each other for other programs; torchrun gives each of them one thread
    if os.environ.keys() & {"OMP_WAIT_POLICY", "RANK"} or not LOADAVG.exists():
        return {}
    running = []
    for _ in range(5):
        running.append(int(LOADAVG.read_text(encoding="ascii").split()[3].partition("/")[0]))
        time.sleep(0.01)
    busy = min(running) - 1  # without this one
    too_few = busy + len(os.sched_getaffinity(0)) > (os.cpu_count() or 1)  # a container may have some of many cores
    return {"OMP_WAIT_POLICY": "PASSIVE"} if busy and too_few else {}


def announce(stream: TextIO) -> None:
    """Set that variable for this process, and say so on `stream`."""
    if found := passively_if_busy():
        os.environ |= found
        said = "other programs use this machine, so threads wait passively; OMP_WAIT_POLICY=ACTIVE prevents that"
        print(said, file=stream)
