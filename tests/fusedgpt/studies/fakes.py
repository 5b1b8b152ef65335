"""Stand-ins for what takes a study's tests long: train.py, processes for its runs, and figures.

The fake train.py learns nothing but writes what the real one writes, in a tenth of a second.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import IO
from unittest import mock

import torch

import study
from fusedgpt.studies import outcomes, report, runner, step_time
from tests.launch import ROOT, script

# The loss falls towards (log10(learning_rate) + 2)² + 1, plus a part that follows from the seed. A rate above 10
# diverges, n_layer=13 is refused, n_layer=14 fills the disk. A step takes FAKE_PAUSE seconds for each layer, and
# says so if n_layer is given. Before its fourth step, a run sends the signal that a test has written to the file
# `signal` of its folder, once: to itself, or to its study if the number is negative
FAKE = """
import json, math, os, pathlib, random, signal, sys, time

flags = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
out, rate, seed = pathlib.Path(flags["out_dir"]), float(flags.get("learning_rate", 0.01)) or 0.01, int(flags["seed"])
steps, every = int(flags.get("max_iters", 10)), int(flags.get("eval_interval", 5))
pause = float(os.environ.get("FAKE_PAUSE", 0)) * int(flags.get("n_layer", 1))
names = ("attention", "dtype", "compile")
if flags.get("n_layer") in ("13", "14"):
    sys.exit("error: n_layer=13 is unlucky" if flags["n_layer"] == "13" else "error: cannot write x: No space left")
out.mkdir(parents=True, exist_ok=True)
(out / "pid").write_text(str(os.getpid()))
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
state = out / "ckpt.pt"
start = int(state.read_text()) if state.exists() and flags["init_from"] in ("auto", "resume") else 0
flags["init_from"] = "resume" if start else "scratch"
record = {"settings": {**flags, "max_iters": steps}, "tokens_per_step": 100, "device": "cpu", "world_size": 1}
record |= {name: flags.get(name, "auto").replace("auto", "settled") for name in names}
record |= {"environment": {"torch": "2", "threads": os.environ.get("OMP_NUM_THREADS")}}
(out / "run.json").write_text(json.dumps(record))
path = out / "metrics.jsonl"
kept = [line for line in path.read_text().splitlines() if json.loads(line)["iter"] < start] if path.exists() else []
path.write_text("".join(line + "\\n" for line in kept))

def loss(iteration):
    if rate > 10:
        return math.nan
    noise = random.Random(f"{seed} {rate}").gauss(0, 0.01) + random.Random(seed).gauss(0, 0.1)
    return (math.log10(rate) + 2) ** 2 + 1 + noise + math.exp(-iteration)

with open(path, "a", buffering=1) as file:
    def write(**row):
        file.write(json.dumps({name: None if value != value else value for name, value in row.items()}) + "\\n")

    for iteration in range(start, steps + 1):
        if iteration % every == 0 or iteration == steps:
            value = loss(iteration)
            write(kind="eval", iter=iteration, train_loss=value, val_loss=value, val_bits_per_byte=value / 2)
            aside = out / ".ckpt.tmp"
            aside.write_text(str(iteration))
            aside.replace(state)
        if iteration == steps:
            break
        if iteration == 3 and (out / "signal").exists():
            number = int((out / "signal").read_text())
            (out / "signal").unlink()
            os.kill(os.getppid() if number < 0 else os.getpid(), abs(number))
            while number < 0 and not signals:
                time.sleep(0.01)
        if signals:
            state.write_text(str(iteration))
            sys.exit(143)
        if rate > 10 and iteration == 7:
            sys.exit("error: 21 steps in a row had no finite gradient, the last at iteration 7")
        began = time.perf_counter()
        time.sleep(pause)
        ms = 10.0 + seed
        if "n_layer" in flags and pause:
            ms = 1e3 * (time.perf_counter() - began)
        write(kind="train", iter=iteration, loss=loss(iteration), ms=ms, tokens_per_s=1e4, lr=rate)
"""


def code(folder: pathlib.Path) -> pathlib.Path:
    """Write the fake train.py to `folder`, with data that it does not read, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"train.py": FAKE, "train.bin": "ids of text.", "val.bin": "ids of more."}.items():
        (folder / name).write_text(content)
    return folder


def work(folder: pathlib.Path, code: pathlib.Path, *flags: str) -> outcomes.Results:
    """Run study.py with these flags and the fake train.py in `code`; what `folder` then has."""
    settings = (f"--study_dir={folder}", f"--dataset={code}", "--learning_rate=1e-3", "--min_lr=0", "--max_iters=27")
    settings += ("--eval_interval=3", "--seed=1")
    given = {flag.partition("=")[0]: flag for flag in (*settings, *flags)}
    with mock.patch.object(study, "SCRIPTS", code):
        study.main([*given.values()])
    return outcomes.read(folder)


# a worker of a search in a process of its own: its trial is queued again 4 seconds after it died
WORKER = """
import pathlib, sys
from fusedgpt.errors import one_sentence
from fusedgpt.studies import search
from tests.fusedgpt.studies import fakes
search.HEARTBEAT_S, search.GRACE_S, search.NAP_S = 1, 4, 0.1
with one_sentence():
    fakes.work(*map(pathlib.Path, sys.argv[1:3]), *sys.argv[3:])
"""


def start(folder: pathlib.Path, code: pathlib.Path, *flags: str, pause: float = 0.02) -> subprocess.Popen:
    """Start a worker. pause: seconds that a step of the fake train.py takes."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    command = [sys.executable, "-c", WORKER, folder, code, *flags]
    return subprocess.Popen(command, env=os.environ | {"FAKE_PAUSE": str(pause)}, cwd=ROOT, **pipes)


def send(number: int, out_dir: pathlib.Path) -> None:
    """Let the fake run in `out_dir` send a signal: to itself, or to its study if `number` is negative."""
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "signal").write_text(str(number))


class Here:
    """Stands for a Popen: its command, a train.py, has run to its end in this process."""

    def __init__(self, command: list, stdout: IO, env: dict, **_):
        done = script(*command[1:], check=False, **env)
        stdout.write((done.stdout + done.stderr).encode())
        self.returncode = done.returncode

    def poll(self) -> int:
        """The exit status."""
        return self.returncode

    wait = poll

    def send_signal(self, number: int):
        """It comes too late."""


def turns(plan, names, *_):
    """Stands for step_time.measure: a step of the baseline takes 10 ms, one of each other variant 20."""
    others = [name for name in names if name != plan.baseline]
    return {plan.baseline: {"ms": 10.0}} | {name: dict(ms=20.0, times=2.0, low=2.0, high=2.0) for name in others}


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Runs of a study, and dry runs, are in this process, one after another: no import of PyTorch for each."""
    processes = types.SimpleNamespace(Popen=Here, DEVNULL=None)
    with (
        mock.patch.multiple(runner, subprocess=processes, POLL_S=0),
        mock.patch.object(step_time, "measure", turns),
        mock.patch.object(torch.compiler, "reset"),  # after each script; these compile nothing
    ):
        yield


@contextlib.contextmanager
def no_figures() -> Iterator[None]:
    """Reports have no figures, which take seconds to draw and write."""
    with mock.patch.object(report, "images", lambda results: {}):
        yield
