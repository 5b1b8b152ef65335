"""Our training step as a contender: train.py's own `build` and `train_step`, so that benchmarks time what users run."""

import dataclasses
import gc

import torch

import train
from fusedgpt.attention.case import Case
from fusedgpt.bench.options import changed, family
from fusedgpt.bench.proof import prove_kernel
from fusedgpt.machine import memory, timing
from fusedgpt.machine.device import dtype_name, resolve_device, resolve_dtype, tf32
from fusedgpt.machine.turns import Turn
from fusedgpt.runs.logger import Logger
from fusedgpt.settings import Settings

WARM_UP = 5  # steps before the first turn; all contenders make them on the same batches, so their losses must agree

# defaults of train.py's settings in benchmarks, if they differ from train.py's own
DEFAULTS = dict(dataset="python_stdlib", vocab_size=50257, gradient_accumulation_steps=1)
DEFAULTS |= dict(warmup_iters=100, lr_decay_iters=1000)
ON_A_CPU = dict(n_layer=4, n_head=4, n_embd=256, block_size=1024, batch_size=1)
# fields of run.json that a row keeps
RAN = ("attention", "dtype", "tf32", "compile", "cuda_graphs", "padded_vocab_size", "device")
WORK = ("mask", "dropout", "optimizer", "loss", "recompute")  # beside the model, these decide what a step computes
# train.py's settings that no kind uses
UNUSED = {
    **dict.fromkeys(("max_iters", "minutes"), "contenders make steps as long as they take turns"),
    "out_dir": "a benchmark writes no run",
    "init_from": "every contender starts from scratch",
    **dict.fromkeys(("eval_only", "dry_run"), "every contender trains"),
    **dict.fromkeys(("eval_iters", "eval_interval"), "contenders make steps and no evaluation"),
    **dict.fromkeys(("sample_interval", "sample_prompts"), "a benchmark draws no samples"),
    **dict.fromkeys(("always_save_checkpoint", "keep_checkpoints"), "a benchmark writes no checkpoints"),
    "choose": "a benchmark times anew what auto leaves open",
    **dict.fromkeys(("backend", "parallel", "shard_size", "timeout"), "a contender has one process"),
    **dict.fromkeys(("log_interval", "check_interval", "max_bad_steps"), "contenders only make steps"),
    "profile": "train.py --profile prints the profile of a step",
    **dict.fromkeys(("wandb_log", "wandb_project", "wandb_run_name", "tensorboard_log"), "a benchmark has no tracker"),
}


def settings(s) -> Settings:
    """train.py's settings in those of a kind. A dtype "auto" becomes the hardware's fastest, not that of a trial."""
    shared = {field.name: getattr(s, field.name) for field in dataclasses.fields(Settings) if hasattr(s, field.name)}
    dtype = dtype_name(resolve_dtype(s.dtype, resolve_device(s.device)))
    return Settings(**shared | {"dtype": dtype, "dry_run": True, "choose": "again", "max_seconds": None})


def cases(s) -> list[Case]:
    """The attention of each layer that the settings `s` describe."""
    device = resolve_device(s.device)
    return Case.of_layers(s, s.batch_size, device, resolve_dtype(s.dtype, device), dropout=s.dropout)


def proven(s, tf32_allowed: bool = False) -> dict:
    """`prove_kernel` for the kernel of the settings `s`; {} for auto, whose choice has passed parity by itself."""
    with tf32(allowed=tf32_allowed):
        exact_as = torch.float16 if tf32_allowed else None  # TF32 has as many bits
        return prove_kernel(s.attention, *cases(s), exact_as=exact_as) if s.attention != "auto" else {}


def build(s) -> tuple[Turn, dict]:
    """The turn of a training step with the settings `s` of a kind, and what is known of it after WARM_UP steps.

    Raises UserError if it cannot train here.
    """
    s, ranks, device = train.join(settings(s))
    run = train.build(s, ranks, device, Logger(ranks.main))
    losses = []

    def step():
        losses[:] = [train.train_step(run.state, run.s, run.micro_steps)["loss"]]
        run.state.iteration += 1

    memory.reset_peak_memory(device)  # compilation and the rehearsal are over
    gc.collect()
    gc.freeze()
    for _ in range(WARM_UP):
        step()
    record, loss = run.record, losses[0].item()
    found = {"errors": record["attention_trials"][record["attention"]]["errors"]} if record["attention_trials"] else {}
    return timing.Steps(step, device, warmup=0), found | {
        "loss": loss,
        "steps": WARM_UP,
        "tokens": record["tokens_per_step"],
        "peak_memory": memory.peak_memory(device),
        "kernel": record["receipt"],
        "ran": {name: record[name] for name in RAN},
        **{name: record["mfu"][name] for name in ("flops_per_token", "peak_flops", "peak_source")},
    }


def data(s) -> tuple:
    """(the folder of the data set of the settings `s` of a kind, its meta). Raises UserError if bins are missing."""
    return train.find_data(settings(s))


def subject(s: dict) -> str:
    """The model, what changes the work of a step, and its tokens, for the title of a figure.

    s: the settings of a header.
    """
    sizes = f"{s['n_layer']} layers, {s['n_head']} heads, {s['n_embd']} channels"
    model = ", ".join([sizes, *family(s).values(), *changed(s, WORK)])
    count = s.get("gradient_accumulation_steps", 1)  # peers has none
    micro_batches = f"{count} × " if count > 1 else ""
    return f"a GPT of {model}, {micro_batches}{s['batch_size']} × {s['block_size']} tokens a step"
