"""Train a GPT, on one device or, under torchrun, on many.

    python train.py config/train_shakespeare_char.py --batch_size=32
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

Every setting is a field of Settings; config files and --name=value flags set them (configurator.py).
"""

import dataclasses
import gc
import math
import os
import pathlib
import signal
import sys
import time
from typing import Literal

import torch

from configurator import configure
from model import GPT, PRETRAINED, GPTConfig
from parts import checkpoint, clock, cost, dist, kernels, machine, tokens
from parts.batches import Batches
from parts.errors import UserError, one_sentence
from parts.journal import Journal

ROOT = pathlib.Path(__file__).resolve().parent
WARM_UP = 5  # steps that the summary of times leaves out
SKIPS_IN_A_ROW = 20  # steps without a finite gradient, and the run is lost; float16's scaler needs a few at the start


@dataclasses.dataclass
class Settings:
    # files
    out_dir: str = "out"  # where checkpoints, metrics.jsonl and run.json go
    # scratch, resume (the run in out_dir), gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a local Hugging Face folder
    init_from: str = "scratch"
    eval_interval: int = 2000  # iterations from one evaluation and checkpoint to the next
    eval_iters: int = 200  # an evaluation reads this many batches, from fixed places, of each split
    eval_only: bool = False  # evaluate once and end
    profile: bool = False  # write one forward and backward as out_dir/trace.json, for ui.perfetto.dev
    log_interval: int = 1  # iterations from one line on the console to the next; metrics.jsonl has them all
    always_save_checkpoint: bool = True  # at every evaluation; False: when the validation loss improved, and at the end
    # wandb
    wandb_log: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project: str = "owt"  # its project
    wandb_run_name: str = "gpt2"  # its run
    # data
    dataset: str = "openwebtext"  # a folder of data/, or a path, with train.bin and val.bin
    gradient_accumulation_steps: int = 40  # micro-batches a step, over all processes together
    batch_size: int = 12  # sequences in a micro-batch
    block_size: int = 1024  # tokens in a sequence
    # model
    n_layer: int = 12  # layers
    n_head: int = 12  # attention heads
    n_embd: int = 768  # channels
    dropout: float = 0.0  # share of activations dropped in training; 0 for pretraining, 0.1 and more for fine-tuning
    bias: bool = False  # biases in linear layers and LayerNorms
    vocab_size: int | None = None  # ids that can occur; None: as many as the data's tokenizer has
    vocab_multiple: int = 64  # round the embedding's rows up to a multiple: 64 makes 50257 50304, 1 leaves it
    # attention kernel: manual is hand-written; math, efficient, flash, cudnn: that SDPA kernel and no other; flex:
    # FlexAttention; sdpa: PyTorch picks; auto: the fastest here that passes parity
    attention: Literal["manual", "math", "efficient", "flash", "cudnn", "flex", "sdpa", "auto"] = "sdpa"
    # AdamW
    learning_rate: float = 6e-4  # its peak
    max_iters: int = 600000  # training steps
    max_seconds: float | None = None  # end after this wall-clock time, with an evaluation and a checkpoint
    weight_decay: float = 1e-1  # of matrices and embeddings
    beta1: float = 0.9  # decay of the mean of gradients
    beta2: float = 0.95  # decay of the mean of their squares
    grad_clip: float = 1.0  # clip the gradient's norm to this; 0: never
    # schedule
    decay_lr: bool = True  # follow the schedule; False: learning_rate throughout
    schedule: Literal["cosine", "constant"] = "cosine"  # after a linear warm-up
    warmup_iters: int = 2000  # steps of warm-up
    lr_decay_iters: int = 600000  # the cosine reaches min_lr here; about max_iters
    min_lr: float = 6e-5  # about a tenth of learning_rate
    # machine
    backend: Literal["nccl", "gloo"] = "nccl"  # between processes on GPUs; others use gloo
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products; weights are float32
    compile: bool | Literal["auto"] = "auto"  # torch.compile; auto: on GPUs
    seed: int = 1337  # of the weights, the batches and dropout, each with its own stream
    deterministic: bool = False  # refuse kernels and operations that are not


