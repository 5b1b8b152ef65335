"""Run the project's scripts: in this process, in a process of their own, or in ranks that train together.

A script in this process costs no import of PyTorch. Ranks are processes that wait for work, so only their first run
pays for PyTorch's first steps. A process of its own is for what belongs to a process: signals, streams, its start, its
memory.
"""

import atexit
import contextlib
import fcntl
import io
import multiprocessing
import os
import pathlib
import pty
import runpy
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ("bench", "convert", "export", "harness", "plot", "sample", "study", "train")
OURS = ("fusedgpt", "model", "configurator", *SCRIPTS)
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
TIMEOUT_S = 90.0

FORKS = multiprocessing.get_context("forkserver")
SLOW_TO_IMPORT = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.profiler", "tyro")
FORKS.set_forkserver_preload([*SLOW_TO_IMPORT, "train", "sample", "tests.launch"])


def script(name, *args, check: bool = True, **env) -> subprocess.CompletedProcess:
    """Run a script in this process as `python NAME ARGS` would; its status and what it printed.

    env: more environment variables.
    """
    return _checked(_run_here([str(name), *map(str, args)], {**os.environ, **env}), check)


def process(
    name, *args, check: bool = True, prefix: tuple = (), cwd: pathlib.Path = ROOT, **env
) -> subprocess.CompletedProcess:
    """Run a script, or Python with options such as -c, in a process of its own.

    prefix: a command that starts it. cwd: ROOT, or a changed copy of the project, whose modules the script imports.
    """
    command, env = [str(name), *map(str, args)], {**os.environ, **env}
    if prefix or command[0].startswith("-"):
        start, pipes = [*(prefix or [sys.executable]), *command], dict(capture_output=True, text=True)
        done = subprocess.run(start, cwd=cwd, env=env, **pipes, timeout=TIMEOUT_S, check=False)
        return _checked(done, check)
    with tempfile.TemporaryDirectory() as folder:
        streams = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        fork = FORKS.Process(target=_run_fork, args=(command, cwd, env, streams))
        fork.start()
        fork.join(TIMEOUT_S)
        if fork.exitcode is None:
            fork.kill()
            raise subprocess.TimeoutExpired(command, TIMEOUT_S)
        said = [stream.read_text() for stream in streams]
        return _checked(subprocess.CompletedProcess(command, fork.exitcode, *said), check)


@contextlib.contextmanager
def on_terminal(name, *args, columns: int = 80) -> Iterator[tuple]:
    """A script in a process on a terminal of its own, and the terminal's other end: what is written there is typed."""
    keys, terminal = pty.openpty()
    termios.tcsetwinsize(keys, (24, columns))
    child = FORKS.Process(target=_run_on_terminal, args=([str(name), *map(str, args)], os.ttyname(terminal)))
    child.start()
    try:
        yield child, keys
    finally:
        child.kill()
        child.join()
        os.close(keys)
        os.close(terminal)


def ranks(
    world: int, name, *args, check: bool = True, inside: Callable = contextlib.nullcontext, **env
) -> subprocess.CompletedProcess:
    """Run a script in `world` ranks with the variables that torchrun sets, each in the context that `inside()` returns.

    The status is that of the rank that failed, or 0; the text is that of all. If one fails, the others are ended.
    """
    command = [str(name), *map(str, args)]
    done = POOL.call(world, {**os.environ, **env}, _run_as_rank, command, inside)
    status = next((each.returncode for each in done if each and each.returncode), 0)
    said = ["".join(getattr(each, stream) for each in done if each) for stream in ("stdout", "stderr")]
    return _checked(subprocess.CompletedProcess(command, status, *said), check)


def together(world: int, work: Callable, *args) -> list:
    """What `work(rank, world, *args)` returns in each of `world` ranks, which are connected over gloo."""
    return POOL.call(world, dict(os.environ), _work, work, args)


def fails(*args, run: Callable = script, **env) -> str:
    """Run a script with bad input; the one sentence that it ends with, with status 1 and no traceback."""
    done = run(*args, check=False, **env)
    assert done.returncode == 1, done.stdout + done.stderr
    return sentence(done.stderr)


def sentence(said: str) -> str:
    """The one sentence with which a script that said `said` ended, without a traceback."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in said, said[-3000:]
    return errors[0]


def copied(folder: pathlib.Path) -> pathlib.Path:
    """Copy the project to `folder`, without tests and what is not the project's; `folder`."""
    others = shutil.ignore_patterns(".*", "__pycache__", "tests", "*.bin", "meta.json", "out-*", "build", "*.egg-info")
    return shutil.copytree(ROOT, folder, ignore=others)


