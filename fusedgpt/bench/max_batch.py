"""The largest micro-batch of each attention kernel, and the speed of training there: figure 3 of PyTorch's article.

A GPU really runs out of memory. On a CPU a process may hold `memory_gb` and no more (RLIMIT_DATA), so that an
allocation fails there too. Every trial is train.py's own step in a process of its own. Contenders take no turns: on a
GPU each fills the memory.
"""

import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable

import torch

from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.bench import options, training
from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.process import Contender
from fusedgpt.bench.report import Shown, gib, of_training
from fusedgpt.bench.rows import Ended, Result
from fusedgpt.errors import UserError
from fusedgpt.estimates.training_memory import Load, Memory
from fusedgpt.machine import memory
from fusedgpt.machine.device import dtype_name, resolve_compile, resolve_device, resolve_dtype
from fusedgpt.machine.timing import summary
from fusedgpt.machine.turns import Turn
from model import GPTConfig

ARTICLE = {"manual": 24, "flash": 39}  # the largest batch in the article's figure 3, on 8 A100 of 80 GB
TIMED_S = 5.0  # seconds of steps at the largest batch
BASELINE = "manual"

TRAINS, TOGETHER, TURN = True, True, 0.0
UNUSED = (*training.UNUSED, "attention", "batch_size", "precision", "seconds")


@dataclasses.dataclass
class Settings(options.Common):
    memory_gb: float = 1.0  # GiB that a run may hold on a CPU, beyond PyTorch itself


GPU = training.DEFAULTS | {"compile": True}  # GPT-2 124M in all of its memory
CPU = training.DEFAULTS | training.ON_A_CPU | dict(vocab_size=None, block_size=512)


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """All kernels. Raises UserError on a device whose memory limit is unknown."""
    if device.type != "cuda" and (device.type != "cpu" or sys.platform != "linux"):
        raise UserError(f"max_batch cannot limit the memory of {device.type} here: run it on a GPU, or on Linux's CPU")
    return [Comparison({}, SINGLE_KERNELS, BASELINE)]


def build(workload: dict, name: str, s: Settings, device: torch.device) -> tuple[None, dict]:
    """The largest batch of a kernel, found by trials from an estimate on, and the times of a step there."""
    s = dataclasses.replace(s, attention=name, device=str(device))
    found = training.attention_errors(dataclasses.replace(s, batch_size=1))
    torch.cuda.empty_cache()
    free = memory.free_memory(device) if device.type == "cuda" else int(s.memory_gb * 2**30)
    guess = estimated(s, device, free)
    print(f"{name}: by the formulas {guess} fit into {gib(free)}")
    fitting, ended = {}, {}

    def fits(batch_size):
        """Whether a micro-batch of `batch_size` sequences trains here."""
        try:
            fitting[batch_size] = _trial(dataclasses.replace(s, batch_size=batch_size), free)
        except Ended as error:
            ended[batch_size] = error
        print(f"  batch {batch_size}: {'fits' if batch_size in fitting else ended[batch_size].args[0]}")
        return batch_size in fitting

    size = largest(fits, guess)
    if not size:
        raise ended[1]
    why = ": ".join(ended[size + 1].args)
    return None, found | fitting[size] | {"largest": size, "one_more": why, "memory": free, "estimated": guess}


def _trial(s, free):
    """What training at the batch size of `s` takes. Raises Ended if it does not fit, or fails otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Contender(_limited, (json.dumps(vars(s)), free), {}, pathlib.Path(folder, "log.txt"))
        with contextlib.closing(trial):
            found = trial.ready()
            trial.turn(0.0)  # one step, which tells how many fit into a turn
            return found | summary(trial.turn(TIMED_S))


def _limited(given: str, free: int) -> tuple[Turn, dict]:
    """In a process of its own: training.build, on a CPU with at most `free` bytes of data more than the process has."""
    s = types.SimpleNamespace(**json.loads(given))
    if resolve_device(s.device).type == "cpu":
        import resource  # not on Windows

        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            held = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmData"))
        limit = held + free
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return training.build(s)


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest n with fits(n), or 0. From `guess`, steps double until they enclose it; then bisection finds it.

    If fits changes only once, the result fits, and a trial showed that one more does not.
    """
    n, step = max(1, guess), max(1, guess // 24)  # the estimate is a few per cent off
    if fits(n):
        low, high = n, n + step
        while fits(high):
            step *= 2
            low, high = high, high + step
    else:
        low, high = max(0, n - step), n
        while low and not fits(low):
            step *= 2
            low, high = max(0, low - step), low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def estimated(s: Settings, device: torch.device, free: float) -> int:
    """The most sequences that fit by the formulas of estimates/training_memory.py; 0 if none does."""
    config = GPTConfig.of(s, vocab_size=s.vocab_size or training.data(s)[1]["vocab_size"], loss=s.loss)
    of_this = dict(dtype=dtype_name(resolve_dtype(s.dtype, device)), compile=resolve_compile(s.compile, device)[0])
    run = Load.of(s, **of_this, cpu=device.type == "cpu")
    return largest(lambda n: Memory.of(config, dataclasses.replace(run, batch_size=n)).total <= free, 1)


def columns(result: Result, name: str) -> dict[str, str]:
    """The largest batch, what ended the next one, how far the estimate was off, and the speed there."""
    line = result.measured[name]
    return {
        "largest batch": str(line["largest"]),
        "the article, 8 x A100 80 GB": str(ARTICLE.get(name, "")),
        "by the formulas": str(line["estimated"]),
        "one more": line["one_more"].partition(":")[0],
        "ms per step there": f"{line['median_ms']:,.0f} ({line['p10_ms']:,.0f} to {line['p90_ms']:,.0f})",
        **of_training(result, name),
    }


SHOWN = Shown("the largest micro-batch", columns=columns)