def validate(s):
    """Raise UserError for a number that no run can have."""
    least_one = "batch_size block_size gradient_accumulation_steps n_layer n_head n_embd eval_interval eval_iters"
    for name in (*least_one.split(), "log_interval", "vocab_multiple"):
        if getattr(s, name) < 1:
            raise UserError(f"{name}={getattr(s, name)} must be 1 or more")
    for name in ("max_iters", "warmup_iters", "grad_clip", "weight_decay", "learning_rate", "min_lr", "max_seconds"):
        if not 0 <= (getattr(s, name) or 0) < math.inf:
            raise UserError(f"{name}={getattr(s, name)} must be 0 or more, and finite")
    for name in ("dropout", "beta1", "beta2"):
        if not 0 <= getattr(s, name) < 1:
            raise UserError(f"{name}={getattr(s, name)} must be from 0 to just under 1")
    if not 0 <= s.seed < 2**63 or (s.vocab_size is not None and s.vocab_size < 1):
        raise UserError(f"seed={s.seed} must be from 0 to 2**63 - 1, vocab_size={s.vocab_size} 1 or more")
    if s.init_from not in ("scratch", "resume", *PRETRAINED) and not os.path.isdir(s.init_from):
        names = ", ".join(("scratch", "resume", *PRETRAINED))
        raise UserError(f"init_from={s.init_from!r} must be {names}, or a local Hugging Face folder")


def learning_rate(it, s):
    """The learning rate of step `it`: linear warm-up, then the schedule (cosine: SGDR, arXiv:1608.03983)."""
    if not s.decay_lr:
        return s.learning_rate
    if it < s.warmup_iters:
        return s.learning_rate * (it + 1) / (s.warmup_iters + 1)
    if s.schedule == "constant":
        return s.learning_rate
    if it >= s.lr_decay_iters:
        return s.min_lr
    done = (it - s.warmup_iters) / (s.lr_decay_iters - s.warmup_iters)
    return s.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (s.learning_rate - s.min_lr)


