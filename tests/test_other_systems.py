"""Scripts without what only Unix has. Windows is not tested: this takes from Python what Python lacks there."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import TINY
from tests.launch import ROOT

# Python imports this when it starts, in child processes too. msvcrt, which locks a range of bytes, becomes lockf
AS_ON_WINDOWS = """
import os, signal, sys, types
if "fusedgpt-test" in os.environ.get("SYSTEM", ""):
    import asyncio, fcntl, subprocess  # Python's own modules, which must know that this is not Windows
    def locking(number, mode, size):
        assert mode == 2 and os.lseek(number, 0, os.SEEK_CUR) >= 2**20, "a byte that others read would be locked"
        fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB, size, 0, os.SEEK_CUR)
    sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
    sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")))
    for module, names in (
        (signal, "SIGHUP SIGKILL SIGSTOP SIGUSR1 SIGUSR2 SIGALRM SIGQUIT SIGCHLD setitimer alarm pause"),
        (os, "fork killpg getpgid setsid geteuid getuid getgid nice sched_getaffinity sched_setaffinity sysconf"),
        (os, "getloadavg posix_fadvise mkfifo statvfs pread pwrite sync chown O_DIRECTORY"),
    ):
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
"""


def flags(settings):
    return [f"--{name}={value}" for name, value in settings.items()]


@pytest.fixture
def elsewhere(tmp_path):
    """Runs a script of the project where Python is as on Windows."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(AS_ON_WINDOWS, encoding="utf-8")

    def run(*words):
        environment = os.environ | {"PYTHONPATH": str(folder), "SYSTEM": "fusedgpt-test"}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def test_the_rest_of_python_is_gone(elsewhere):
    # otherwise the tests below would show nothing
    looked = elsewhere(
        "-c", "import os, signal; print(hasattr(signal, 'SIGHUP'), hasattr(os, 'sysconf'))\nimport fcntl"
    )
    assert looked.stdout.split() == ["False", "False"] and "import of fcntl halted" in looked.stderr


def test_a_run_trains_resumes_and_is_sampled(elsewhere, data, tmp_path):
    pytest.importorskip("tyro")
    out = tmp_path / "out"
    short = dict(TINY, dataset=data, out_dir=out, device="cpu", dtype="float32", compile=False, attention="flash")
    short |= dict(max_iters=2, eval_interval=2, eval_iters=1, gradient_accumulation_steps=1, warmup_iters=1)
    steps = [
        ["train.py", *flags(short)],
        ["train.py", *flags(short | dict(max_iters=4, init_from="resume"))],
        ["sample.py", f"--out_dir={out}", "--num_samples=1", "--max_new_tokens=3", "--device=cpu", "--start=0"],
    ]
    for step in steps:
        done = elsewhere(*step)
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["iter"] for line in lines if line["kind"] == "train"] == [0, 1, 2, 3]


def test_a_benchmark_and_a_study_run(elsewhere, data, tmp_path):
    # bench.py imported resource, study.py wanted signal.SIGHUP when a run had failed
    pytest.importorskip("tyro")
    pytest.importorskip("matplotlib")
    bench = elsewhere("bench.py", "numerics", "--device=cpu", "--repeats=1", "--only=manual", f"--results={tmp_path}")
    assert bench.returncode == 0, bench.stdout + bench.stderr
    fails = flags(dict(TINY, dataset=data, device="cpu", n_embd=31, max_iters=1, study_dir=tmp_path / "study"))
    study = elsewhere("study.py", *fails, "--seed=1,2")
    assert study.returncode == 1 and "n_embd" in study.stderr and "Traceback" not in study.stderr


def test_two_runs_cannot_have_one_folder(elsewhere, tmp_path):
    take = f"from fusedgpt.machine import files; held = files.lock({str(tmp_path / 'out')!r}"
    again = "import subprocess, sys\ndone = subprocess.run([sys.executable, '-c', sys.argv[1]], capture_output=True)\n"
    again += "print(done.stderr)"
    refused = elsewhere("-c", f"{take})\n{again}", f"{take})")
    assert "is in use by another run: process" in refused.stdout, refused.stderr
    shared = elsewhere("-c", f"{take}, shared=True)\n{again}", f"{take}, shared=True)")
    assert shared.stdout == "b''\n", shared.stderr
