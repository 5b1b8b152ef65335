"""The ladder of PyTorch's article: the same training step, rung by rung, each rung changing one thing.

"Accelerating Large Language Models with Accelerated Transformers" climbs from hand-written attention to flash on a
padded vocabulary; this project adds the rungs after that. Each rung is train.py's own step in a process of its own, and
the rungs take turns.
"""

import dataclasses
import math

import torch

from fusedgpt.bench import options, training
from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.report import Shown, gib, how_it_ran, shares
from fusedgpt.bench.rows import Result
from fusedgpt.errors import UserError
from fusedgpt.machine.turns import Turn

BASELINE, PADDED = "manual", "flash + padded vocabulary"
EFFICIENT_PADDED = "efficient + padded vocabulary"  # if flash is refused (NVIDIA below compute capability 8.0)
FLOAT32, TF32 = "manual, float32, eager", "manual, TF32, eager"
UNPADDED, GRAPHED = "flash, no padding", f"{PADDED}, CUDA graphs"
# ms per batch on 8 A100, as the article gives them
ARTICLE = {"manual": 143, "math": 134, "efficient": 119, "flash": 113, PADDED: 87}

NEWER = ("cudnn", "flash3", "flash4", "flex", "auto")  # kernels that are not in the article

# what each rung sets; otherwise dtype and compile come from the settings
RUNGS = {
    FLOAT32: {"attention": "manual", "vocab_multiple": 1, "dtype": "float32", "compile": False},
    TF32: {"attention": "manual", "vocab_multiple": 1, "dtype": "float32", "compile": False},
    "manual, eager": {"attention": "manual", "vocab_multiple": 1, "compile": False},
    **{name: {"attention": name, "vocab_multiple": 1} for name in ("manual", "math", "efficient", "flash", "masked")},
    UNPADDED: {"attention": "flash", "vocab_multiple": 1},
    PADDED: {"attention": "flash", "vocab_multiple": 64},
    **{f"{name} + padded vocabulary": {"attention": name, "vocab_multiple": 64} for name in ("efficient", *NEWER)},
    GRAPHED: {"attention": "flash", "vocab_multiple": 64},
    f"{PADDED}, eager": {"attention": "flash", "vocab_multiple": 64, "compile": False},
}
# PyTorch's environment variables for every rung: no TF32, no CUDA graphs, and a compiler that may pad. VARIABLES has
# the changes of some rungs. In a product with 50257 ids the compiler may pad the ids (SHAPE), and the memory between
# rows of logits (COMPREHENSIVE)
USUAL = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "TORCHINDUCTOR_CUDAGRAPHS": "0"}
USUAL |= {"TORCHINDUCTOR_SHAPE_PADDING": "1", "TORCHINDUCTOR_COMPREHENSIVE_PADDING": "1"}
VARIABLES = {
    TF32: {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "HIPBLASLT_ALLOW_TF32": "1"},  # the second is ROCm's
    UNPADDED: {"TORCHINDUCTOR_SHAPE_PADDING": "0", "TORCHINDUCTOR_COMPREHENSIVE_PADDING": "0"},
    GRAPHED: {"TORCHINDUCTOR_CUDAGRAPHS": "1"},
}
TRAINS, TOGETHER, TURN = True, False, 0.5
UNUSED = {
    **training.UNUSED,
    "attention": options.EACH_ROW_NAMES_IT,
    "vocab_multiple": "each rung of the ladder sets it",
}


class Settings(options.Common):
    pass


def defaults(gpu: bool) -> dict:
    """GPT-2 124M at 12 x 1024 on a GPU; four small layers on a CPU."""
    return training.DEFAULTS | {"compile": True} | ({} if gpu else training.ON_A_CPU)


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """The rungs from the bottom up, all beside manual; a kernel of the user's own is last."""
    names = (*RUNGS, *options.own_kernel(s.attention))
    return [Comparison(options.family(vars(s)), names, BASELINE)]


def variables(name: str) -> dict[str, str]:
    """The environment variables of a rung."""
    return USUAL | VARIABLES.get(name, {})


def build(of: dict, name: str, s: Settings, device: torch.device) -> tuple[Turn, dict]:
    """A rung: the parity of its kernel with float64, then steps of train.py."""
    s = dataclasses.replace(s, **RUNGS.get(name, {"attention": name, "vocab_multiple": 64}))
    if reason := _refusal(name, s, device):
        raise UserError(reason)
    proven = training.proven(s, tf32_allowed=name == TF32)
    turn, found = training.build(s)
    if found["ran"]["tf32"] != (name == TF32):
        raise UserError(f"TF32 was {'on' if found['ran']['tf32'] else 'off'} in this run, against the rung's setting")
    if found["ran"]["cuda_graphs"] != (name == GRAPHED):
        raise UserError(f"PyTorch {'replayed' if found['ran']['cuda_graphs'] else 'made no'} CUDA graphs in this run")
    return turn, proven | found


def _refusal(rung, s, device):
    """Why a rung with the settings `s` would show nothing here, or None if it would."""
    if rung == TF32 and not (device.type == "cuda" and torch.cuda.is_tf32_supported()):
        return "only GPUs multiply in TF32: NVIDIA's from compute capability 8.0 on, AMD's from gfx94 on"
    if rung == UNPADDED and not (device.type == "cuda" and s.compile):
        return "only a compiled model on a GPU is padded by PyTorch"
    if rung == GRAPHED and not (device.type == "cuda" and s.compile):
        return "only a compiled model on a GPU is replayed as CUDA graphs"
    return None


def columns(result: Result, name: str) -> dict[str, str]:
    """What the article measured, and what a rung computed."""
    line = result.measured[name]
    return {
        "the article, 8 x A100": f"{ARTICLE[name]} ms" if name in ARTICLE else "",
        **shares(result, name),
        "peak memory": gib(line["peak_memory"]),
        f"loss after {line['steps']} steps": f"{line['loss']:.4f}",
        "kernel seen forward / backward (as it ran)": how_it_ran(line),
    }


def headline(result: Result) -> list[str]:
    """The rungs in the title: flash, alone and with a padded vocabulary, or efficient where flash is refused."""
    tops = [("flash", PADDED), ("efficient", EFFICIENT_PADDED)]
    return next(([name for name in top if name in result.measured] for top in tops if top[0] in result.measured), [])


def notes(results: list[Result]) -> list[str]:
    """How the losses agree, and what else the rungs say."""
    found = []
    for result in results:
        losses = [line["loss"] for line in result.measured.values()]
        if len(losses) > 1:
            apart = max(losses) - min(losses)
            same = all(map(math.isfinite, losses)) and apart < 0.01 * min(losses)
            agree = "they agree" if same else "**they DISAGREE**"
            steps = next(iter(result.measured.values()))["steps"]
            found.append(f"Losses after {steps} steps lie within {apart:.4f} of each other: {agree}.")
        for top, base in ((PADDED, FLOAT32), (PADDED, TF32), (PADDED, UNPADDED)):
            if ratio := result.ratio(top, base):
                found.append(f"`{top}` is {ratio.times:.2f} times as fast as `{base}`.")
    return found


SHOWN = Shown("ms per training step", headline, notes, lambda s: f"Training {training.subject(s)}", columns)