def build(s, meta, saved):
    """The model on the CPU: new, from a checkpoint `saved`, or pretrained."""
    if saved:
        return GPT.from_checkpoint(saved, dropout=s.dropout)
    if s.init_from == "scratch":
        machine.seed(s.seed, "init")
        shape = {name: getattr(s, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")}
        vocab_size = s.vocab_size or meta["vocab_size"]
        model = GPT(GPTConfig(vocab_size=vocab_size, vocab_multiple=s.vocab_multiple, **shape))
    else:
        model = GPT.from_pretrained(s.init_from, {"dropout": s.dropout, "vocab_multiple": s.vocab_multiple})
    if s.block_size != model.config.block_size:
        model.crop_block_size(s.block_size)
    return model


def as_built(s, config, say):
    """`s` with the shape of the model: a checkpoint or pretrained weights bring their own, whatever was set."""
    names = ("n_layer", "n_head", "n_embd", "bias", "block_size", "vocab_size", "vocab_multiple")
    shape = {name: getattr(config, name) for name in names}
    for name, value in shape.items():
        if getattr(s, name) not in (value, None):
            say(f"{name}={value}, as in the weights of init_from={s.init_from}")
    return dataclasses.replace(s, **shape)


def choose_attention(s, model, device, dtype, saved, ranks):
    """Set the kernel of `model` by s.attention; returns its name and, for auto, what each kernel took."""
    c, rows = model.config, {}
    shape = (s.batch_size, c.n_head, s.block_size, c.n_embd // c.n_head)
    name, backward = s.attention, not s.eval_only
    dropout = s.dropout if backward else 0.0
    before = saved.get("attention") if saved and saved["config"].get("attention") == "auto" else None
    if name == "auto" and before and not kernels.refusal(before, shape, device, dtype, dropout, backward):
        name = before  # a resumed run goes on with the kernel that it began with
    if name == "auto":
        name, rows = ranks.same(kernels.fastest(shape, device, dtype, dropout, backward) if ranks.main else None)
    kernels.require(name, shape, device, dtype, dropout, backward)
    model.use_attention(name)
    return name, rows


def continue_from(saved, s, optimizer, scaler, say):
    """Take up the optimizer's and the scaler's state of a checkpoint; say what is set otherwise than it was."""
    groups = optimizer.state_dict()["param_groups"]  # weight decay and betas are this run's settings
    try:
        if saved["iter_num"] and not saved["optimizer"]["state"]:
            raise ValueError("it has no state of the optimizer")
        optimizer.load_state_dict({**saved["optimizer"], "param_groups": groups})
        if saved.get("scaler"):
            scaler.load_state_dict(saved["scaler"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the optimizer in the checkpoint of {s.out_dir} does not fit: {error}") from error
    for name, was in saved["config"].items():
        if name not in ("init_from", "eval_only") and getattr(s, name, was) != was:
            say(f"resuming with {name}={getattr(s, name)!r}; it was {was!r}")


@torch.no_grad()
def evaluate(model, batches, s, autocast, ranks, device):
    """Mean loss of each split over its fixed windows, shared out over the ranks."""
    model.eval()
    losses = {}
    for split in ("train", "val"):
        sums, counts = [torch.zeros((), device=device)], [torch.zeros((), device=device)]
        for x, y in batches.evaluation(split, s.eval_iters * s.batch_size):
            with autocast:
                _, loss = model(x, y)
            counts.append((y >= 0).sum())  # read at the end only: the device need not wait for Python
            sums.append(loss.float() * counts[-1])
        total, count = ranks.sum([sum(torch.stack(each).tolist()) for each in (sums, counts)], device)
        losses[f"{split}_loss"] = total / count
    model.train()
    return losses


def main(s):
    """Train as the Settings `s` say. Raises UserError for bad input; exits with 128 + the number of a signal."""
    validate(s)
    began = time.perf_counter()

    # the machine, and this process's place among the others
    ranks = dist.ranks()
    mine = ranks.micro_steps(s.gradient_accumulation_steps)
    device = machine.device(s.device, ranks.local_rank)
    dtype = machine.dtype(s.dtype, device)
    autocast = machine.autocast(device, dtype)
    if s.deterministic:
        machine.make_deterministic()
    dist.join(ranks, s.backend, device)
    out_dir = pathlib.Path(s.out_dir)
    journal = Journal(ranks.main)

    # data, model and its attention
    saved = checkpoint.load(out_dir / "ckpt.pt") if s.init_from == "resume" else None
    folder = tokens.data_folder(ROOT, s.dataset)
    meta = tokens.read_meta(folder)
    if meta == tokens.GPT2 and s.vocab_size:
        meta = {**meta, "vocab_size": s.vocab_size}  # without a meta.json, GPT-2's was a guess
    raw_model = build(s, meta, saved).to(device)
    s = as_built(s, raw_model.config, journal.say)
    tokens.check_fit(meta, raw_model.config.vocab_size, f"dataset={s.dataset}")
    batches = Batches(folder, meta, s.block_size, s.batch_size, s.seed, device, ranks.rank, ranks.world)
    attention, trials = choose_attention(s, raw_model, device, dtype, saved, ranks)
    compiled, why_eager = machine.compiles(s.compile, device)
    if compiled:
        raw_model.compile()
        if device.type == "cpu":
            machine.keep_freed_memory()

    # what it is trained with, and where it left off
    optimizer = raw_model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), device.type)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    it, best_val_loss = 0, math.inf
    if saved:
        it, best_val_loss = saved["iter_num"], saved["best_val_loss"]
        continue_from(saved, s, optimizer, scaler, journal.say)
        saved = None  # or the weights and the optimizer's state would be in memory twice
    start = it

    # two rehearsals, to compile and for the receipt; they change no weight and draw on no stream of random numbers
    feed = batches.stream(it, mine)
    batch = next(feed)

    model = dist.wrap(raw_model, ranks, device)  # before anything compiles: DDP cuts the graph where buckets end

    def rehearse():
        with dist.gradients_stay(model, until_last=False):
            with autocast:
                _, loss = model(*batch)
            loss.backward()

    receipt = None
    if not s.eval_only:
        rehearse()
        receipt = kernels.observe(rehearse, out_dir / "trace.json" if s.profile and ranks.main else None)
        optimizer.zero_grad(set_to_none=True)
        if reason := kernels.contradiction(attention, receipt, device):
            raise UserError(reason)
    params = list(raw_model.parameters())

    # what is about to run, said and written down
    tokens_per_step = s.gradient_accumulation_steps * s.batch_size * s.block_size
    peak, peak_source = cost.peak_flops(device, dtype)
    record = {
        "settings": dataclasses.asdict(s),
        "model": dataclasses.asdict(raw_model.config),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "compile": compiled,
        "attention": attention,
        "attention_trials": trials,
        "receipt": receipt,
        "world_size": ranks.world,
        "tokens_per_step": tokens_per_step,
        "parameters": raw_model.get_num_params(non_embedding=False),
        "parameters_without_positions": raw_model.get_num_params(),
        "padded_vocab_size": raw_model.config.padded_vocab_size,
        "mfu": {"counts": "6 N + 12 L C T a token", "peak_flops": peak, "peak_source": peak_source},
        "environment": machine.environment(device),
    }
    journal.announce(record, why_eager)
    if ranks.main and not s.eval_only:
        journal.open(out_dir, start, record)

    def save():
        """Write the whole state to ckpt.pt; the iteration it is of. Raises UserError where a weight is not finite."""
        if not all(p.isfinite().all() for p in params):
            raise UserError(
                f"the weights are not finite after {it} steps and were not saved: resume with a lower learning_rate"
            )
        model_args = {name: value for name, value in record["model"].items() if name != "attention"}
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        state |= {"model_args": model_args, "iter_num": it, "best_val_loss": best_val_loss}
        state |= {"config": record["settings"], "attention": attention, "meta": meta}
        if ranks.main:
            checkpoint.save(out_dir / "ckpt.pt", state)
        return it

    stopped_by = catch_signals()
    gc.collect()
    gc.freeze()  # what lives now lives to the end: a step need not wait for a look through it
    saved_at, skipped, times, time_is_up = start, 0, [], False
    while True:
        # evaluation and checkpoint; saved first, so that a failing evaluation loses nothing
        last = it >= s.max_iters or time_is_up or s.eval_only
        if it % s.eval_interval == 0 or last:
            if it > saved_at and s.always_save_checkpoint:
                saved_at = save()
            losses = evaluate(raw_model, batches, s, autocast, ranks, device)
            journal.evaluation({"iter": it, **losses})
            if it > 0 and losses["val_loss"] < best_val_loss and not s.eval_only:
                best_val_loss = losses["val_loss"]
                saved_at = save()  # again, with what is the best now
                if ranks.main:
                    checkpoint.keep(out_dir / "ckpt.pt", out_dir / "best.pt")
        if last:
            break

        # one step: the mean gradient of all micro-batches of all ranks, clipped
        step_began = clock.now(device)
        lr = learning_rate(it, s)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=device)
        for micro in mine:
            machine.seed(s.seed, "dropout", it, micro)  # by the batch's place: not by what ran before, nor where
            with dist.gradients_stay(model, until_last=micro == mine[-1]):
                with autocast:
                    _, loss = model(*batch)
                batch = next(feed)  # read and copied while the device computes
                scaler.scale(loss / len(mine)).backward()
            loss_sum += loss.detach()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        finite = math.isfinite(norm)
        if finite:
            if s.grad_clip:
                torch.nn.utils.clip_grads_with_norm_(params, s.grad_clip, norm)
            scaler.step(optimizer)
        scaler.update()  # in float16 it scales less after gradients that overflowed
        optimizer.zero_grad(set_to_none=True)
        over_time = s.max_seconds is not None and time.perf_counter() - began > s.max_seconds
        loss_sum, overs, stops = ranks.sum([loss_sum.item(), over_time, len(stopped_by)], device)
        ms = 1e3 * (clock.now(device) - step_began)

        # what came of it
        times.append(ms)
        rate = 1e3 * tokens_per_step / ms
        row = {"iter": it, "loss": loss_sum / s.gradient_accumulation_steps, "lr": lr}
        row |= {"grad_norm": norm.item(), "ms": ms}
        row |= {"tokens_per_s": rate, "mfu": raw_model.flops_per_token() * rate / (peak * ranks.world)}
        row |= {"peak_memory": machine.peak_memory(device)}
        journal.iteration(row, aloud=it % s.log_interval == 0)
        skipped = 0 if finite else skipped + 1
        if skipped:
            journal.say(f"iter {it}: loss {row['loss']}, gradient norm {row['grad_norm']}: step skipped, weights kept")
        if skipped == SKIPS_IN_A_ROW:
            raise UserError(
                f"{skipped} steps in a row had no finite gradient, the last at iteration {it}. Resume from the last"
                f" checkpoint in {out_dir} with a lower learning_rate, a grad_clip, or dtype=float32"
            )
        it += 1
        time_is_up = overs > 0
        if stops:
            break

    if it > saved_at:
        save()
    if len(times) > WARM_UP and ranks.main:
        record["time"] = clock.summary(times[WARM_UP:])
        journal.write_record(record)
        journal.say(
            "ms per iteration: median {median_ms:.2f}, p10 {p10_ms:.2f}, p90 {p90_ms:.2f}".format(**record["time"])
        )
    journal.close()
    model = None  # DDP's reducer must not be the last to hold the process group: it would end it under Python's lock
    dist.leave(ranks)
    if stopped_by:
        journal.say(f"stopped after {it} iterations, saved: go on with the same command and --init_from=resume")
        sys.exit(128 + stopped_by[0])


def catch_signals():
    """A list that gets the number of the first SIGTERM or Ctrl-C; a second Ctrl-C ends the program at once."""
    caught = []

    def catch(number, frame):  # torchrun and schedulers may send SIGTERM twice: they have SIGKILL to mean it
        caught.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, catch)
    signal.signal(signal.SIGINT, catch)
    return caught


if __name__ == "__main__":
    with one_sentence():
        main(configure(Settings, sys.argv[1:], __doc__))
