"""Stand-ins for what takes a study's tests long: train.py, processes for its runs, and figures.

The fake train.py learns nothing but writes what the real one writes, in a tenth of a second.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import IO
from unittest import mock

import torch

import study
from fusedgpt.studies import outcomes, runner, step_time, study_report
from tests.launch import ROOT, script

# The loss falls towards (log10(learning_rate) + 2)² + 1, plus a part that follows from the seed. A rate above 10
# diverges, n_layer=13 is refused, n_layer=14 fills the disk. A step takes FAKE_PAUSE seconds, and says that it took
# 10 ms for each layer, and a little more with each seed. Before its fourth step, a run sends itself the signal that a
# test has written to the file `signal` of its folder, once
FAKE = """
import json, math, os, pathlib, random, signal, sys, time

flags = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
out, rate, seed = pathlib.Path(flags["out_dir"]), float(flags.get("learning_rate", 0.01)) or 0.01, int(flags["seed"])
steps, every = int(flags.get("max_iters", 10)), int(flags.get("eval_interval", 5))
ms = (10.0 + seed) * int(flags.get("n_layer", 1))
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
for name in ("attention", "dtype", "compile"):
    record[name] = flags.get(name, "auto").replace("auto", "settled")
seen = {"device": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": os.environ.get("OMP_NUM_THREADS")}
record |= {"environment": {"torch": "2", **seen}}
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
            os.kill(os.getpid(), number)
        if signals:
            state.write_text(str(iteration))
            sys.exit(143)
        if rate > 10 and iteration == 7:
            sys.exit("error: 21 steps in a row had no finite gradient, the last at iteration 7")
        time.sleep(float(os.environ.get("FAKE_PAUSE", 0)))
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


PROCESS = """
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
from fusedgpt.errors import one_sentence
from fusedgpt.studies import search, step_time, study_report
from tests.fusedgpt.studies import fakes
search.HEARTBEAT_S, search.GRACE_S, search.NAP_S = 1, 4, 0.1  # the trial of a worker that died is soon queued again
step_time.measure, study_report.images = fakes.turns, fakes.no_images
with one_sentence():
    fakes.work(*map(pathlib.Path, sys.argv[1:3]), *sys.argv[3:])
"""


def start(folder: pathlib.Path, code: pathlib.Path, *flags: str, pause: float = 0.0) -> subprocess.Popen:
    """What `work` does, in a process of its own. pause: seconds that a step of the fake train.py takes."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    command = [sys.executable, "-c", PROCESS, folder, code, *flags]
    return subprocess.Popen(command, env=os.environ | {"FAKE_PAUSE": str(pause)}, cwd=ROOT, **pipes)


def here(command: list, stdout: IO, env: dict, **_) -> mock.Mock:
    """Run a train.py to its end in this process; what stands for its Popen."""
    done = script(*command[1:], check=False, **env)
    stdout.write((done.stdout + done.stderr).encode())
    status = done.returncode
    return mock.Mock(returncode=status, **{"poll.return_value": status, "wait.return_value": status})


def turns(plan, names, *_):
    """Stands for step_time.measure: a step of the baseline takes 10 ms, one of each other variant 20."""
    others = [name for name in names if name != plan.baseline]
    return {plan.baseline: {"ms": 10.0}} | {name: dict(ms=20.0, times=2.0, low=2.0, high=2.0) for name in others}


def no_images(results):
    """Stands for study_report.images: a figure takes seconds to draw and write."""
    return {}


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Runs of a study are in this process, one after another, without an import of PyTorch; reports have no figures."""
    with (
        mock.patch.multiple(runner, subprocess=mock.Mock(Popen=here), POLL_S=0),
        mock.patch.object(step_time, "measure", turns),
        mock.patch.object(study_report, "images", no_images),
        mock.patch.object(torch.compiler, "reset"),  # after each script; these compile nothing
    ):
        yield
