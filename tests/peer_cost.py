"""What a training step or a text costs on a machine that is not quiet: CPU time of the contenders of bench.py peers.

    python tests/peer_cost.py --only='training&ours,training&Hugging Face*' [--rounds=3] [--nanogpt=FOLDER] ...

The arguments are those of `bench.py peers`. Contenders of a part take turns in one process on one thread, one turn a
round and one before that does not count. Each has proved before that it computes our loss. Prints a line of JSON for
each: see turns.py.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

sys.dont_write_bytecode = True  # into nanoGPT's folder

import torch

from fusedgpt.bench import contenders, kinds, visit
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.machine import memory
from fusedgpt.machine.device import autocast, dtype_name, resolve_compile, resolve_dtype
from tests import turns


def turn(part: str, peer: str, asked: dict, device: torch.device) -> tuple[Callable[[], None], dict]:
    """What the contender `peer` does in its turn, and with what.

    That is its attention, dtype and compile, the dtype that it decodes in if it generates, and the error of its loss
    or logits against float64.
    """
    s = contenders.settings(part, peer, asked)
    contender, idx, ours = visit.proven(part, peer, s, device)
    trains = part in contenders.STEPS
    ran = {"attention": contender.prepare(s, device, backward=trains), "compile": s.compile is True}
    if not trains:
        contender.model.eval()
        dtypes = {"dtype": dtype_name(contender.dtypes[0]), "decodes_in": dtype_name(contender.dtypes[1])}
        return lambda: contender.generate(idx, s.new_tokens), ran | dtypes | {"error": ours["error"]}
    dtype, (ran["compile"], _) = resolve_dtype(s.dtype, device), resolve_compile(s.compile, device)
    if ran["compile"]:
        contender.model.compile()
    (x, y), optimizer, cast = visit.next_ids(idx), contender.optimizer(s, device), autocast(device, dtype)

    def step():
        with cast:
            loss = contender.loss(x, y)
        loss.backward()
        contender.update(optimizer, s)
        optimizer.zero_grad(set_to_none=True)

    return step, ran | {"dtype": dtype_name(dtype), "error": ours["error"]}


def main(args: list[str]) -> None:
    """Print what a turn of each contender costs."""
    s, device = kinds.read_settings("peers", args, __doc__)
    kinds.validate(kinds.KINDS["peers"], s)
    planned = kinds.planned("peers", s, device)
    specs = [spec for spec in planned if spec["round"] == 1 and spec["part"] in contenders.PARTS]
    if device.type != "cpu" or not specs:
        raise UserError(f"device={device} and only={s.only!r}: this counts CPU time, of training, generation or llama")
    torch.set_num_threads(1)
    memory.keep_freed_memory(keep=True)
    for part in dict.fromkeys(spec["part"] for spec in specs):
        peers = [spec["peer"] for spec in specs if spec["part"] == part]
        made = {peer: turn(part, peer, dataclasses.asdict(s), device) for peer in peers}
        took = turns.compare({peer: work for peer, (work, _) in made.items()}, warm_up=1, turns=s.rounds)
        for peer, cost in took.items():
            ran = {"rounds": s.rounds, "instructions": torch.backends.cpu.get_cpu_capability()} | made[peer][1]
            print(json.dumps({"part": part, "peer": peer} | cost | ran), flush=True)


if __name__ == "__main__":
    with one_sentence():
        main(sys.argv[1:])
