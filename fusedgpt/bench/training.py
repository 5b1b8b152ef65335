"""Our training step as a contender: train.py's own `build` and `train_step`, so that benchmarks time what users run."""

import dataclasses
import gc
from collections.abc import Callable

import torch

import train
from fusedgpt.attention import permitted
from fusedgpt.attention.case import Case
from fusedgpt.bench.proof import ParityError, prove
from fusedgpt.errors import UserError
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
# train.py's settings that no kind uses: a contender is one process, which makes steps from scratch and nothing else
UNUSED = ("max_iters", "minutes", "out_dir", "eval_only", "eval_iters", "eval_interval", "sample_interval")
UNUSED += ("sample_prompts", "always_save_checkpoint", "keep_checkpoints", "log_interval", "check_interval", "profile")
UNUSED += ("max_bad_steps", "patience", "wandb_log", "wandb_project", "wandb_run_name", "init_from", "ema_decay")
UNUSED += ("backend", "parallel", "shard_size", "timeout", "eval_tasks")


def settings(s) -> Settings:
    """train.py's settings in those of a kind. A dtype "auto" becomes the hardware's fastest, not that of a trial."""
    shared = {field.name: getattr(s, field.name) for field in dataclasses.fields(Settings) if hasattr(s, field.name)}
    dtype = dtype_name(resolve_dtype(s.dtype, resolve_device(s.device)))
    return Settings(**shared | {"dtype": dtype, "max_seconds": None})


def attention_errors(s, tf32_allowed: bool = False) -> dict:
    """`prove` for the kernel of the settings `s`, as scripts run it, in the last kind of layer.

    {} for auto, whose choice has passed parity by itself. Raises UserError if the kernel cannot run one of them here.
    """
    if s.attention == "auto":
        return {}
    device = resolve_device(s.device)
    exact_as = torch.float16 if tf32_allowed else None  # TF32 has as many bits
    for case in Case.of_layers(s, s.batch_size, device, resolve_dtype(s.dtype, device), dropout=s.dropout):
        with tf32(allowed=tf32_allowed):
            if reason := permitted.refusal(s.attention, case):
                raise UserError(reason)
            errors = prove(permitted.as_run(s.attention, case), case, exact_as)
    return errors


def build(s) -> tuple[Turn, dict]:
    """The turn of a training step with the settings `s` of a kind, and what is known of it after WARM_UP steps.

    Raises UserError if it cannot train here.
    """
    s, ranks, device = train.join(settings(s))
    run = train.build(s, ranks, device, Logger(ranks.main), writes=False)
    record = run.record

    def step():
        loss = train.train_step(run.state, run.s, run.micro_steps)["loss"]
        run.state.iteration += 1
        return loss

    turn, found = warmed_up(step, device)
    if trials := record["attention_trials"]:
        found["errors"] = trials[record["attention"]]["errors"]
    return turn, found | {
        "tokens": record["tokens_per_step"],
        "kernel": record["receipt"],
        "ran": {name: record[name] for name in RAN},
        **{name: record["mfu"][name] for name in ("flops_per_token", "peak_flops", "peak_source")},
    }


def warmed_up(step: Callable[[], torch.Tensor], device: torch.device) -> tuple[Turn, dict]:
    """(turns of a training step, loss and peak memory after WARM_UP). Raises ParityError if the loss is not finite."""
    memory.reset_peak_memory(device)  # compilation and the rehearsal are over
    gc.collect()
    gc.freeze()
    for _ in range(WARM_UP):
        loss = step()
    if not loss.isfinite():
        raise ParityError(f"after {WARM_UP} steps its loss is {loss.item()}")
    return timing.Steps(step, device, warmup=0), {
        "loss": loss.item(),
        "steps": WARM_UP,
        "peak_memory": memory.peak_memory(device),
    }


def data(s) -> tuple:
    """(the folder of the data set of the settings `s` of a kind, its meta). Raises UserError if bins are missing."""
    return train.find_data(settings(s))
