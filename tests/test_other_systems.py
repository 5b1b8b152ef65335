"""Scripts without what only Unix has. Windows is not tested: this takes from Python what Python lacks there."""

import contextlib
import importlib
import sys

import pytest

from tests import launch
from tests.conftest import TINY, flags, rows, small
from tests.launch import FORKS, OURS, ROOT

# Python imports this when it starts
AS_ON_WINDOWS = """
import os, signal, sys
import asyncio, multiprocessing, subprocess  # Python's own modules, which must know that this is not Windows
sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")))
for module, names in (
    (signal, "SIGHUP SIGKILL SIGSTOP SIGUSR1 SIGUSR2 SIGALRM SIGQUIT SIGCHLD setitimer alarm pause"),
    (os, "fork killpg getpgid setsid geteuid getuid getgid nice sched_getaffinity sched_setaffinity"),
    (os, "getloadavg posix_fadvise mkfifo statvfs pread pwrite sync chown O_DIRECTORY"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Runs scripts of the project, one after another, in a process where Python is as on Windows."""

    def run(*commands):
        child = FORKS.Process(target=_as_on_windows, args=(commands, tmp_path / "said"))
        child.start()
        child.join(90)
        return child.exitcode, (tmp_path / "said").read_text(encoding="utf-8")

    return run


def _as_on_windows(commands, said):
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]  # ours look at what Python has when they are imported
    with open(said, "w", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        exec(AS_ON_WINDOWS, {})
        assert not hasattr(importlib.import_module("signal"), "SIGHUP") and sys.modules["fcntl"] is None
        sys.path.insert(0, str(ROOT))
        for sys.argv in commands:
            if status := launch._status([str(ROOT / sys.argv[0])]):
                sys.exit(status)


def test_scripts_do_their_work(elsewhere, data, tmp_path):
    # bench.py imported resource
    out = tmp_path / "out"
    short = dict(max_iters=2, eval_interval=2, eval_iters=1, warmup_iters=1, attention="flash")
    resume = ["train.py", *flags(small(out, data, **short | dict(max_iters=4, init_from="resume")))]
    status, said = elsewhere(
        ["train.py", *flags(small(out, data, **short))],
        resume,
        ["sample.py", f"--out_dir={out}", "--num_samples=1", "--max_new_tokens=3", "--device=cpu", "--start=0"],
        ["bench.py", "plan", "--gpus=1", "--n_layer=1"],
    )
    assert status == 0, said
    assert [row["iter"] for row in rows(out)] == [0, 1, 2, 3]


@pytest.mark.slow  # its two runs each import PyTorch
def test_a_study_whose_runs_fail_says_so(elsewhere, data, tmp_path):
    # study.py wanted signal.SIGHUP when a run had failed
    fails = [f"--{name}={value}" for name, value in dict(TINY, n_embd=31, max_iters=1).items()]
    fails += [f"--dataset={data}", "--device=cpu", f"--study_dir={tmp_path / 'study'}", "--seed=1,2"]
    status, said = elsewhere(["study.py", *fails])
    assert status == 1 and "n_embd" in said and "Traceback" not in said
