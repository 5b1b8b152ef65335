"""The ladder of PyTorch's article: the same training step, rung by rung, each rung changing one thing.

"Accelerating Large Language Models with Accelerated Transformers" climbs from hand-written attention to flash on a
padded vocabulary; this project adds the rungs after that. Each rung is train.py's own step in a process of its own, and
the rungs take turns.
"""

import dataclasses

import torch

from fusedgpt.bench import options, training
from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.report import Shown, of_training
from fusedgpt.bench.rows import Result
from fusedgpt.errors import UserError
from fusedgpt.machine.turns import Turn

BASELINE, PADDED = "manual", "flash + padded vocabulary"
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
UNUSED = (*training.UNUSED, "attention", "vocab_multiple")

Settings = options.Common
GPU = training.DEFAULTS | {"compile": True}  # GPT-2 124M at 12 x 1024
CPU = GPU | training.ON_A_CPU


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """The rungs from the bottom up, all beside manual; a kernel of the user's own is last."""
    return [Comparison({}, (*RUNGS, *options.own_kernel(s.attention)), BASELINE)]


def variables(name: str) -> dict[str, str]:
    """The environment variables of a rung."""
    return USUAL | VARIABLES.get(name, {})


def build(workload: dict, name: str, s: Settings, device: torch.device) -> tuple[Turn, dict]:
    """A rung: the parity of its kernel with float64, then steps of train.py."""
    s = dataclasses.replace(s, **RUNGS.get(name, {"attention": name, "vocab_multiple": 1}))
    if name == TF32 and not (device.type == "cuda" and torch.cuda.is_tf32_supported()):
        raise UserError("only GPUs multiply in TF32: NVIDIA's from compute capability 8.0 on, AMD's from gfx94 on")
    if name in (UNPADDED, GRAPHED) and not (device.type == "cuda" and s.compile):
        raise UserError("PyTorch pads, and replays CUDA graphs, only in a compiled model on a GPU")
    errors = training.attention_errors(s, tf32_allowed=name == TF32)
    turn, found = training.build(s)
    for setting, rung in (("tf32", TF32), ("cuda_graphs", GRAPHED)):
        if found["ran"][setting] != (name == rung):
            raise UserError(f"this run had {setting}={found['ran'][setting]}, against the rung's setting")
    return turn, errors | found


def columns(result: Result, name: str) -> dict[str, str]:
    """What the article measured, and what a rung reached."""
    article = {"the article, 8 x A100": f"{ARTICLE[name]} ms"} if name in ARTICLE else {}
    return article | of_training(result, name)


def notes(results: list[Result]) -> list[str]:
    """Whether the losses agree, as they must."""
    losses = [line["loss"] for result in results for line in result.measured.values()]
    if len(losses) < 2:
        return []
    apart = max(losses) - min(losses)
    same = apart < 0.01 * min(losses)
    return [f"Losses lie within {apart:.4f} of each other: {'they agree' if same else '**they DISAGREE**'}."]


SHOWN = Shown("a training step", "ms per training step", ("flash",), columns, notes)
