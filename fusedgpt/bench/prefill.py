"""Time to the first token at batch 1: eager attention against the flash kernel, and transformers against our own GPT.

All are on the same weights. The timed call is `generate` of one token, as in AMD's article "Accelerating Large Language
Models with Flash Attention on AMD GPUs". The models are in foreign.py.

B = 1, T prompt tokens, V vocabulary.
"""

import dataclasses
from typing import Literal

import torch

from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.bench import foreign, options
from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.foreign import OURS
from fusedgpt.bench.proof import ParityError, refusals, verdict
from fusedgpt.bench.report import Shown
from fusedgpt.errors import UserError
from fusedgpt.machine import timing
from fusedgpt.machine.device import dtype_name, resolve_dtype
from fusedgpt.machine.turns import Turn

TRAINS, TOGETHER, TURN = False, True, 0.1
UNUSED = ()
BASELINE = "eager"
# largest difference from the last logits of eager attention, as a share of the largest logit
ALLOWED = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclasses.dataclass
class Settings(options.Common):
    seconds: float = 30.0  # take turns for at most so many seconds with each model and length
    lengths: str = "512,1024,2048"  # numbers of prompt tokens, as first-last-step or one by one
    # mistral-7b, llama-3-8b, phi-2, gpt2, gpt2-medium, gpt2-large, gpt2-xl; mistral-small, llama-small, phi-small
    models: str = "mistral-7b,llama-3-8b,phi-2,gpt2-xl"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of the weights and of all products
    seed: int = 1337  # seed of the random weights and of the prompt


GPU, CPU = {}, {"models": "mistral-small,llama-small,phi-small,gpt2"}


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """Each model at each length. Raises UserError if --models or --lengths cannot be read."""
    models, names = [name.strip() for name in s.models.split(",")], (BASELINE, "flash", f"{OURS}flash")
    if unknown := set(models) - set(foreign.MODELS):
        raise UserError(f"models={s.models!r} has {min(unknown)!r}: it can have {', '.join(foreign.MODELS)}")
    lengths = options.lengths(s.lengths)
    return [Comparison({"model": name, "T": T}, names, BASELINE) for name in models for T in lengths]


def build(workload: dict, name: str, s: Settings, device: torch.device) -> tuple[Turn, dict]:
    """A way to compute attention in a model at a length. Times are how long a user waits, Python included.

    Raises UserError if the attention cannot run here or another kernel ran, ParityError if it differs from float64 or
    the logits differ from those of eager attention, and out-of-memory errors.
    """
    dtype, attention, shape = resolve_dtype(s.dtype, device), name.removeprefix(OURS), foreign.config(workload["model"])
    if workload["T"] > (longest := getattr(shape, "sliding_window", None) or shape.max_position_embeddings):
        raise UserError(f"{workload['T']} tokens are more than the {longest} that {workload['model']} attends to")
    subject = foreign.load(workload["model"], name, s.seed, device, dtype)
    random = torch.Generator().manual_seed(s.seed)
    idx = torch.randint(subject.model.config.vocab_size, (1, workload["T"]), generator=random).to(device)
    subject.use(attention)
    seen, case = [], subject.case(idx)
    with refusals():
        errors = subject.compare(idx)
        receipt = observe(lambda: seen.append(_last_logits(subject, idx)))
    if reason := contradiction("manual" if attention == BASELINE else attention, receipt, case):
        raise UserError(reason)
    passed = verdict(errors, dtype, f"of {name} attention as the model calls it, 2 heads")
    eager = foreign.load(workload["model"], BASELINE, s.seed, device, dtype)  # transformers' for ours too
    difference = _difference(seen[0], eager, idx)
    if not difference <= ALLOWED[dtype]:  # `not <=` catches NaN too
        raise ParityError(f"its logits differ from eager's by {difference:.1e}, allowed {ALLOWED[dtype]:.0e}")
    steps = timing.Steps(lambda: subject.generate(idx, 1), device, warmup=0)

    def turn(seconds):
        subject.use(attention)  # others of this model had the turn before
        return steps(seconds)

    turn(0.0)
    found = {"dtype": dtype_name(dtype), "errors": errors, "parity": passed, "logits_differ": difference}
    return turn, found | {"kernel": receipt}


def _last_logits(subject, idx):
    """Run the timed call once; returns the last logits, (V,)."""
    seen = []
    with subject.output.register_forward_hook(lambda module, args, y: seen.append(y[0, -1].float())):
        subject.generate(idx, 1)
    return seen[0]


def _difference(got, subject, idx):
    """Largest difference from eager's last logits, as a share of the largest."""
    subject.use(BASELINE)
    want = _last_logits(subject, idx)
    return ((got - want).abs().max() / want.abs().max()).item()


SHOWN = Shown("one prompt, random weights", "ms to the first token", ("flash", f"{OURS}flash"))
