"""What a checkpoint costs the training loop: milliseconds, for GPT-2 124M or any other settings.

    python tests/save_cost.py [--name=value ...]

Trains with a checkpoint after every fifth step (--eval_interval=5 --eval_iters=1), and prints one line of JSON: the
time that the loop stood still for a save, how much longer the steps took while a checkpoint was being written, a step,
and a write. The settings are train.py's.
"""

import json
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import train
from configurator import configure
from fusedgpt.runs.run import Run
from fusedgpt.runs.saver import Saver

STEPS = 60  # a checkpoint every fifth


def main(s: train.Settings) -> None:
    """Print what saves cost a run of `s`."""
    stood_still, writing, busy = [], [], []
    save, step, write = Run.save, train.train_step, Saver._write

    def timed_save(*args):
        began = time.perf_counter()
        save(*args)
        stood_still.append(1e3 * (time.perf_counter() - began))

    def timed_write(self, state):
        began = time.perf_counter()
        write(self, state)
        writing.append((began, time.perf_counter()))

    def timed_step(*args):
        began = time.perf_counter()
        result = step(*args)
        busy.append((began, time.perf_counter()))
        return result

    Run.save, train.train_step, Saver._write = timed_save, timed_step, timed_write
    train.main(s)
    print(json.dumps(cost(stood_still[1:-1], writing, busy[5:]) | {"saves": len(stood_still)}))


def cost(stood_still: list[float], writing: list[tuple], steps: list[tuple]) -> dict[str, float | None]:
    """What a save cost, in milliseconds. `writing` and `steps` are (start, end) in seconds.

    step_ms is None if every step ran while a checkpoint was being written, slowed_ms also if none did.
    """
    alone, beside = [], []
    for began, end in steps:
        (beside if any(a < end and began < b for a, b in writing) else alone).append(1e3 * (end - began))
    step = statistics.median(alone) if alone else None
    slowed = (statistics.median(beside) - step) * len(beside) / len(writing) if alone and beside else None
    write = 1e3 * statistics.median(end - began for began, end in writing)
    found = dict(stood_still_ms=statistics.median(stood_still), slowed_ms=slowed, step_ms=step, write_ms=write)
    return {name: ms and round(ms, 1) for name, ms in found.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as out_dir:
        defaults = train.Settings(dataset="python_stdlib", vocab_size=50257, out_dir=out_dir, max_iters=STEPS)
        defaults.eval_interval, defaults.eval_iters, defaults.gradient_accumulation_steps = 5, 1, 1
        defaults.batch_size, defaults.log_interval = 1, 5
        main(configure(defaults, sys.argv[1:], __doc__))
