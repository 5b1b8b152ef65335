"""Our GPT beside others, in turns: transformers' GPT-2 and Llama, and nanoGPT.

There are five parts: a training step, generation, a training step of a Llama with the FLOPs of that GPT-2, an iteration
of nanoGPT's recipe for cheap computers, and that whole command. The last two need a clone of nanoGPT, --nanogpt.
"""

import dataclasses
import pathlib

import torch

from fusedgpt.bench import commands, options, others, training
from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.report import Shown, of_training
from fusedgpt.bench.rows import Result
from fusedgpt.errors import UserError
from fusedgpt.machine.device import asks_to_compile, cpu_multiplies_bfloat16
from fusedgpt.machine.turns import Turn

BASELINE = "ours"
# what each contender sets; "auto" is what `ours` has. nanoGPT fuses AdamW on CUDA only, and has no padding of its own
HUGGING = {"vocab_multiple": 1}
NANOGPTS = {"vocab_multiple": 64, "activation": "gelu"}
TRAINING = {
    "ours": {},
    "ours, eager": {"compile": False},
    "ours, compiled": {"compile": True},
    "Hugging Face, eager": HUGGING | {"compile": False},
    "Hugging Face, compiled": HUGGING | {"compile": True},
    "nanoGPT, eager": NANOGPTS | {"compile": False},
    "nanoGPT, compiled": NANOGPTS | {"compile": True},
}
LLAMA = {**{n: TRAINING[n] for n in ("ours", "Hugging Face, eager", "Hugging Face, compiled")}, "ours, GPT-2": {}}
GENERATION = {  # `ours` has the defaults of sample.py
    "ours": {"dtype": "auto", "compile": False},
    "ours, compiled": {"dtype": "auto", "compile": True},
    "ours, float32": {"dtype": "float32", "compile": False},
    **{
        f"Hugging Face, {dtype}{', compiled' * compiled}": HUGGING | {"dtype": dtype, "compile": compiled}
        for dtype in ("bfloat16", "float16", "float32")
        for compiled in (False, True)
    },
    "nanoGPT, float32": NANOGPTS | {"dtype": "float32", "compile": False, "vocab_multiple": 1},
}
PROGRAMS = {"ours": {}, "nanoGPT": {"dtype": "float32"}}
PARTS = {"training": TRAINING, "generation": GENERATION, "llama": LLAMA, "recipe": PROGRAMS, "command": PROGRAMS}

TRAINS, TOGETHER, TURN = True, False, 0.5
# every contender trains as its project does, with AdamW, without dropout; a step is one micro-batch
UNUSED = (*training.UNUSED, "activation", "optimizer", "mask", "dropout", "loss", "recompute", "deterministic")
UNUSED += ("gradient_accumulation_steps",)


@dataclasses.dataclass
class Settings(options.Common):
    nanogpt: str = ""  # folder of a clone of nanoGPT, to measure its model.py and train.py too; empty: leave it out
    prompt_tokens: int = 32  # tokens of the prompt, in generation
    new_tokens: int = 32  # tokens generated after the prompt


GPU = training.DEFAULTS  # GPT-2 124M at 12 x 1024
CPU = GPU | {"batch_size": 1}


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """A comparison for each part.

    Raises UserError if --nanogpt names no clone, or if generation needs more than block_size tokens.
    """
    for name in ("model.py", "train.py"):
        if s.nanogpt and not pathlib.Path(s.nanogpt, name).is_file():
            raise UserError(f"nanogpt={s.nanogpt!r} has no {name}: name the folder of a clone of nanoGPT")
    if min(s.prompt_tokens, s.new_tokens) < 2 or s.prompt_tokens + s.new_tokens > s.block_size:
        what = f"prompt_tokens={s.prompt_tokens} and new_tokens={s.new_tokens}"
        raise UserError(f"{what} must be 2 or more, and together at most block_size={s.block_size}")
    # `ours` is the same. A trial of the compiler here could hang this process at its end (pytorch/pytorch#162199)
    left_out = ["ours, compiled" if asks_to_compile(s.compile, device) else "ours, eager"]
    parts = {part: [peer for peer in peers if peer not in left_out] for part, peers in PARTS.items()}
    parts["generation"] = list(GENERATION)
    if device.type == "cpu" and not cpu_multiplies_bfloat16():  # such a CPU takes five times as long in 16 bits
        parts["generation"] = [peer for peer in GENERATION if not (peer.startswith("Hugging") and "16" in peer)]
    if device.type != "cpu":  # recipes for cheap computers
        del parts["recipe"], parts["command"]
    if not s.nanogpt:
        parts = {part: [peer for peer in peers if "nanoGPT" not in peer] for part, peers in parts.items()}
    return [Comparison({"part": part}, tuple(peers), BASELINE) for part, peers in parts.items() if len(peers) > 1]


def build(workload: dict, name: str, s: Settings, device: torch.device) -> tuple[Turn, dict]:
    """A contender of a part. Raises ParityError if it does not compute what ours does, UserError if it cannot run."""
    part = workload["part"]
    changes = dict(PARTS[part][name])
    if part == "command":
        return commands.build(name, s)
    if part == "recipe":
        recipe = {field: value for field, value in commands.RECIPE.items() if hasattr(s, field)}
        s = dataclasses.replace(s, **recipe | {"vocab_size": None, "vocab_multiple": 1, "activation": "gelu"})
    if part == "llama" and name != "ours, GPT-2":  # three matrices of 8/3 n_embd have the FLOPs of GPT-2's two of 4
        changes |= dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_inner=8 * s.n_embd // 3)
    s = dataclasses.replace(s, dropout=0.0, **changes)
    if part == "generation":
        return others.generation(name, s, device)
    if name.startswith("ours"):
        found = training.attention_errors(s)
        turn, more = training.build(s)
        if s.compile is True and not more["ran"]["compile"]:
            raise UserError("the model cannot be compiled here")
        return turn, found | more
    return others.training_step(name, s, device)


def columns(result: Result, name: str) -> dict[str, str]:
    """What a contender computed, and how."""
    line, part = result.measured[name], result.workload["part"]
    if part == "command":
        return {"validation loss": f"{line['val_loss']:.4f}"}
    if part != "generation":
        return of_training(result, name)
    return {
        "first ids equal to ours in float32": f"{line['equal_ids']} of {line['tokens']}",
        "as it ran": ", ".join(f"{field} {value}" for field, value in line["ran"].items()),
    }


OWN = {  # these have sizes of their own
    "recipe": "a step of nanoGPT's recipe: 4 layers of 128, 12 x 64 tokens",
    "command": "from the start of Python to its end, each with its project's recipe",
}
SHOWN = Shown("the same sizes and batches for all", "ms", ("Hugging Face", "nanoGPT"), columns, own=OWN)
