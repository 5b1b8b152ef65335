"""Measure on a GPU everything that there is to measure, and run the tests that need a GPU: a first look in 18 minutes.

The tests come first; beside them the article's rungs are compiled, all at once. Then comes breadth: a little of every
kind of benchmark. Then depth: more laps, more lengths, more rungs. The same command continues with what is missing.
Results go to results/<device>: rows, reports, figures and tests.txt.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import torch

from fusedgpt import home
from fusedgpt.errors import UserError
from fusedgpt.machine.environment import environment
from fusedgpt.terminal import in_words

START = 15.0  # seconds of a step before its first lap and after its last
WORKERS = 6  # pytest's; each holds a part of the GPU's memory
TESTS_S = 240.0


class Step(NamedTuple):
    """A call of bench.py for a kind, and the seconds that it may take on a GPU."""

    kind: str
    seconds: float
    flags: tuple[str, ...] = ()


RUNGS = "manual,math,efficient,flash,flash + padded vocabulary,cudnn + padded vocabulary,flex + padded vocabulary"
# compiled beside the tests; what they measure there is thrown away
COMPILED = [
    Step("ladder", 120, (f"--only={RUNGS}", "--seconds=1")),
    Step("peers", 120, ("--only=training&*, compiled", "--seconds=1")),
]
# seconds on an H200: contenders took 30 to 75 to be built, from graphs that were compiled before
BREADTH = [
    Step("ladder", 120, (f"--only={RUNGS}", "--seconds=40")),
    Step("peers", 140, ("--only=training&*", "--seconds=40")),
    Step("prefill", 60, ("--models=mistral-7b", "--lengths=2048", "--seconds=10")),
    Step("peers", 110, ("--only=generation&*", "--seconds=20")),
    Step("sweep", 60, ("--lengths=256,1024,4096", "--seconds=2")),
    Step("numerics", 30, ("--only=bfloat16",)),
    Step("max_batch", 300, ("--only=manual,flash",)),  # a kernel's five trials are compiled, and have one row
]
DEPTH = [Step("ladder", 200), Step("sweep", 300), Step("numerics", 60), Step("prefill", 300), Step("peers", 300)]
DEPTH += [Step("max_batch", 300)]
_MODEL = ("--n_layer=1", "--n_head=2", "--n_embd=32", "--compile=False")
TINY = {  # flags of a rehearsal on a CPU
    "ladder": [*_MODEL, "--block_size=32", "--batch_size=1", "--seconds=1"],
    "peers": [*_MODEL, "--block_size=64", "--new_tokens=8", "--seconds=1"],
    "max_batch": [*_MODEL, "--block_size=2048", "--memory_gb=1", "--only=manual"],
    "sweep": ["--heads=2x8", "--lengths=16,32", "--seconds=1"],
    "numerics": [],
    "prefill": ["--models=gpt2", "--lengths=16", "--seconds=1"],
}


@dataclasses.dataclass
class Settings:
    results: str = ""  # folder for results; empty: results/ and the name of the device, such as results/h200
    max_seconds: float | None = None  # begin no step after this many seconds; the same command continues
    nanogpt: str = ""  # folder of a clone of nanoGPT, to measure its step in the same laps
    rehearse: bool = False  # run the first look at tiny sizes on the CPU, to see that it works; into out-rehearsal


def folder(s: Settings, device: torch.device) -> pathlib.Path:
    """Where the results of a campaign go. Raises UserError if there is no clone, or no GPU to measure."""
    if home.INSTALLED:
        raise UserError("bench.py gpu also runs tests, which an installed package does not have: run it in a clone")
    if device.type != "cuda" and not s.rehearse:
        how = "Install a PyTorch with CUDA or ROCm, or try every step at tiny sizes with --rehearse=True"
        raise UserError(f"there is no GPU to measure: PyTorch {torch.__version__} finds {device.type} only. {how}")
    return pathlib.Path(s.results or ("out-rehearsal" if s.rehearse else home.ROOT / "results" / short_name(device)))


def short_name(device: torch.device) -> str:
    """The name of a device as a folder: 'NVIDIA H200' becomes 'h200', 'NVIDIA GeForce RTX 4090' 'rtx-4090'."""
    words = re.findall(r"\w+", environment(device)["device"].lower())
    makers = {"nvidia", "amd", "intel", "tesla", "geforce", "instinct", "radeon", "r", "tm"}
    return "-".join(word for word in words if word not in makers) or device.type


def run(s: Settings, device: torch.device) -> str:
    """Run step by step; returns a line that says what the tests said, and how to go on."""
    results = folder(s, device).absolute()  # steps run in the clone
    results.mkdir(parents=True, exist_ok=True)
    if s.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    end = time.monotonic() + (s.max_seconds or float("inf"))
    steps = BREADTH if s.rehearse else BREADTH + DEPTH
    total = TESTS_S + sum(step.seconds for step in steps)
    plan = ", ".join(f"{step.kind} {step.seconds:.0f} s" for step in steps)
    print(f"== tests {TESTS_S:.0f} s, then {plan}: {in_words(total)} in all", flush=True)
    tests = _tests(results, environment(device), s, end)
    for step in steps:
        seconds = min(step.seconds, end - time.monotonic())
        if seconds > START:  # otherwise it would end before its first lap
            _measure(step, s, results, seconds)
    return f"{results}: {tests}. The same command adds what is missing, and more laps"


def _arguments(step, s, results):
    flags = [flag for flag in step.flags if not s.rehearse or flag.startswith("--only")]
    if s.nanogpt and step.kind == "peers":
        flags.append(f"--nanogpt={pathlib.Path(s.nanogpt).absolute()}")
    if s.rehearse:
        flags += [*TINY[step.kind], "--device=cpu"]
    return [f"--results={results}", *flags]


def _measure(step, s, results, seconds):
    command = ["bench.py", step.kind, *_arguments(step, s, results), f"--max_seconds={max(1.0, seconds - START):.0f}"]
    with _running(" ".join(command), command) as process:
        _wait(process, step.kind, seconds + 60)  # the lap that runs then, and the report


@contextlib.contextmanager
def _running(name, command, log=None):
    """A Python process that has ended, with all its children, at the end of the context."""
    print(f"== {name}", flush=True)
    process = subprocess.Popen([sys.executable, *command], cwd=home.ROOT, start_new_session=True, stdout=log)
    try:
        yield process
    finally:
        ends = [process.terminate, process.kill]
        if hasattr(os, "killpg"):
            ends = [functools.partial(os.killpg, process.pid, number) for number in (signal.SIGTERM, signal.SIGKILL)]
        for end in ends if process.poll() is None else []:
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):  # a driver may keep it
                end()
                process.wait(30)  # after SIGTERM it writes a report


def _wait(process, name, seconds):
    """Wait for a process; says how it ended, unless it ended well."""
    began, how = time.monotonic(), "is ended at its limit"
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        how = f"ended with status {process.returncode}"
    if process.returncode != 0:
        print(f"== {name} {how} after {in_words(time.monotonic() - began)}", flush=True)


def _tests(results, tree, s, end):
    """Run the tests that need a GPU, unless they ran with this commit; the last line of pytest.

    Beside them the steps of COMPILED are built: their graphs stay in Inductor's cache for the steps that follow.
    """
    path, code = results / "tests.txt", json.dumps(tree)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if not (text.startswith(code) and re.search(r"\d (passed|skipped).* in \d", text)):
        with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as running:
            log = running.enter_context(open(path, "w", encoding="utf-8"))  # whatever ends pytest, it has what passed
            print(code, file=log, flush=True)
            command = ["-u", "-m", "pytest", "-vv", "-m", "gpu", "-n", str(WORKERS), *_files_of_tests(s)]
            process = running.enter_context(_running("tests", command, log))
            for step in COMPILED:
                compiled = ["bench.py", step.kind, *_arguments(step, s, temporary)]
                running.enter_context(_running(f"compile {step.kind}", compiled))
            _wait(process, "tests", min(TESTS_S, end - time.monotonic()))
    *_, last = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"{path.name}: {last.strip('= ')}"


def _files_of_tests(s):
    """The files that may have a test for a GPU: others may import what is not installed there."""
    if s.rehearse:
        return ["tests/fusedgpt/machine/test_timing.py"]
    files = sorted(home.ROOT.glob("tests/**/test_*.py"))
    return [str(path) for path in files if re.search("gpu|device", path.read_text(encoding="utf-8"), re.I)]
