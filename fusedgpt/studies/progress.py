"""What a study says before it starts and while it runs: an outlook, a bar over its runs, the best and the verdict."""

import math
import pathlib
import re
import subprocess
import sys
import time

from tqdm import tqdm

from fusedgpt.errors import UserError
from fusedgpt.machine.timing import in_words
from fusedgpt.studies import outcomes
from fusedgpt.studies.design import Design
from fusedgpt.studies.runner import Job, name_of, settings_of

TRIED = 6  # variants that an outlook makes a dry run of, at most
SECONDS = {"s": 1, "min": 60, "h": 3600, "days": 86400}
ESTIMATE = re.compile(r"^estimate: (.+?), until", re.M)
CHECKPOINT = re.compile(r"a checkpoint takes ([\d,]+) MB")


def outlook(plan: Design, folder: pathlib.Path, code: dict[str, pathlib.Path], left: list[Job], at_once: int) -> str:
    """How many runs are left, how long they take, and the disk that they need, by dry runs of some variants.

    Raises UserError if a variant cannot run.
    """
    names = list(dict.fromkeys(name for name, _ in left))
    tried = names[:: math.ceil(len(names) / TRIED)] if names else []
    seconds, megabytes = zip(*(_dry_run(plan, name, folder, code[name]) for name in tried)) if tried else ((0,), (0,))
    each, held = sum(seconds) / len(seconds), sum(megabytes) / len(megabytes)
    copies = 1 + plan.settings["keep_checkpoints"]  # the latest ones, and the best
    total = in_words(len(left) * each / at_once)
    sizes = f"{held * copies * len(left) / 1e3:,.1f} GB of disk at most ({copies} checkpoints of {held:,.0f} MB a run)"
    runs = f"{len(plan.variants)} variants × {len(plan.seeds)} seeds"
    if plan.kind == "search":
        runs = f"trials of {len(plan.seeds)} seeds, which may take more or less than the config's settings"
    return f"{runs}: {len(left)} runs are left, of {in_words(each)} each: about {total}, and {sizes}"


def _dry_run(plan, variant, folder, root):
    """(seconds, megabytes of a checkpoint) of a run, as its dry run estimates them."""
    flags = settings_of(plan, variant, plan.seeds[0], folder) | {"dry_run": True}
    began = time.perf_counter()
    command = [sys.executable, root / "train.py", *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UserError(f"{variant} cannot run: {said.removeprefix('error: ')}")
    start = time.perf_counter() - began  # with a few steps, as long as a run takes to start
    found, size = ESTIMATE.search(done.stdout), CHECKPOINT.search(done.stdout)
    steps = seconds_in(found[1]) if found else 60 * (plan.settings.get("minutes") or 0)
    return start + steps, float(size[1].replace(",", "")) if size else 0.0


def seconds_in(words: str) -> float:
    """The seconds of a duration that timing.in_words has put in words."""
    return sum(float(number) * SECONDS[unit] for number, unit in re.findall(r"([\d.e+-]+) (s|min|h|days)", words))


class Progress:
    """A bar over the runs of a study, and lines above it."""

    def __init__(self, plan: Design, folder: pathlib.Path, done: int):
        self.plan, self.folder = plan, folder
        total = len(plan.variants) * len(plan.seeds)
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=done, disable=quiet, leave=False, unit="run", dynamic_ncols=True)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        tqdm.write(line)
        sys.stdout.flush()

    def ended(self, job: Job) -> None:
        """Say how a run ended; after the last run of a seed, also how the verdict stands."""
        results = outcomes.read(self.folder)
        this = next(each for each in results.outcomes if (each.variant, each.seed) == job)
        value = f"{self.plan.metric} {this.value:.5g}" if this.status == "finished" else f"{this.status}: {this.why}"
        self.say(f"{name_of(job)}: {value}")
        values = results.values()
        means = {name: sum(each.values()) / len(each) for name, each in values.items() if each}
        if means:
            best = min(means, key=means.get)
            self.bar.set_postfix_str(f"best so far: {best} {means[best]:.4f}")
        self.bar.update()
        complete = all(each.status != "missing" for each in results.outcomes if each.seed == job[1])
        if complete and len(values[self.plan.baseline]) > 1 and job[1] != self.plan.seeds[-1]:
            for line in results.sentences():
                self.say(f"so far: {line}")

    def close(self) -> None:
        """Remove the bar."""
        self.bar.close()
