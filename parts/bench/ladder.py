"""The ladder of PyTorch's article: the same training, one rung after another, each changing one thing.

"Accelerating LLMs with Accelerated PyTorch 2.0 Transformers" climbs from hand-written attention to flash on a padded
vocabulary; the rungs after that are this project's. Each is train.py in a process of its own.
"""

import dataclasses

from parts import kernels, machine
from parts.attention import ATTENTION
from parts.bench import child
from parts.bench.rows import proof, slug
from parts.errors import UserError

BASELINE, PADDED = "manual", "flash + padded vocabulary"
# ms a batch on an A100, as the article gives them
ARTICLE = {"manual": 143, "math": 134, "efficient": 119, "flash": 113, PADDED: 87}

# what each rung sets; dtype and compile are the settings', where it does not say
RUNGS = {
    "manual, float32, eager": {"attention": "manual", "vocab_multiple": 1, "dtype": "float32", "compile": False},
    "manual, eager": {"attention": "manual", "vocab_multiple": 1, "compile": False},
    **{name: {"attention": name, "vocab_multiple": 1} for name in ("manual", "math", "efficient", "flash")},
    PADDED: {"attention": "flash", "vocab_multiple": 64},
    **{f"{n} + padded vocabulary": {"attention": n, "vocab_multiple": 64} for n in ("cudnn", "flex", "auto")},
    f"{PADDED}, eager": {"attention": "flash", "vocab_multiple": 64, "compile": False},
    "manual, again": {"attention": "manual", "vocab_multiple": 1},  # for the drift of the machine itself
}


def plan(s, device):
    """The rungs, from the ground up."""
    return [{"rung": name} for name in RUNGS]


def measure(spec, s, device, folder):
    """A rung's row: parity of its kernel with float64 first, then the steps of train.py."""
    s = dataclasses.replace(s, **RUNGS[spec["rung"]])
    proven, dtype = {}, machine.dtype(s.dtype, device)
    shape = (s.batch_size, s.n_head, s.block_size, s.n_embd // s.n_head)
    if s.attention in ATTENTION:  # auto does the same itself
        if reason := kernels.refusal(s.attention, shape, device, dtype, s.dropout):
            raise UserError(reason)
        proven = proof(kernels.as_run(s.attention, device, dtype, True), shape, device, dtype)
    record, rows = child.train(s.of_train(), folder / "runs" / slug(spec["rung"]))
    if record["attention_trials"]:
        proven = {"errors": record["attention_trials"][record["attention"]]["errors"], "parity": "passed, by auto"}
    return proven | child.timing(record, rows)


def faster(baseline_ms, ms):
    """By how many per cent, as the article counts: `baseline / rung - 1`."""
    return 100 * (baseline_ms / ms - 1)
