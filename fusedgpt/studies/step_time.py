"""How long a step of each variant takes: each trains in turns with the baseline, whatever else the machine does."""

import contextlib
import json
import os
import pathlib
import signal
import statistics
import time
from typing import Any

from fusedgpt.errors import UserError
from fusedgpt.machine import signals, turns
from fusedgpt.studies import runner
from fusedgpt.studies.command import SHARED
from fusedgpt.studies.design import Design

PRECISION = 0.02  # of the ratio of two steps: on a busy machine, ten seconds gave equal code 9 % more iterations
SECONDS = 60.0  # of turns of a variant with the baseline, if that is not reached
TURN = 0.3  # seconds; longer if that is less than two steps
FEWEST, WARM_UP = 10, 5  # laps, and steps before the first
FOREVER = 10**9
# a training that only makes steps, and is killed
STEPS_ALONE = dict(max_iters=FOREVER, lr_decay_iters=FOREVER, eval_interval=FOREVER, eval_iters=1)
STEPS_ALONE |= dict(always_save_checkpoint=False, log_interval=1)  # each step is written at once
# it does not diverge, takes as long, and has no schedule: of equal steps, processes differed by 12 %
STEPS_ALONE |= dict(learning_rate=0.0, decay_lr=False, weight_decay=0.0, schedule="cosine", warmup_iters=0, min_lr=0.0)


def measure(plan: Design, names: list[str], roots: runner.Roots, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """{variant: {ms, and how many times that of `reference` it is: times, low, high}} for the variants `names`.

    The reference is the baseline of the first turns; it has ms alone. The first that starts settles what `auto` means
    for all runs. A variant that cannot be timed is missing, unless --minutes needs its time: then it raises UserError.
    """
    reference = next((name for name, each in plan.times.items() if "times" not in each), plan.baseline)
    found, of_base = {}, []
    optional = contextlib.nullcontext() if plan.minutes else contextlib.suppress(UserError)
    # the trainings are sessions of their own, and on macOS they would outlive the study
    ends = signals.handled_by(signal.default_int_handler)
    with ends, optional, contextlib.closing(_Training(plan, reference, roots, folder)) as base:
        base.warm_up()
        runner.settle(plan, base.out_dir, folder)
        for name in [name for name in names if name != reference]:
            same = (each for each in (reference, *found) if _work(plan, roots, each) == _work(plan, roots, name))
            if twin := next(same, None):
                found[name] = found.get(twin, dict(times=1.0, low=1.0, high=1.0))
                continue
            with optional, contextlib.closing(_Training(plan, name, roots, folder)) as other:
                other.warm_up()
                laps, ratio = _compared(reference, base, name, other)
                of_base += laps.of(reference)
                found[name] = dict(times=ratio.times, low=ratio.low, high=ratio.high)
        of_base = of_base or _compared(reference, base, reference, base)[0].of(reference)
    if not of_base:
        return {}
    # one time of the reference for all, so that a minute in which the machine is slow lengthens the step of none alone
    ms = plan.times.get(reference, {}).get("ms") or statistics.median(of_base)
    return {reference: dict(ms=ms)} | {name: dict(ms=ms * each["times"], **each) for name, each in found.items()}


def _work(plan, roots, variant):
    """What the time of a step depends on: another learning rate alone takes no turns."""
    return roots.get(variant), {name: v for name, v in plan.variants[variant].items() if name not in STEPS_ALONE}


def _compared(reference, base, name, other):
    """Laps of two trainings, and how many times the time of `base` a step of `other` takes."""
    laps, ratio, end = turns.Laps({reference: base.turn, name: other.turn}), None, time.monotonic() + SECONDS
    while len(laps.ms) < FEWEST or (ratio.precision > PRECISION and time.monotonic() < end):
        laps.run(TURN)
        if laps.failed:
            raise next(iter(laps.failed.values()))
        ratio = turns.ratio(laps.ms, reference, name)
    return laps, ratio


class _Training:
    """A train.py that is stopped between its turns."""

    def __init__(self, plan, variant, roots, folder):
        if not hasattr(signal, "SIGSTOP"):
            raise UserError(f"{variant} cannot be timed: this system cannot stop a process")
        self.out_dir = folder / "turns" / variant
        self.out_dir.mkdir(parents=True, exist_ok=True)
        self.path, self.read, self.variant = self.out_dir / "metrics.jsonl", 0, variant
        self.path.unlink(missing_ok=True)
        flags = runner.settings_of(plan, variant, plan.seeds[0], folder)
        flags = {name: value for name, value in flags.items() if name not in SHARED} | STEPS_ALONE
        flags |= {"out_dir": self.out_dir, "init_from": (plan.settings | plan.variants[variant])["init_from"]}
        self.log = open(self.out_dir / "log", "wb")  # noqa: SIM115 (kept)
        self.process = runner.launch(plan, roots, variant, flags, self.log, signal.SIGKILL)

    def warm_up(self):
        """Wait for its first steps, then stop it. Raises UserError if it ends instead."""
        seen = 0
        while seen < WARM_UP:
            seen += len(self._steps())
            self._require_alive()
        self._stop()

    def turn(self, seconds):
        """The ms of the steps that it makes in its turn, without the one that it was stopped in."""
        os.killpg(self.process.pid, signal.SIGCONT)
        began, ms = time.monotonic(), []
        while len(ms) < 2 or time.monotonic() - began < seconds:
            ms += self._steps()
            self._require_alive()
        return (ms + self._stop())[1:]

    def _stop(self):
        os.killpg(self.process.pid, signal.SIGSTOP)
        return self._steps()  # those that it has just made; the next step is the one that it was stopped in

    def _require_alive(self):
        if self.process.poll() is not None:
            raise UserError(f"{self.variant} cannot train: {runner.last_words(self.log.name)}")
        time.sleep(0.005)

    def _steps(self):
        """The ms of the steps that it has made since the last call."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self.read += len(whole)
        rows = [json.loads(line) for line in whole.splitlines()]
        return [row["ms"] for row in rows if row["kind"] == "train" and row["ms"]]

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()
