"""Time to the first token at batch 1: eager attention against the flash kernel, and transformers against our own GPT.

All are on the same weights. The timed call is `generate` of one token, as in AMD's article "Accelerating Large Language
Models with Flash Attention on AMD GPUs". The models are in foreign.py.

B = 1, T prompt tokens, V vocabulary.
"""

import dataclasses
import importlib.util
from typing import Literal

import torch

from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.bench import foreign, options
from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.foreign import OURS
from fusedgpt.bench.proof import ParityError, refusals, verdict
from fusedgpt.bench.report import Shown
from fusedgpt.errors import UserError, out_of_memory
from fusedgpt.machine import memory, timing
from fusedgpt.machine.device import dtype_name, resolve_dtype
from fusedgpt.machine.turns import Turn

TRAINS, TOGETHER, TURN = False, True, 0.1
UNUSED = {}
BASELINE = "eager"
# largest difference from the last logits of eager attention, as a share of the largest logit
ALLOWED = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclasses.dataclass
class Settings(options.Common):
    seconds: float = 30.0  # take turns for at most so many seconds with each model and length
    lengths: str = "512,1024,2048"  # numbers of prompt tokens, as first-last-step or one by one
    # mistral-7b, llama-3-8b, phi-2, gpt2, gpt2-medium, gpt2-large, gpt2-xl; mistral-small, llama-small, phi-small; or
    # local folders and names of the Hugging Face hub
    models: str = "mistral-7b,llama-3-8b,phi-2,gpt2-xl"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of the weights and of all products
    seed: int = 1337  # seed of the random weights and of the prompt


GPU, CPU = {}, {"models": "mistral-small,llama-small,phi-small,gpt2"}


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """Each model at each length. Raises UserError if --lengths cannot be read."""
    package = ("flash_attention_2",) * bool(importlib.util.find_spec("flash_attn"))
    found = []
    for name in map(str.strip, s.models.split(",")):
        more = package if name not in foreign.GPT2 else ()
        ours = (f"{OURS}flash",) if name in foreign.BOTH else ()
        for T in options.lengths(s.lengths):
            found.append(Comparison({"model": name, "T": T}, (BASELINE, "flash", *more, *ours), BASELINE))
    return found


def build(of: dict, name: str, s: Settings, device: torch.device) -> tuple[Turn, dict]:
    """A way to compute attention in a model at a length. Times are how long a user waits, Python included.

    Raises UserError if the attention cannot run here or another kernel ran, ParityError if it differs from float64 or
    the logits differ from those of eager attention, and out-of-memory errors.
    """
    dtype, attention = resolve_dtype(s.dtype, device), name.removeprefix(OURS)
    subject = foreign.load(of["model"], name, s.seed, device, dtype)
    if subject.max_length < of["T"]:
        raise UserError(f"{of['T']} tokens are more than the {subject.max_length} that {of['model']} attends to")
    random = torch.Generator().manual_seed(s.seed)
    idx = torch.randint(subject.model.config.vocab_size, (1, of["T"]), generator=random).to(device)
    subject.use(attention)
    seen, case = [], subject.case(idx)
    with refusals():
        errors = subject.compare(idx)
        receipt = observe(lambda: seen.append(_last_logits(subject, idx)))
    if reason := _contradiction(attention, receipt, case):
        raise UserError(reason)
    passed = verdict(errors, dtype, f"of {name} attention as the model calls it, 2 heads")
    last, positions = seen[0]
    eager = foreign.load(of["model"], BASELINE, s.seed, device, dtype)  # transformers' for ours too
    difference = _difference(last, eager, idx)
    if difference is not None and not difference <= ALLOWED[dtype]:
        raise ParityError(f"its logits differ from eager's by {difference:.1e}, allowed {ALLOWED[dtype]:.0e}")
    steps = timing.Steps(lambda: subject.generate(idx, 1), device, warmup=0)

    def turn(seconds):
        subject.use(attention)  # others of this model had the turn before
        return steps(seconds)

    memory.reset_peak_memory(device)
    turn(0.0)
    parameters = sum(p.numel() for p in subject.model.parameters())
    found = {"parameters": parameters, "dtype": dtype_name(dtype), "errors": errors, "parity": passed}
    if device.type == "cuda":  # a process on a CPU keeps what earlier contenders and the comparisons freed
        found["peak_memory"] = memory.peak_memory(device)
    return turn, found | {
        "kernel": receipt,
        "logits": "last position" if positions == 1 else "all positions",
        "logits_differ": difference,
    }


def _last_logits(subject, idx):
    """Run the timed call once; returns the last logits (V,) and the number of positions that had logits."""
    seen = []
    hook = subject.output.register_forward_hook(lambda module, args, y: seen.append((y[0, -1].float(), y.size(1))))
    try:
        subject.generate(idx, 1)
    finally:
        hook.remove()
    return seen[0]


def _difference(got, subject, idx):
    """Largest difference from eager's last logits, as a share of the largest; None if eager runs out of memory."""
    try:
        subject.use(BASELINE)
        want, _ = _last_logits(subject, idx)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None
    return ((got - want).abs().max() / want.abs().max()).item()


def _contradiction(attention, receipt, case):
    if attention == "flash_attention_2":  # this package's kernels are not PyTorch's operators
        its_own = receipt["forward"] == ["unfused"] and receipt["ops"]
        return None if its_own else f"{attention} was asked for, but the profiler saw {receipt['forward'][0]}"
    return contradiction(foreign.OUR_NAMES.get(attention, attention), receipt, case)


SHOWN = Shown("one prompt, random weights", "ms to the first token", ("flash", f"{OURS}flash"))
