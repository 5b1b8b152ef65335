"""What `auto` picks beside a busy neighbour, and how much time it loses by that.

    python tests/auto_tries.py [TRIES]        default: 20

First every kernel, and every dtype of generation, is timed with care: leave the machine idle. Then a process of this
script spins, and `auto` chooses so many times. Prints a line of JSON for each case: the milliseconds of each candidate
on the idle machine, how often each was picked, and the most that a pick loses against the best, as a share of its time.
"""

import collections
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from fusedgpt.attention import choose
from fusedgpt.attention.case import Case
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.generation import engines
from fusedgpt.machine import memory, timing
from fusedgpt.machine.device import dtype_name
from model import GPT, GPTConfig

CPU, ROUNDS = torch.device("cpu"), 30
ATTENTION = {  # (B, nh, T, hs) of a training step of
    "config/quickstart.py": (16, 4, 128, 32),
    "config/train_shakespeare_cpu.py": (24, 4, 64, 32),
    "config/train_text_cpu.py": (16, 4, 128, 64),
    "GPT-2 124M, 1 x 1024": (1, 12, 1024, 64),
}
SAMPLING = {  # dimensions, samples and ids of a prompt of
    "config/train_shakespeare_cpu.py": (dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128), 10, 1),
    "GPT-2 124M": (dict(), 1, 32),
}


@contextlib.contextmanager
def neighbour():
    """A process that keeps a core busy."""
    spin = (
        "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with this script, however it ends
    )
    spinning = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def with_care(steps):
    """The median milliseconds of each of {name: step}, in turns: the clock may be quicker while one has its turn."""
    ms = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            ms[name] += timing.own_samples(step, CPU, count=2, warmup=1)
    return {name: statistics.median(each) for name, each in ms.items()}


def of_attention(shape):
    """The kernels of a case with their times, and a function that lets auto pick one."""
    case = Case(shape, CPU, torch.float32)
    inputs, names = case.inputs(), [name for name in SINGLE_KERNELS if not choose.refusal(name, case)]
    steps = {name: lambda name=name: case.run(choose.as_run(name, case), *inputs) for name in names}
    return with_care(steps), lambda: choose.fastest(case)[0]


def of_sampling(dimensions, samples, ids):
    """The dtypes of a token after the prompt with the times of all layers, and a function that lets auto pick one."""
    model = GPT(GPTConfig(**dimensions)).eval()
    idx = torch.zeros(samples, 1, dtype=torch.long)
    models = {dtype_name(dtype): engines.ready(model, CPU, dtype, compiled=False) for dtype in engines.PRECISE_FIRST}

    @torch.no_grad()
    def token(name):
        models[name](idx, cache=engines.new_cache(model.config, 1))

    steps = {name: lambda name=name: token(name) for name in models}
    return with_care(steps), lambda: dtype_name(engines.fastest_dtypes(model, samples, ids)[0][1])


def row(what, case, times, pick, tries):
    """A line: what was picked in so many tries beside a neighbour."""
    with neighbour():
        picks = collections.Counter(pick() for _ in range(tries))
    best = min(times.values())
    rounded = {name: round(ms, 3) for name, ms in times.items()}
    loses = max(times[name] / best - 1 for name in picks)
    return {"what": what, "case": case, "ms": rounded, "picks": picks, "tries": tries, "loses": round(loses, 4)}


def main(tries=20):
    """Print the rows."""
    memory.keep_freed_memory(keep=True)  # as train.py and sample.py do
    for case, shape in ATTENTION.items():
        print(json.dumps(row("attention", case, *of_attention(shape), tries)), flush=True)
    for case, model in SAMPLING.items():
        print(json.dumps(row("dtype of a token", case, *of_sampling(*model), tries)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
