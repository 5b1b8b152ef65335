"""Measure on a GPU everything that there is to measure, the most useful results first.

A few rungs of the ladder come first, because each proves its kernel right before it times it. Numerics, a coarse sweep
and prefill follow, then the tests that need a GPU, then the rest. Each step is its own process and ends within LIMIT
seconds. The same command continues with what is missing. Results go to results/<device>: rows, reports, figures and
tests.json. With --keep, another machine goes on with what an earlier one left.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable

import torch

from fusedgpt import home
from fusedgpt.errors import UserError
from fusedgpt.machine.environment import environment
from fusedgpt.machine.files import atomic, cannot_write, read_jsonl
from fusedgpt.machine.timing import in_words

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 540.0  # seconds after which a step is killed
LAST_ROW = 120.0  # most seconds of LIMIT kept for a row that still runs when time is up, and for the report
REPORT = 60.0  # of these, seconds to start bench.py and to draw the report
LEAST = 10.0  # seconds for its rows with which a step is begun: with fewer, bench.py may end before its first row

# the test files that need a GPU; each relies on what those before it test
TESTS = ["functions", "flash_impl", "permitted", "choose", "receipt", "timing", "memory", "profiler", "model"]
TESTS += ["generate", "engines", "optimizer", "step", "train", "resume", "bench", "ladder", "prefill", "max_batch"]
TESTS += ["peers", "loss", "saver", "parity", "within_documents"]
KINDS = ["ladder", "numerics", "sweep", "prefill", "peers", "max_batch"]
# guesses for an H200 that has compiled nothing yet, to print beside the time that is left
ROW_SECONDS = {"ladder": 40, "numerics": 3, "sweep": 2, "prefill": 5, "peers": 30, "max_batch": 420}
TEST_SECONDS = 40


@dataclasses.dataclass(frozen=True)
class Step:
    """A call of bench.py for a kind, or all test files if the kind is "tests"."""

    kind: str
    flags: tuple[str, ...] = ()
    part: str = ""  # a folder in the results, for rows of another size than those of the kind

    @property
    def name(self) -> str:
        """What lines call the step."""
        return f"{self.kind} {self.part}".rstrip()


# seconds of training at the largest batch. The article trains for an hour. Here a step ends within LIMIT, and two
# kernels, with the search for their batches, should fit into one hour on a lent machine
TRAIN_SECONDS = 180
MAX_BATCH = ("--only=manual,flash", f"--train_seconds={TRAIN_SECONDS}")  # the kernels of the article's figure 3
# a GPU that refuses flash has efficient in its place, and a refused rung costs no run
FIRST_RUNGS = "--only=manual,efficient*,flash,flash + padded vocabulary,cudnn*"
# the size of config/train_shakespeare_char.py, whose steps may wait for Python: the only place for CUDA graphs to pay
SMALL = ("--n_layer=6", "--n_head=6", "--n_embd=384", "--block_size=256", "--batch_size=64", "--dropout=0.2")
SMALL += ("--vocab_size=256", "--only=flash + padded vocabulary*")  # eager, compiled, and replayed as CUDA graphs
# a part of the sweep that ends: with a limit of time alone, every call would spend that time again
COARSE = "--only=attention&256,attention&1024,attention&4096"
ARTICLES = "--only=ordinary,large,loss,* = *"  # numerics without windows and grouped queries
STEPS = [
    Step("ladder", (FIRST_RUNGS, "--profile=True")),
    Step("numerics", (ARTICLES,)),
    Step("sweep", (COARSE,)),
    Step("prefill"),
    Step("tests"),
    Step("ladder"),
    Step("numerics"),
    Step("ladder", SMALL, part="small"),
    Step("peers"),
    Step("max_batch", MAX_BATCH),
    Step("sweep"),
]

# flags with which every step takes seconds on a CPU
_MODEL = ["--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=128", "--batch_size=2", "--steps=6", "--compile=False"]
TINY = {
    "ladder": [*_MODEL, "--block_size=32", "--only=math"],
    "numerics": ["--device=cpu", "--repeats=2", "--only=manual"],
    "prefill": ["--device=cpu", "--models=mistral-small", "--lengths=32", "--repeats=2"],
    "sweep": [*_MODEL, "--heads=2x16", "--lengths=32", "--repeats=2", "--only=manual"],
    "max_batch": [*_MODEL, "--block_size=2048", "--memory_gb=0.75", "--only=manual"],
    "peers": [*_MODEL, "--block_size=64", "--new_tokens=8", "--rounds=1", "--only=*manual"],
}


@dataclasses.dataclass
class Settings:
    results: str = ""  # folder for results; empty: results/ and the name of the device, such as results/h200
    max_seconds: float | None = None  # begin no step after this many seconds; the same command continues
    keep: str = ""  # folder for a copy of results and compiled graphs after each step, read back if they are gone
    rehearse: bool = False  # run each step at tiny sizes on the CPU, to see that it works; results go to out-rehearsal


def folder(s: Settings, device: torch.device) -> pathlib.Path:
    """Where the results of a campaign go. Raises UserError if there is no clone, or no GPU to measure."""
    if home.INSTALLED:
        raise UserError("bench.py gpu also runs tests, which an installed package does not have: run it in a clone")
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


def run(s: Settings, device: torch.device, left: Callable[[str, list[str]], tuple[int, dict[str, int], int]]) -> str:
    """Run what is missing, step by step; returns a line that says what is measured and what is still missing.

    left: (kind, its arguments) -> its missing rows, {what is wrong with others: their number}, its planned rows. Raises
    UserError if a setting is wrong.
    """
    if s.max_seconds is not None and not 0 < s.max_seconds < float("inf"):
        raise UserError(f"max_seconds={s.max_seconds} must be more than 0, and finite")
    results = folder(s, device)
    end_with_steps()
    if s.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    kept = Kept(pathlib.Path(s.keep), short_name(device), results) if s.keep else None
    results.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + (s.max_seconds or float("inf"))
    of, ended = _of(device), {step.name: "" for step in STEPS}
    ran_before = _tests(results, of)
    for step in STEPS:
        if step.kind == "tests":
            for name in TESTS:
                if name not in ran_before:
                    _test(results, name, of, deadline)
                    _keep(kept)
        else:
            how = _measure(step, _arguments(step, results, s.rehearse), deadline, left)
            ended[step.name] = ended[step.name] if how is None else how
            _keep(kept)
    for name in ran_before:  # tests that did not pass run again last, so that they hold nothing up
        if not _passed(ran_before[name]):
            _test(results, name, of, deadline)
            _keep(kept)
    planned = {step.name: step for step in STEPS if step.kind != "tests"}
    for name, step in planned.items():
        if how := _report(step, results, deadline):
            ended[name] = ", ".join(filter(None, (ended[name], how)))
    _keep(kept)
    rows = {name: left(step.kind, _arguments(step, results, s.rehearse)) for name, step in planned.items()}
    return summary(_tests(results, of), rows, ended, results)


def end_with_steps() -> None:
    """Let signals that end this process end its step too, which would go on and disturb what is measured next."""
    for name in ("SIGTERM", "SIGHUP"):  # SIGHUP: the terminal or the ssh session is gone
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def _arguments(step, results, rehearse):
    """bench.py's arguments for a step."""
    return [f"--results={results / step.part}", *(TINY[step.kind] if rehearse else step.flags)]


