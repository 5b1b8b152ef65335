"""Runs train.py for each variant and seed of a study, each in a process of its own, and resumes what was broken off."""

import contextlib
import ctypes
import dataclasses
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from fusedgpt.errors import UserError
from fusedgpt.machine.files import Lines, Lock, json_line
from fusedgpt.runs import run_folder
from fusedgpt.runs.metrics import read_metrics, record_of
from fusedgpt.settings import Settings
from fusedgpt.studies import outcomes
from fusedgpt.studies.design import SETTLED, Design
from fusedgpt.studies.versions import digest, environment, inputs

POLL_S = 0.05  # seconds between looks at the running processes
FRUITLESS = 3  # times that a run may be killed without a step before it counts as failed
# sentences with which train.py ends, as far as a study acts on them
DIVERGED = re.compile(r"no finite gradient|has diverged|weights are not finite")
OUT_OF_ROOM = re.compile(r"cannot write|No space left|disk is full|File too large")
# exit statuses of a run that a signal has ended; Windows has no SIGHUP
ENDED = [128 + getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
IN_USE = "is in use by another run"

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here, because a fork should do little

Say = Callable[[str], None]
Job = tuple[str, int]  # a variant and a seed
Prune = Callable[[Job], bool]


class Stopped(Exception):
    """A signal ended the study; .number is the signal's."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def order(plan: Design) -> list[Job]:
    """The runs in the order A B, B A, …: neither variant is always first, so that a slow hour hits all alike."""
    names = list(plan.variants)
    return [(name, seed) for n, seed in enumerate(plan.seeds) for name in (names[::-1] if n % 2 else names)]


def settings_of(plan: Design, variant: str, seed: int, folder: pathlib.Path) -> dict[str, Any]:
    """The settings of a run as flags of train.py: those that are not its defaults."""
    defaults = dataclasses.asdict(Settings())
    named = plan.settings | {name: value for name, value in (plan.settled or {}).items() if name not in plan.varied}
    named |= plan.variants[variant]
    flags = {name: value for name, value in named.items() if name not in defaults or value != defaults[name]}
    out_dir = outcomes.folder_of(folder, variant, seed)
    if named.get("wandb_log"):
        flags["wandb_run_name"] = f"{variant}/seed-{seed}"
    start = named.get("init_from", "scratch")
    if start == "scratch":
        start = "auto"
    elif run_folder.checkpoints(out_dir):
        start = "resume"
    return flags | {"seed": seed, "out_dir": str(out_dir), "init_from": start}


@dataclasses.dataclass
class _Process:
    """A run that is going on."""

    job: Job
    out_dir: pathlib.Path
    popen: subprocess.Popen
    log: IO
    began_at: int  # steps that were done when this process started
    fruitless: int  # processes in a row before this one that were killed without a step
    pruned: bool = False  # whether it was told to end early


class Runner:
    """Runs the jobs of a study. `code`: {variant: the folder whose train.py runs it}."""

    def __init__(self, plan: Design, folder: pathlib.Path, code: dict[str, pathlib.Path], lock: Lock, say: Say):
        self.plan, self.folder, self.code, self.lock, self.say = plan, folder, code, lock, say
        self.running, self.signals = [], []
        self.digests = {root: digest(root) for root in set(code.values())}

    def run(self, jobs: list[Job], at_once: int, deadline: float, prune: Prune = lambda job: False) -> Iterator[Job]:
        """Run the `jobs`, and yield each that has ended. Begins none after `deadline`, of time.monotonic().

        prune: called again and again with each job that is running; if it returns True, the run is ended.
        Raises Stopped after a signal, once the runs have saved; UserError if the disk is full, or if the first run
        cannot start.
        """
        waiting = jobs[::-1]
        self.lines = Lines(self.folder / "outcomes.jsonl")
        try:
            with self._signals():
                while self.running or (waiting and time.monotonic() < deadline and not self.signals):
                    while waiting and self._may_start(at_once) and time.monotonic() < deadline and not self.signals:
                        self._start(waiting.pop())
                    time.sleep(POLL_S)
                    self._settle()
                    for process in [each for each in self.running if not each.pruned and prune(each.job)]:
                        process.pruned = True
                        process.popen.send_signal(signal.SIGTERM)
                    for process in [each for each in self.running if each.popen.poll() is not None]:
                        if self._ended(process):
                            yield process.job
            if self.signals:
                raise Stopped(self.signals[0])
        finally:
            self._stop_all()
            self.lines.close()

    def _may_start(self, at_once):
        """Until the first run has settled what `auto` means, it runs alone."""
        return len(self.running) < (at_once if self.plan.settled is not None else 1)

    def _start(self, job, fruitless=0):
        variant, seed = job
        self._require_unchanged(variant)
        out_dir = outcomes.folder_of(self.folder, variant, seed)
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        flags = settings_of(self.plan, variant, seed, self.folder)
        command = [sys.executable, self.code[variant] / "train.py", *(f"--{n}={v}" for n, v in flags.items())]
        threads = {"OMP_NUM_THREADS": str(self.plan.threads)} if self.plan.threads else {}
        log = open(out_dir.parent / f"{out_dir.name}.log", "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # a session of its own: Ctrl-C reaches the study alone, which then tells its runs
        popen = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment() | threads,
            start_new_session=True,
            preexec_fn=_die_with_parent if LIBC else None,  # noqa: PLW1509 (safe: it makes one system call)
        )
        self.running.append(_Process(job, out_dir, popen, log, steps_of(out_dir), fruitless))

    def _require_unchanged(self, variant):
        code, known = self.code[variant], self.plan.data
        now = inputs([self.plan.settings | self.plan.variants[variant]])
        changed = [path for path in now if known.get(path, now[path]) != now[path]]
        if digest(code) != self.digests[code]:
            changed.append(f"the code in {code}")
        if changed:
            raise UserError(
                f"{' and '.join(changed)} changed since the study began, so later runs could not be compared with"
                " earlier ones: undo the change and give the same command, or begin another study with --study_dir"
            )

    def _settle(self):
        """Keep what `auto` became in the first run, for all runs after it."""
        if self.plan.settled is not None or not self.running:
            return
        record = record_of(self.running[0].out_dir)
        if record and steps_of(self.running[0].out_dir):  # it has begun
            self.plan.settled = {name: record[name] for name in SETTLED if name in record}  # old code says less
            self.plan.save(self.folder)

    def _ended(self, process):
        """Note how a process ended; whether its run is over. Raises UserError if no run could go on."""
        self.running.remove(process)
        process.log.seek(0)
        said = process.log.read().splitlines()[-1:] or [""]
        process.log.close()
        status, why = process.popen.returncode, said[0].removeprefix("error: ")
        if self.signals:  # it saved and ended because the study did
            return False
        if process.pruned:
            self._note(process.job, "pruned", "its first evaluations were worse than those of other trials")
        elif status == 0:
            self._note(process.job, "finished")
        elif status < 0 or IN_USE in why or status in ENDED:
            return self._again(process, why)
        elif OUT_OF_ROOM.search(why):
            raise UserError(f"{why}. Then give the same command: the study goes on")
        elif DIVERGED.search(why):
            self._note(process.job, "diverged", why)
        elif not any(steps_of(outcomes.folder_of(self.folder, *job)) for job in order(self.plan)):
            raise UserError(f"the first run, {name_of(process.job)}, cannot start: {why}")
        else:
            self._note(process.job, "failed", why)
        return True

    def _again(self, process, why):
        """Resume a run that was killed, or whose folder an earlier process still holds; whether it is over."""
        fruitless = 0 if steps_of(process.out_dir) > process.began_at else process.fruitless + 1
        if IN_USE in why:  # a killed study's run is about to save and end
            time.sleep(1)
        if fruitless >= FRUITLESS * (10 if IN_USE in why else 1):
            how = why if IN_USE in why else f"killed {FRUITLESS} times without a step (is memory full?)"
            self._note(process.job, "failed", how)
            return True
        self.say(f"{name_of(process.job)} was killed: it is resumed")
        self._start(process.job, fruitless)
        return False

    def _note(self, job, status, why=""):
        self.lock.check("the same command and that --study_dir")
        row = {"variant": job[0], "seed": job[1], "status": status, "why": why}
        if self.plan.kind == "search":
            row["settings"] = self.plan.variants[job[0]]
        try:
            self.lines.add(json_line(row))
        except OSError as error:
            raise UserError(f"cannot write {self.lines.path}: {error.strerror}. Make room, and go on") from error

    def _stop_all(self):
        """End all runs; each saves first."""
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.popen.send_signal(signal.SIGTERM)
        for process in self.running:
            process.popen.wait()
            process.log.close()
        self.running = []

    @contextlib.contextmanager
    def _signals(self):
        """Catch signals that end the study, so that it can end its runs first. A second Ctrl-C ends it at once."""

        def catch(number, frame):
            self.signals.append(number)
            for process in self.running:
                process.popen.send_signal(signal.SIGTERM)
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)

        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in numbers}
        for number in [n for n in numbers if before[n] is not signal.SIG_IGN]:
            signal.signal(number, catch)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def name_of(job: Job) -> str:
    """A run in words."""
    return f"{job[0]} with seed {job[1]}"


def steps_of(out_dir: pathlib.Path) -> int:
    """The number of steps in a run's metrics.jsonl."""
    with contextlib.suppress(UserError):
        return len(read_metrics(out_dir, "train"))
    return 0


def _die_with_parent():
    """Have Linux send SIGTERM to this process if its parent is killed, so that no run is left without its study."""
    LIBC.prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
