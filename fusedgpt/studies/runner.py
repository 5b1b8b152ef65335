"""Runs train.py for each variant and seed of a study, each in a process of its own, and resumes what was broken off."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from fusedgpt.errors import UserError
from fusedgpt.machine import signals, waiting
from fusedgpt.machine.files import Lines, check_lock, json_line
from fusedgpt.runs import run_folder
from fusedgpt.runs.metrics import read_metrics, record_of
from fusedgpt.settings import Settings
from fusedgpt.studies import outcomes
from fusedgpt.studies.design import SETTLED, Design, require_unchanged
from fusedgpt.studies.versions import data, digest

DECIDE = ("dropout", "mask", "window", "dtype", "device")  # settings that decide which kernels can run
POLL_S = 0.05  # seconds between looks at the running processes
# sentences with which train.py ends, as far as a study acts on them
DIVERGED = re.compile(r"no finite gradient|has diverged|weights are not finite")
OUT_OF_ROOM = re.compile(r"cannot write|No space left|disk is full|File too large")
IN_USE = "is in use by another run"  # the run of a killed study, which saves first

# how the threads of all runs wait; asked once, because later the runs themselves make the machine busy
WAIT = waiting.passively_if_busy() or {"OMP_WAIT_POLICY": "ACTIVE"}
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here, because a fork should do little

Say = Callable[[str], None]
Roots = dict[str, pathlib.Path]  # {version: the folder of its code}
Job = tuple[str, int]  # a variant and a seed


def order(plan: Design) -> list[Job]:
    """The runs in the order A B, B A, …: neither variant is always first, so that a slow hour hits all alike."""
    names = list(plan.variants)
    return [(name, seed) for n, seed in enumerate(plan.seeds) for name in (names[::-1] if n % 2 else names)]


def settings_of(plan: Design, variant: str, seed: int, folder: pathlib.Path) -> dict[str, Any]:
    """The settings of a run as flags of train.py: those that are given, or not its defaults."""
    defaults, own = dataclasses.asdict(Settings()), set(plan.varied)
    if own.intersection(DECIDE):
        own.add("attention")  # what a variant settles, another might not do
    named = plan.settings | {name: value for name, value in (plan.settled or {}).items() if name not in own}
    named |= plan.variants[variant]
    if steps := plan.iterations(variant):
        named |= {"max_iters": steps, "lr_decay_iters": steps}
    flags = {n: value for n, value in named.items() if n in plan.given or n not in defaults or value != defaults[n]}
    if named.get("wandb_log"):
        flags["wandb_run_name"] = f"{variant}/seed-{seed}"
    out_dir, start = outcomes.folder_of(folder, variant, seed), named.get("init_from", "scratch")
    if start == "scratch":
        start = "auto"
    elif run_folder.checkpoints(out_dir):
        start = "resume"
    return flags | {"seed": seed, "out_dir": str(out_dir), "init_from": start}


def settle(plan: Design, out_dir: pathlib.Path, folder: pathlib.Path) -> None:
    """Keep in study.json what `auto` became in the run in `out_dir`, once it has made a step, for all runs after it."""
    if plan.settled is None and (record := record_of(out_dir)) and steps_of(out_dir):
        plan.settled = {name: record[name] for name in SETTLED if name in record}  # old code says less
        plan.save(folder)


def gpus() -> list[str]:
    """The GPUs here, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]


def launch(plan: Design, roots: Roots, variant: str, flags: dict, log: IO, if_killed: int, gpu="") -> subprocess.Popen:
    """Start a train.py with these flags in a session of its own: Ctrl-C reaches the study alone, which tells its runs.

    if_killed: the signal that Linux sends it if the study is killed. If there is one version, all variants have it.
    gpu: the only GPU that it sees, if one is named.
    """
    variables = WAIT | os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    if plan.threads:
        variables["OMP_NUM_THREADS"] = str(plan.threads)
    root = roots.get(variant) or next(iter(roots.values()))
    return subprocess.Popen(
        [sys.executable, root / "train.py", *(f"--{name}={value}" for name, value in flags.items())],
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        env=variables,
        start_new_session=True,
        # a system call, 1 is PR_SET_PDEATHSIG, which is safe in a fork: no run is left without its study
        preexec_fn=LIBC and functools.partial(LIBC.prctl, 1, if_killed),  # noqa: PLW1509
    )


@dataclasses.dataclass
class _Process:
    """A run that is going on."""

    job: Job
    out_dir: pathlib.Path
    popen: subprocess.Popen
    log: IO
    gpu: str


