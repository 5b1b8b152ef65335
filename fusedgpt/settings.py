"""The settings of a training run, their defaults, and the check of their values."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from fusedgpt import dimensions
from fusedgpt.attention.table import KERNELS, check_name
from fusedgpt.dimensions import Dimensions, GPTConfig
from fusedgpt.errors import UserError

Attention = Literal[*KERNELS, "auto"]
# the least value of these is 1, or 0
AT_LEAST_1 = (*dimensions.AT_LEAST_1, "batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval")
AT_LEAST_1 += ("keep_checkpoints", "check_interval", "shard_size")
AT_LEAST_0 = ("max_iters", "max_bad_steps", "max_seconds", "warmup_iters", "learning_rate", "min_lr", "weight_decay")
AT_LEAST_0 += ("grad_clip", "eval_iters", "sample_interval", "seed", "patience")


@dataclasses.dataclass
class Settings(Dimensions):
    # files
    out_dir: str = "out"  # folder for checkpoints, metrics.jsonl and run.json
    # source of the weights: scratch, resume (the run in out_dir, with its settings), auto (resume if there is a run,
    # else scratch), or a model in Hugging Face's format: a folder, or an id on the hub, such as gpt2-xl or owner/name
    init_from: str = "scratch"
    eval_interval: int = 2000  # iterations (optimizer steps) between evaluations; each also saves a checkpoint
    eval_iters: int = 200  # batches of each split that an evaluation reads, always the same ones; 0: all of both splits
    eval_only: bool = False  # evaluate once and do not train
    eval_tasks: str = ""  # tasks of lm_eval, or of eval/, that each evaluation scores: hellaswag,lambada_openai
    patience: int = 0  # end the run once it overfits in so many evaluations after its lowest loss; 0: never
    profile: bool = False  # print a profile of one forward and backward; out_dir/trace.json is for ui.perfetto.dev
    log_interval: int = 10  # iterations between lines on the console; metrics.jsonl has every iteration
    always_save_checkpoint: bool = True  # False: save a checkpoint only if the validation loss improved, and at the end
    keep_checkpoints: int = 2  # number of latest checkpoints to keep; the best one is always kept
    sample_interval: int = 0  # iterations between samples, for metrics.jsonl and report.html; 0: none
    sample_prompts: str = "\n"  # prompt of these samples, or FILE:path with a prompt in each line
    wandb_log: bool = False  # log to Weights & Biases too (WANDB_MODE=offline works)
    wandb_project: str = "owt"  # wandb project
    wandb_run_name: str = "gpt2"  # wandb run name
    # data
    dataset: str = "openwebtext"  # folder with train.bin and val.bin: its name in data/, or a path
    check_data: bool = False  # compare the SHA-256 of the bins with meta.json, not just their size and time
    gradient_accumulation_steps: int = 40  # micro-batches in a step, summed over all processes
    batch_size: int = 12  # sequences in a micro-batch
    # attention kernel; manual: hand-written; blocked: the same in blocks of queries; math, efficient, flash, cudnn:
    # that SDPA kernel and no other; flash3, flash4: FlashAttention-3 or -4, from a package; flex: FlexAttention; sdpa:
    # PyTorch picks one; masked: sdpa with a mask; auto: the fastest one here that passes parity;
    # path/to/file.py:function: your own, of (q, k, v, dropout_p) and, where they are used, documents and window
    attention: Attention | str = "auto"
    # which earlier tokens attention sees; causal: all in the window; document: those of the same document
    mask: Literal["causal", "document"] = "causal"
    # chunked: compute an eighth of the logits at a time, and again in the backward; saves memory if not compiled
    loss: Literal[*dimensions.LOSSES] = "whole"
    # optimizer
    # muon: Muon for the matrices of the layers, AdamW for embeddings and vectors; adamw: AdamW for all
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4  # peak learning rate
    max_iters: int = 600000  # training steps
    max_seconds: float | None = None  # wall-clock limit; training then ends with an evaluation and a checkpoint
    minutes: float | None = None  # minutes that the whole run should take: its first steps settle max_iters
    weight_decay: float = 1e-1  # weight decay of matrices and embeddings; vectors have none
    beta1: float = 0.9  # decay of AdamW's running mean of gradients
    beta2: float = 0.95  # decay of AdamW's running mean of squared gradients
    grad_clip: float = 1.0  # clip gradients to this norm; 0 turns clipping off
    # decay of a running mean of the weights (EMA), such as 0.999, for evaluations, samples and checkpoints; 0: none
    ema_decay: float = 0.0
    max_bad_steps: int = 20  # skip at most this many steps in a row without a finite gradient; one more ends the run
    # schedule
    decay_lr: bool = True  # warm-up and schedule; False: learning_rate throughout
    # learning rate after the linear warm-up; wsd: constant, then linear to min_lr from half of lr_decay_iters on
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_iters: int = 2000  # steps of warm-up
    lr_decay_iters: int = 600000  # step at which the schedule reaches min_lr; usually max_iters
    min_lr: float = 6e-5  # final learning rate, usually a tenth of the peak
    # machine
    backend: Literal["nccl", "gloo"] = "nccl"  # communication library of GPUs; CPUs always use gloo
    device: str = "auto"  # device: auto (a GPU if there is one), cpu, cuda, cuda:1, mps
    # dtype of matrix products; weights are float32. auto: bfloat16 on a GPU that has it, or else float16; on a CPU the
    # faster of bfloat16 and float32; on mps float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: bool | Literal["auto"] = "auto"  # torch.compile; auto: on GPUs of NVIDIA and AMD
    timeout: float = 300.0  # seconds that a process waits for another before it gives up and ends
    seed: int = 1337  # seed of the weights, the batches and dropout; each has a random stream of its own
    # ddp: every process holds the whole model; fsdp: the processes share it, so that a larger one fits
    parallel: Literal["ddp", "fsdp"] = "ddp"
    shard_size: int | None = None  # with fsdp, processes that share one copy of the model, such as a node's; None: all
    # activation checkpointing saves memory: the backward recomputes the inside of attention, or of every block
    recompute: Literal[*dimensions.RECOMPUTE] = "none"
    deterministic: bool = False  # use only deterministic kernels and operations
    check_interval: int = 100  # iterations between comparisons of the weights of all ranks


def validate(s: Settings) -> None:
    """Raise UserError for a value that no run can have, or for dimensions that do not fit together."""
    for name in (*AT_LEAST_1, *AT_LEAST_0):
        value, least = getattr(s, name), int(name in AT_LEAST_1)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"{name}={value} must be {least} or more, and finite")
    for name in ("minutes", "timeout"):
        if getattr(s, name) is not None and not 0 < getattr(s, name) < math.inf:
            raise UserError(f"{name}={getattr(s, name)} must be more than 0, and finite")
    for name in ("dropout", "beta1", "beta2", "ema_decay"):
        if not 0 <= getattr(s, name) < 1:
            raise UserError(f"{name}={getattr(s, name)} must be from 0 to just under 1")
    if s.decay_lr and s.schedule != "constant" and s.min_lr > s.learning_rate:
        how = f"give --min_lr={s.learning_rate / 10:g}"
        raise UserError(f"min_lr={s.min_lr:g} is above learning_rate={s.learning_rate:g}: {how}")
    if s.shard_size and s.parallel != "fsdp":
        raise UserError(f"shard_size={s.shard_size} needs --parallel=fsdp: give that, or --shard_size=None")
    check_name(s.attention, "auto")
    if not s.out_dir:
        raise UserError("out_dir is empty: name a folder for the run")
    if s.init_from != (small := s.init_from.lower()) and small in ("scratch", "resume", "auto"):
        raise UserError(f"init_from={s.init_from} is written in small letters: did you mean {small}?")
    if s.init_from in ("scratch", "auto"):  # otherwise the weights decide the model
        GPTConfig.of(s, vocab_size=s.vocab_size or 1, recompute=s.recompute, loss=s.loss)


def require_learning(s: Settings) -> None:
    """Raise UserError if the schedule reaches a learning rate of 0 before the run ends."""
    ends = s.decay_lr and s.schedule != "constant" and s.minutes is None and not s.eval_only
    if ends and s.min_lr == 0 and s.lr_decay_iters < s.max_iters:
        what = f"nothing is learnt from lr_decay_iters={s.lr_decay_iters} to max_iters={s.max_iters} at a rate of 0"
        raise UserError(f"{what}: give --lr_decay_iters={s.max_iters}, or a --min_lr above 0")


def as_built(s: Settings, config: GPTConfig, say: Callable[[str], None]) -> Settings:
    """`s` with the dimensions in `config`: loaded weights decide them, whatever was set."""
    built = {name: getattr(config, name) for name in dimensions.NAMES if name != "dropout"}
    for name, value in built.items():
        if getattr(s, name) not in (value, None):
            say(f"{name}={value}, as in the weights of init_from={s.init_from}")
    return dataclasses.replace(s, **built)