def _checked(done, check):
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def _run_here(command, env):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    streams = mock.patch.multiple(sys, argv=command, stdin=io.StringIO(), stdout=out, stderr=err)
    with as_it_was(), streams, mock.patch.dict(os.environ, env, clear=True), contextlib.chdir(ROOT):
        status = _status(command)
    return subprocess.CompletedProcess(command, status, *(each.buffer.getvalue().decode() for each in (out, err)))


def _status(command):
    """The exit status of a script that runs as the program."""
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def as_it_was():
    """No signal handler or setting of PyTorch stays behind."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():  # a run's handlers would keep this process from ending
            signal.signal(number, handler)
        if "torch" in sys.modules:
            sys.modules["torch"].use_deterministic_algorithms(False)
        if "torch._dynamo" in sys.modules:  # to import it takes as long as many a test file
            sys.modules["torch"].compiler.reset()  # PyTorch counts recompilations over a whole process


def _run_fork(command, cwd, env, streams):
    for number, path in enumerate(streams, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    if cwd != ROOT:
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
    sys.path[:] = [os.path.dirname(os.path.abspath(command[0])), *(p for p in sys.path if p not in ("", str(ROOT)))]
    if cwd == ROOT:
        sys.path.insert(1, str(ROOT))
    runpy.run_path(command[0], run_name="__main__")


def _run_on_terminal(command, terminal):
    os.setsid()  # so that Ctrl-C becomes a signal
    fcntl.ioctl(keys := os.open(terminal, os.O_RDWR), termios.TIOCSCTTY, 0)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(keys, number)
        setattr(sys, name, os.fdopen(number, "w" if number else "r", buffering=1, closefd=False))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # readline sets it for its children
    _run_fork(command, ROOT, env, [pathlib.Path(terminal)] * 2)


def free_port() -> int:
    """A port on which nobody listens, and which no connection is given by chance before a rank listens there."""
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Pool:
    """Processes that wait for work. One that fails ends all, and the next call starts new ones."""

    def __init__(self):
        self.members = []

    def call(self, world: int, env: dict, work: Callable, *args) -> list:
        """What `work(*args)` returns in each of `world` ranks; None for one that was ended because another failed.

        A result with a `returncode` that is not 0 is a failure. Raises the exception of a rank, or TimeoutError.
        """
        while len(self.members) < world:
            ours, theirs = FORKS.Pipe()
            member = FORKS.Process(target=_serve, args=(theirs,), daemon=True)
            member.start()
            theirs.close()
            self.members.append((member, ours))
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        pipes = [pipe for _, pipe in self.members[:world]]
        for rank, pipe in enumerate(pipes):
            pipe.send((env | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, work, args))
        results, failed, waiting, limit = dict.fromkeys(pipes), [], list(pipes), time.monotonic() + TIMEOUT_S
        try:
            while waiting and not failed:
                ready = connection.wait(waiting, limit - time.monotonic())
                if not ready:
                    raise TimeoutError(f"{len(waiting)} ranks did not end in {TIMEOUT_S} s")
                for pipe in ready:
                    results[pipe] = pipe.recv()  # raises EOFError if the process has ended
                    waiting.remove(pipe)
                answers = results.values()
                failed = [each for each in answers if isinstance(each, Exception) or getattr(each, "returncode", 0)]
        finally:
            if failed or waiting:  # a test that timed out leaves answers that the next call would take for its own
                self.end()
        if failed and isinstance(failed[0], Exception):
            raise failed[0]
        return [*results.values()]

    def end(self):
        """End all processes."""
        for member, _ in self.members:
            member.kill()
        for member, pipe in self.members:
            member.join()
            pipe.close()
        self.members = []


POOL = Pool()
atexit.register(POOL.end)


def _serve(pipe):
    """Do what comes through the pipe, one after another."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this process
    with contextlib.suppress(EOFError):
        while True:
            env, work, args = pipe.recv()
            os.environ.clear()
            os.environ.update(env)
            try:
                with as_it_was():
                    pipe.send(work(*args))
            except Exception as error:
                traceback.print_exc()
                pipe.send(error)


def _run_as_rank(command, inside):
    with inside():
        return _run_here(command, dict(os.environ))


def _work(work, args):
    from torch import distributed

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, rank == 0)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        return work(rank, world, *args)
    finally:
        distributed.destroy_process_group()