def _measure(step, args, deadline, left):
    """Run a step of a kind if rows are missing; returns how it ended, "" if well, None if it was not started."""
    missing, seconds = left(step.kind, args)[0], min(LIMIT, deadline - time.monotonic())
    last_row = min(ROW_SECONDS[step.kind] + REPORT, LAST_ROW) + (TRAIN_SECONDS if step.flags == MAX_BATCH else 0)
    if not missing or seconds < last_row + LEAST:
        return None
    command = ["bench.py", step.kind, *args, f"--max_seconds={seconds - last_row}"]
    what = f"{step.name}, {missing} rows"
    status, took = _step(what, command, seconds, min(missing * ROW_SECONDS[step.kind], seconds), deadline)
    return "" if status == 0 else _how(status, took)


def _report(step, results, deadline):
    """Draw the report of a step if it is absent or older than its rows; returns how that failed, or ""."""
    folder, seconds = results / step.part / step.kind, min(LIMIT, deadline - time.monotonic())
    changed = [
        path.stat().st_mtime_ns if path.exists() else 0 for path in (folder / "rows.jsonl", folder / "report.md")
    ]
    if changed[0] <= changed[1] or seconds <= 0:
        return ""
    what = f"the report of {step.name}"
    status, took = _step(what, ["bench.py", "report", str(folder)], seconds, min(REPORT, seconds), deadline)
    return "" if status == 0 else f"its report {_how(status, took)}"


