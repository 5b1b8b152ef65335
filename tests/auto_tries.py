"""What `auto` picks beside a busy neighbour, and how much time it loses by that.

    python tests/auto_tries.py [TRIES]        default: 20

Every try is a process of its own, as a user's run is. First PROCESSES processes time every kernel, and every dtype of
generation, with care: leave the machine idle. One process could not say what a pick loses, because where its memory
lies can make a candidate a tenth slower. Then `auto` chooses so many times beside a process that spins. Prints a line
of JSON for each case: the milliseconds of each candidate in each process of the idle machine and their median, how
often each was picked, and the most that a pick loses against the best median, as a share of its time.
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

from fusedgpt.attention import choose, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.generation import engines
from fusedgpt.machine import memory, timing
from fusedgpt.machine.device import dtype_name
from model import GPT, GPTConfig

CPU, PROCESSES, ROUNDS = torch.device("cpu"), 5, 10
ATTENTION = {  # (B, nh, T, hs) of a training step of
    "config/quickstart.py": [(16, 4, 128, 32)],
    "config/train_shakespeare_cpu.py": [(24, 4, 64, 32)],
    "config/train_text_cpu.py": [(16, 4, 128, 64)],
    "GPT-2 124M, 1 x 1024": [(1, 12, 1024, 64)],
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


def attention_case(shape):
    """The kernels of a training step as {name: function}, and a function that lets auto pick one."""
    case = Case(shape, CPU, torch.float32)
    inputs, names = case.inputs(), [name for name in SINGLE_KERNELS if not permitted.refusal(name, case)]
    steps = {name: lambda name=name: case.run(permitted.as_run(name, case), *inputs) for name in names}
    return steps, lambda: choose.fastest(case)[0]


def sampling_case(dimensions, samples, ids):
    """A token after the prompt in each dtype as {name: function}, and a function that lets auto pick one."""
    model = GPT(GPTConfig(**dimensions)).eval()
    idx = torch.zeros(samples, 1, dtype=torch.long)
    models = {dtype_name(dtype): engines.ready(model, CPU, dtype, compiled=False) for dtype in engines.PRECISE_FIRST}

    @torch.no_grad()
    def token(name):
        models[name](idx, cache=engines.new_cache(model.config, 1))

    steps = {name: lambda name=name: token(name) for name in models}
    return steps, lambda: dtype_name(engines.fastest_dtypes(model, samples, ids)[0][1])


def times(steps):
    """The median milliseconds of each of {name: step}, in turns: the clock may be quicker while one has its turn."""
    ms = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            ms[name] += timing.own_samples(step, CPU, count=2, warmup=1)
    return {name: statistics.median(each) for name, each in ms.items()}


def in_a_process(job, what, case):
    """What this script prints if a process of its own has the `job` "time" or "pick" for a case."""
    command = [sys.executable, __file__, job, what, case]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def row(what, case, tries):
    """A line: what was picked in so many tries beside a neighbour."""
    timed = [in_a_process("time", what, case) for _ in range(PROCESSES)]
    with neighbour():
        picks = collections.Counter(in_a_process("pick", what, case) for _ in range(tries))
    of_processes = {name: [round(each[name], 3) for each in timed] for name in timed[0]}
    ms = {name: statistics.median(each) for name, each in of_processes.items()}
    loses = max(ms[name] / min(ms.values()) - 1 for name in picks)
    found = {"ms": ms, "ms_of_processes": of_processes, "picks": picks, "tries": tries, "loses": round(loses, 4)}
    return {"what": what, "case": case} | found


CASES = {"attention": (attention_case, ATTENTION), "dtype of a token": (sampling_case, SAMPLING)}


def work(job, what, case):
    """The milliseconds of each candidate of a case, or what auto picks."""
    memory.keep_freed_memory(keep=True)  # as train.py and sample.py do
    make, cases = CASES[what]
    steps, pick = make(*cases[case])
    return times(steps) if job == "time" else pick()


def main(args):
    """Print the rows, or as in_a_process() asks."""
    if len(args) == 3:
        print(json.dumps(work(*args)))
        return
    for what, (_, cases) in CASES.items():
        for case in cases:
            print(json.dumps(row(what, case, *map(int, args or ["20"]))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
