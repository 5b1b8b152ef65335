"""Measure everything that there is to measure on a GPU, the most useful results first.

First come the tests that need a GPU, because a figure of a kernel that computes wrongly is worth nothing. Then come the
kinds of benchmark. Each step is its own process and ends within LIMIT seconds. The same command continues with what is
missing. Results go to results/<device>: rows, reports, figures and tests.json.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from xml.etree import ElementTree

import torch

from fusedgpt.errors import UserError
from fusedgpt.machine.environment import environment
from fusedgpt.machine.files import atomic

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 540.0  # seconds after which a step is killed
LAST_ROW = 120.0  # seconds of LIMIT kept for a row that still runs when time is up, and for the report

# the test files that need a GPU; each relies on what those before it test
TESTS = ["functions", "flash_impl", "choose", "receipt", "timing", "memory", "profiler", "model", "generate"]
TESTS += ["engines", "optimizer", "step", "train", "resume", "bench", "prefill", "max_batch", "peers"]
KINDS = ["ladder", "numerics", "anatomy", "prefill", "sweep", "max_batch", "peers"]
# what a kind measures first, in steps of their own: the article's last rungs with their traces, and its figure 3
FIRST = {"ladder": [["--only=flash,flash +*,cudnn*", "--profile=True"]], "max_batch": [["--only=manual,flash"]]}
# seconds of training at the largest batch. The article trains for an hour. Here a step ends within LIMIT, and two
# kernels, with the search for their batches, should fit into one hour on a lent machine
TRAIN_SECONDS = 180
WHOLE = {"max_batch": [f"--train_seconds={TRAIN_SECONDS}"]}

# sizes at which every step takes seconds on a CPU
_MODEL = ["--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=128", "--batch_size=2", "--steps=6", "--compile=False"]
TINY = {
    "ladder": [*_MODEL, "--block_size=32", "--only=math"],
    "numerics": ["--device=cpu", "--repeats=2", "--only=manual"],
    "anatomy": ["--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--repeats=2"],
    "prefill": ["--device=cpu", "--models=mistral-small", "--lengths=32", "--repeats=2"],
    "sweep": [*_MODEL, "--heads=2x16", "--lengths=32", "--repeats=2", "--only=manual"],
    "max_batch": [*_MODEL, "--block_size=2048", "--memory_gb=0.75", "--only=manual"],
    "peers": [*_MODEL, "--block_size=64", "--new_tokens=8", "--rounds=1", "--only=*manual"],
}


@dataclasses.dataclass
class Settings:
    results: str = ""  # folder for results; empty: results/ and the name of the device, such as results/h200
    max_seconds: float | None = None  # begin no step after this many seconds; the same command continues
    rehearse: bool = False  # run each step at tiny sizes on the CPU, to see that it works; results go to out-rehearsal


def folder(s: Settings, device: torch.device) -> pathlib.Path:
    """Where the results of a campaign go. Raises UserError if there is no GPU to measure."""
    if device.type != "cuda" and not s.rehearse:
        raise UserError(
            f"there is no GPU to measure: PyTorch {torch.__version__} finds {device.type} only. Install a PyTorch with"
            " CUDA or ROCm, or try every step at tiny sizes with --rehearse=True"
        )
    return pathlib.Path(s.results or ("out-rehearsal" if s.rehearse else ROOT / "results" / short_name(device)))


def short_name(device: torch.device) -> str:
    """The name of a device as a folder: 'NVIDIA H200' becomes 'h200', 'NVIDIA GeForce RTX 4090' 'rtx-4090'."""
    words = re.split(r"\W+", environment(device)["device"].lower())
    makers = {"nvidia", "amd", "intel", "tesla", "geforce", "instinct", "radeon", "r", "tm"}
    return "-".join(word for word in words if word and word not in makers) or device.type


def run(s: Settings, device: torch.device, left: Callable[[str, list[str]], tuple[int, int, int]]) -> str:
    """Run what is missing, step by step; returns a line that says what is measured and what is still missing.

    left: (kind, its arguments) -> (missing, disturbed, all): how many such rows it has.
    """
    results = folder(s, device)
    results.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no child is left behind
    if s.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    deadline = time.monotonic() + (s.max_seconds or float("inf"))
    ran_before = _tests(results, device)
    for name in TESTS:
        if name not in ran_before:
            _test(results, name, device, deadline)
    arguments = {kind: [f"--results={results}", *(TINY if s.rehearse else WHOLE).get(kind, [])] for kind in KINDS}
    for kind, whole in arguments.items():
        steps, last_row = [whole], LAST_ROW
        if not s.rehearse:
            steps = [[*whole, *first] for first in FIRST.get(kind, [])] + steps
            last_row += TRAIN_SECONDS * (kind == "max_batch")
        for args in steps:
            seconds = min(LIMIT, deadline - time.monotonic())
            if seconds > last_row and left(kind, args)[0]:
                _step(f"bench.py {kind}", ["bench.py", kind, *args, f"--max_seconds={seconds - last_row}"], seconds)
    for name in ran_before:  # tests that did not pass run again last, so that they hold nothing up
        if not _passed(ran_before[name]):
            _test(results, name, device, deadline)
    return summary(_tests(results, device), {kind: left(kind, arguments[kind]) for kind in KINDS}, results)


def _step(name, command, seconds):
    """Run Python on `command`; kill it with all its children after `seconds`."""
    print(f"== {name}")
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"== {name} was ended after {seconds:.0f} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _test(results, name, device, deadline):
    """Run the test file called `name`, and write its outcome to tests.json."""
    seconds = min(LIMIT, deadline - time.monotonic())
    if seconds <= LAST_ROW:
        return
    (file,) = (ROOT / "tests").rglob(f"test_{name}.py")
    outcome = {"ended_after": seconds}
    with tempfile.TemporaryDirectory() as temporary:
        xml = pathlib.Path(temporary, "junit.xml")
        _step(f"test_{name}.py", ["-m", "pytest", "-m", "gpu", f"--junitxml={xml}", str(file)], seconds)
        if xml.exists():
            suite = ElementTree.parse(xml).find("testsuite")
            outcome = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    found = {"of": _of(device), "files": _tests(results, device) | {name: outcome}}
    with atomic(results / "tests.json", "w") as file:
        json.dump(found, file, indent=1)


def _tests(results, device):
    """The outcome of each test file with this code, device and PyTorch."""
    path = results / "tests.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found["files"] if found.get("of") == _of(device) else {}


def _of(device):
    """What the outcome of a test depends on."""
    found = environment(device)
    sources = [*ROOT.glob("*.py"), *ROOT.glob("fusedgpt/**/*.py"), *ROOT.glob("tests/**/*.py")]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:16]
    return {"code": code} | {key: found.get(key) for key in ("device", "torch", "cuda", "cudnn")}


def _passed(outcome):
    return "ended_after" not in outcome and not outcome["failures"] + outcome["errors"]


def summary(tests: dict[str, dict], rows: dict[str, tuple[int, int, int]], results: pathlib.Path) -> str:
    """A line with what is measured and what is missing. tests: as _tests returns them; rows: {kind: its `left`}."""
    ran = sum(outcome.get("tests", 0) - outcome.get("skipped", 0) for outcome in tests.values())
    bad = [f"test_{name}.py" for name, outcome in tests.items() if not _passed(outcome)]
    failed = f", of which {', '.join(bad)} did not pass" if bad else ""
    done, absent = [], [f"test_{name}.py" for name in TESTS if name not in tests]
    for kind, (missing, disturbed, total) in rows.items():
        done.append(f"{kind} {total - missing} of {total}")
        if disturbed:
            done[-1] += f" ({disturbed} disturbed)"
        if missing:
            absent.append(f"{kind} ({missing} rows)")
    said = f"{results}: {ran} tests ran{failed}; rows: {', '.join(done)}"
    if absent:
        return f"{said}; missing: {', '.join(absent)}. The same command goes on"
    return f"{said}; nothing is missing"