def _test(results, name, of, deadline):
    """Run the test files called `name`, and write their outcome to tests.json. of: as `_of` returns it."""
    seconds = min(LIMIT, deadline - time.monotonic())
    if seconds <= LAST_ROW:
        return
    named = sorted(map(str, (ROOT / "tests").rglob(f"test_{name}.py")))  # also files that have no test for a GPU
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary, "outcomes.jsonl")
        path.touch()
        command = ["-m", "pytest", "-m", "gpu", "-p", "tests.outcomes", f"--outcomes={path}", *named]
        status, took = _step(f"test_{name}.py", command, seconds, TEST_SECONDS, deadline)
        outcomes = {row["test"]: row["outcome"] for row in read_jsonl(path)}  # the last phase of a test counts
    outcome = {"status": status, "seconds": round(took, 1), "passed": list(outcomes.values()).count("passed")}
    for which in ("failed", "skipped", "began"):  # a test that began and has no other outcome hung, or ended pytest
        outcome[which] = [test for test, its in outcomes.items() if its == which]
    found = {"of": of, "files": _tests(results, of) | {name: outcome}}
    with atomic(results / "tests.json", "w") as file:
        json.dump(found, file, indent=1)


def _step(name, command, limit, guess, deadline):
    """Run Python on `command`; (its exit status, seconds). After `limit` seconds it is killed with all its children.

    The status of a step that was killed at its limit is None.
    """
    left = deadline - time.monotonic()
    of = f" of {in_words(left)} that are left" if left < float("inf") else ""
    print(f"== {name}: about {in_words(guess)}{of}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, start_new_session=True)
    status = None
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:  # Windows
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps a killed process
                process.wait(10)
    took = time.monotonic() - began
    if status != 0:
        print(f"== {name} {_how(status, took)}", flush=True)
    return status, took


def _how(status, seconds):
    """How a step failed."""
    after = f"after {in_words(seconds)}"
    return f"was killed at its limit {after}" if status is None else f"ended with status {status} {after}"


class Kept:
    """A copy of a campaign's results and of the graphs that Inductor compiled: one tar file in `folder`.

    It is named after the device, so that a campaign with another --results finds it. Another machine starts from it.
    A file MARK in the results says when they were last copied: files of the copy replace those here only if it is
    later. Times of files would not tell, because a fresh checkout of old results has new ones.
    """

    MARK = ".kept"

    def __init__(self, folder: pathlib.Path, device: str, results: pathlib.Path):
        """Take what is in the copy. Raises UserError if the folder cannot be written."""
        graphs = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(pathlib.Path(tempfile.gettempdir(), "graphs")))
        self.tar, self.parts = folder / f"{device}.tar.gz", {"results": results, "graphs": pathlib.Path(graphs)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise cannot_write(self.tar, error) from error
        if self.tar.exists():
            with tempfile.TemporaryDirectory() as temporary:
                self._take(pathlib.Path(temporary))

    def _take(self, temporary):
        """Unpack the copy into `temporary`, and take from there what is later. A damaged copy is set aside whole."""
        try:
            with tarfile.open(self.tar) as tar:
                tar.extractall(temporary, (member for member in tar if member.isfile()), filter="data")
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            aside = self.tar.replace(self.tar.with_name(f"{self.tar.name}.damaged"))
            print(f"{self.tar} is damaged ({error}): moved to {aside}, and nothing is taken from it", flush=True)
            return
        there_at, here_at = self._copied_at(temporary / "results"), self._copied_at(self.parts["results"])
        for path in temporary.rglob("*"):
            part, *names = path.relative_to(temporary).parts
            here = self.parts[part].joinpath(*names)
            if path.is_dir():
                here.mkdir(parents=True, exist_ok=True)
            # without a mark here, take more rows for the later ones
            elif not here.exists() or (there_at > here_at if here_at else path.stat().st_size > here.stat().st_size):
                shutil.copy2(path, here)

    def _copied_at(self, results):
        return float((results / self.MARK).read_text(encoding="utf-8")) if (results / self.MARK).exists() else 0.0

    def write(self) -> None:
        """Replace the copy by today's files. Raises UserError if the folder cannot be written."""
        with atomic(self.parts["results"] / self.MARK, "w") as file:
            file.write(str(time.time()))
        with atomic(self.tar) as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
            for name, path in self.parts.items():
                if path.exists():
                    tar.add(path, name)


def _keep(kept):
    if kept:
        try:
            kept.write()
        except UserError as error:  # the results are here; a later step may be copied again
            print(f"== not kept: {error}", flush=True)


def _tests(results, of):
    """The outcome of each test file with the code, device and PyTorch in `of`."""
    path = results / "tests.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found["files"] if found.get("of") == of else {}


def _of(device):
    """What the outcome of a test depends on."""
    found = environment(device)
    sources = [*ROOT.glob("*.py"), *ROOT.glob("fusedgpt/**/*.py"), *ROOT.glob("tests/**/*.py")]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:16]
    return {"code": code} | {key: found.get(key) for key in ("device", "torch", "cuda", "cudnn")}


