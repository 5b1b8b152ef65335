"""Run scripts of the project in processes that start in a moment: forked from one that has imported PyTorch.

A script finds none of the project's own modules imported. It has its own command line, environment, folder and streams.
"""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "torch.distributed", "torch.profiler", "tyro", "tqdm"])  # slow to import


def run(
    command: list[str], cwd: pathlib.Path, env: dict[str, str], timeout: float, closed: tuple[int, ...] = ()
) -> subprocess.CompletedProcess:
    """The finished process of the script `command[0]`, as subprocess.run gives it.

    closed: the numbers of streams that it starts without. Raises subprocess.TimeoutExpired after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        process = FORKS.Process(target=_main, args=(command, cwd, env, streams, closed))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, process.exitcode, *(s.read_text() for s in streams))


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
        *(path for path in sys.path if path not in ("", str(cwd))),
    ]
    runpy.run_path(command[0], run_name="__main__")
