"""What a part of a model costs: CPU time of a training step of each variant of a study.

    python tests/step_cost.py config/quickstart.py config/study/families.py [--name=value ...]

The arguments are study.py's. The variants take turns in one process on one thread; each steps on random ids, of which
there are 256 unless vocab_size is set. Prints a line of JSON for each: the median of its steps in milliseconds, and how
many times as long as the first variant it takes, as in turns.py.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from fusedgpt.attention import choose
from fusedgpt.attention.case import Case
from fusedgpt.errors import one_sentence
from fusedgpt.machine import determinism, memory
from fusedgpt.machine.device import autocast, dtype_name, resolve_dtype
from fusedgpt.parallel.distributed import gradient_norm
from fusedgpt.settings import Settings
from fusedgpt.studies import command
from fusedgpt.training.optimizer import build_optimizer, update_weights
from model import GPT, GPTConfig
from tests import turns

WARM_UP, TURNS = 3, 20
CPU = torch.device("cpu")


def stepper(s: Settings) -> tuple[Callable[[], None], dict]:
    """A function that makes one step of a new model with the settings `s`, and what it computes with."""
    determinism.seed(s.seed, "init")
    same = dict(loss=s.loss, recompute=s.recompute, document_start=0 if s.packed else None)
    model = GPT(GPTConfig.of(s, vocab_size=s.vocab_size or 256, **same))
    dtype = resolve_dtype(s.dtype, CPU)
    cases = Case.of_layers(model.config, s.batch_size, CPU, dtype, dropout=s.dropout)
    attention, _ = choose.choose(s.attention, *cases)
    model.use_attention(attention)
    if s.compile is True:
        model.compile()
    optimizer, cast = build_optimizer(model, s, "cpu"), autocast(CPU, dtype)
    ids = torch.randint(model.config.vocab_size, (s.batch_size, s.block_size + 1))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        for _ in range(s.gradient_accumulation_steps):
            with cast:
                _, loss = model(x, y, logits=False)
            (loss / s.gradient_accumulation_steps).backward()
        update_weights(optimizer, gradient_norm(model), s.grad_clip)
        optimizer.zero_grad(set_to_none=True)

    return step, {"attention": attention, "dtype": dtype_name(dtype), "compile": s.compile is True}


def main(args: list[str]) -> None:
    """Print what a step of each variant costs."""
    request = command.read(args, __doc__)
    torch.set_num_threads(1)
    memory.keep_freed_memory(keep=True)
    made = {name: stepper(dataclasses.replace(request.shared, **each)) for name, each in request.variants.items()}
    for name, cost in turns.compare({name: step for name, (step, _) in made.items()}, WARM_UP, TURNS).items():
        row = {"variant": name, "median_ms": 1e3 * cost["seconds"], "times_first": cost["times_first"], "steps": TURNS}
        print(json.dumps(row | {"instructions": torch.backends.cpu.get_cpu_capability()} | made[name][1]))


if __name__ == "__main__":
    with one_sentence():
        main(sys.argv[1:])