def _passed(outcome):
    return outcome["status"] == 0 and not outcome["failed"]


def _completed(outcome):
    return outcome["status"] in (0, 1)  # pytest's for tests that passed, and for some that failed


def summary(
    tests: dict[str, dict],
    rows: dict[str, tuple[int, dict[str, int], int]],
    ended: dict[str, str],
    results: pathlib.Path,
) -> str:
    """A line with what is measured, what went wrong and what is missing.

    A row that was refused, or for which there is no memory, is an answer. One that fails parity is not, and neither is
    a test that fails or a step that did not end well.
    tests: as _tests returns them. rows: {name of a step: its `left`}. ended: {name: how the step ended, "" if well}.
    """
    ran = sum(outcome["passed"] + len(outcome["failed"]) for outcome in tests.values())
    said = [f"test_{name}.py {_what_failed(outcome)}" for name, outcome in tests.items() if not _passed(outcome)]
    if skipped := sum(len(outcome["skipped"]) for outcome in tests.values()):
        said.append(f"{skipped} skipped")
    done, wrong = [], []
    absent = [f"test_{name}.py" for name in TESTS if name not in tests or not _completed(tests[name])]
    for name, (missing, others, total) in rows.items():
        counts = ", ".join(f"{number} {what}" for what, number in others.items())
        done.append(f"{name} {total - missing} of {total}" + f" ({counts})" * bool(counts))
        if missing:
            absent.append(f"{name} ({missing} rows{', ' * bool(ended[name])}{ended[name]})")
        elif ended[name]:
            wrong.append(f"{name}: {ended[name]}")
    if failed := sum(others.get("parity failed", 0) for _, others, _ in rows.values()):
        wrong.append(f"{failed} rows failed parity")
    if failed := sum(len(outcome["failed"]) for outcome in tests.values()):
        wrong.append(f"{failed} tests failed")
    besides = f" ({'; '.join(said)})" if said else ""
    counted = f"{results}: {ran} tests ran{besides}; rows: {', '.join(done)}"
    if absent:
        return "; ".join([counted, *wrong, f"missing: {', '.join(absent)}. The same command goes on"])
    return "; ".join([counted, *(wrong or ["nothing is missing"])])


def _what_failed(outcome):
    if outcome["failed"]:
        return f"failed {len(outcome['failed'])} of {outcome['passed'] + len(outcome['failed'])}"
    during = "".join(f" in {test.rpartition('::')[2]}" for test in outcome["began"])
    return f"{_how(outcome['status'], outcome['seconds'])}{during}, {outcome['passed']} passed"