class Runner:
    """Runs the jobs of a study."""

    def __init__(self, plan: Design, folder: pathlib.Path, roots: Roots, lock: IO, say: Say):
        self.plan, self.folder, self.roots, self.lock, self.say = plan, folder, roots, lock, say
        self.running, self.signals, self.again = [], [], set()

    def run(self, jobs: list[Job], at_once: int) -> Iterator[Job]:
        """Run the `jobs`, and yield each that has ended.

        A run that is killed is tried once more, after the others. Ends the script after a signal, once the runs have
        saved. Raises UserError if the disk is full, if the code or the data have changed, or if the first run cannot
        start.
        """
        waiting = jobs[::-1]
        self.gpus = gpus() if at_once > 1 else []
        self.lines = Lines(self.folder / "outcomes.jsonl")
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_runs)
            stack.enter_context(signals.handled_by(self._catch))
            while self.running or (waiting and not self.signals):
                # until the first run has settled what `auto` means, it runs alone
                most = 1 if self.plan.settled is None else at_once
                while waiting and len(self.running) < most and not self.signals:
                    self._start(waiting.pop())
                time.sleep(POLL_S)
                if self.running:
                    settle(self.plan, self.running[0].out_dir, self.folder)
                for process in [each for each in self.running if each.popen.poll() is not None]:
                    if self._killed(process):
                        self.again.add(process.job)
                        waiting.insert(0, process.job)
                    elif not self.signals:  # otherwise it saved and ended because the study did
                        self._ended(process)
                        yield process.job
        if self.signals:
            self.say("stopped: the runs have saved. Give the same command to go on")
            sys.exit(128 + self.signals[0])

    def _catch(self, number, frame):
        """End the runs, so that the study can end. A second Ctrl-C ends it at once."""
        self.signals.append(number)
        for process in self.running:
            process.popen.send_signal(signal.SIGTERM)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    def _end_runs(self):
        """End what is running; each run saves first."""
        for process in self.running:
            process.popen.send_signal(signal.SIGTERM)
        for process in self.running:
            process.popen.wait()
            process.log.close()
        self.running = []

    def _start(self, job):
        variant, seed = job
        now = {f"the code of {name}": digest(root) for name, root in self.roots.items() if name in self.plan.code}
        require_unchanged(self.plan, now | data([self.plan.settings | self.plan.variants[variant]]), str(self.folder))
        out_dir = outcomes.folder_of(self.folder, variant, seed)
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        log = open(out_dir.parent / f"{out_dir.name}.log", "ab")  # noqa: SIM115 (kept)
        flags = settings_of(self.plan, variant, seed, self.folder)
        busy = [process.gpu for process in self.running]
        gpu = min(self.gpus, key=busy.count, default="") if ":" not in flags.get("device", "") else ""
        popen = launch(self.plan, self.roots, variant, flags, log, signal.SIGTERM, gpu)
        self.running.append(_Process(job, out_dir, popen, log, gpu))
        if self.signals:  # it came before there was a process to tell
            popen.send_signal(signal.SIGTERM)

    def _killed(self, process):
        """Whether a process that ended was killed, or found its folder in use, for the first time."""
        self.running.remove(process)
        process.log.close()
        status = process.popen.returncode
        killed = status < 0 or status - 128 in signals.ENDING or IN_USE in last_words(process.log.name)
        return killed and process.job not in self.again

    def _ended(self, process):
        """Note how a run ended. Raises UserError if no run could go on."""
        status, why = process.popen.returncode, last_words(process.log.name)
        if status == 0:
            self._note(process.job, "finished")
        elif status < 0:
            self._note(process.job, "failed", f"signal {-status} killed it again (is memory full?)")
        elif OUT_OF_ROOM.search(why):
            raise UserError(f"{why}. Then give the same command: the study goes on")
        elif DIVERGED.search(why):
            self._note(process.job, "diverged", why)
        elif not any(steps_of(outcomes.folder_of(self.folder, *job)) for job in order(self.plan)):
            raise UserError(f"the first run, {name_of(process.job)}, cannot start: {why}")
        else:
            self._note(process.job, "failed", why)

    def _note(self, job, status, why=""):
        check_lock(self.lock)
        row = {"variant": job[0], "seed": job[1], "status": status, "why": why}
        if self.plan.kind == "search":
            row["settings"] = self.plan.variants[job[0]]
        row |= outcomes.row_of(outcomes.folder_of(self.folder, *job))
        self.lines.add(json_line(row))


def name_of(job: Job) -> str:
    """A run in words."""
    return f"{job[0]} with seed {job[1]}"


def steps_of(out_dir: pathlib.Path) -> int:
    """The number of steps in a run's metrics.jsonl."""
    with contextlib.suppress(UserError):
        return len(read_metrics(out_dir, "train"))
    return 0


def last_words(path: str) -> str:
    """The last line of a run's log, which says why it ended."""
    lines = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    return "".join(lines[-1:]).removeprefix("error: ")
