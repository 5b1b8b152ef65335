"""The memory that steps of small models really hold on a CPU, beside its estimate."""

import itertools

import torch

from fusedgpt.estimates.training_memory import Load, Memory
from fusedgpt.machine.device import DTYPES, autocast
from fusedgpt.parallel import fsdp
from model import GPT, GPTConfig

CPU = torch.device("cpu")
SMALL = dict(block_size=256, vocab_size=512, n_layer=4, n_head=4, n_embd=128, bias=False)
WIDE = SMALL | dict(block_size=512, n_layer=3, n_embd=256)
LONG = SMALL | dict(block_size=1024, n_layer=2)
# with one sequence, gradients take more than activations
FEW_TOKENS = SMALL | dict(block_size=64, n_layer=6, n_embd=256)
MANY_IDS = SMALL | dict(vocab_size=20000, n_layer=2)  # logits take more than all else
FLASH, MANUAL, BLOCKED = (dict(attention=name, dtype="float32") for name in ("flash", "manual", "blocked"))
# the other families' parts; a Llama has a second, untied embedding
PARTS = dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_kv_head=2, tie_embeddings=False)
# the model, and Load's arguments for a process on a CPU; bfloat16 is slow on a CPU without instructions for it
ALONE = [
    *((SMALL, dict(batch_size=2, attention=name)) for name in ("flash", "manual", "blocked", "math")),
    *((WIDE, dict(MANUAL, batch_size=2, recompute=again)) for again in ("none", "attention", "block")),
    (LONG, dict(batch_size=1, attention="manual")),
    (SMALL, dict(batch_size=2, attention="flash", gradient_accumulation_steps=2)),
    (FEW_TOKENS, dict(batch_size=1, attention="flash")),
    (FEW_TOKENS | dict(tie_embeddings=False, bigrams=20001), dict(FLASH, batch_size=1)),
    (MANY_IDS, dict(batch_size=1, attention="flash")),
    (MANY_IDS, dict(FLASH, batch_size=4, compile=True)),
    (MANY_IDS | dict(loss="chunked"), dict(batch_size=2, attention="flash")),
    (SMALL | dict(qk_norm=True, norm="rmsnorm"), dict(FLASH, batch_size=8)),
    (SMALL | dict(qk_norm=True), dict(batch_size=4, attention="flash")),
    (SMALL | dict(parallel_block=True, n_kv_head=1), dict(FLASH, batch_size=8)),
    (LONG | dict(window=64), dict(batch_size=2, attention="masked", dtype="float32")),
    (SMALL | PARTS | dict(n_inner=352), dict(batch_size=2, attention="flash")),
    (WIDE | PARTS | dict(n_inner=704), dict(MANUAL, batch_size=2, recompute="attention")),
    (SMALL | PARTS | dict(n_inner=352), dict(batch_size=4, attention="flash", compile=True)),
]
# for two processes that share the model. FEW_TOKENS is left out: its peak varies by half with the messages under way
SHARED = [
    (SMALL, dict(MANUAL, batch_size=4)),
    (SMALL, dict(batch_size=2, attention="flash", gradient_accumulation_steps=4)),
    (MANY_IDS, dict(batch_size=1, attention="flash")),
]


def step_of(model: GPT, run: Load):
    """A function that makes a training step of a process, as train.py does."""
    c, optimizer = model.config, model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    x, y = (torch.randint(c.vocab_size, (run.batch_size, c.block_size)) for _ in range(2))

    def step():
        for n in range(run.micro_steps):
            if run.shards > 1:
                model.set_requires_gradient_sync(n == run.micro_steps - 1)
            with autocast(CPU, DTYPES[run.dtype]):
                _, loss = model(x, y, logits=False)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak_bytes(step) -> int:
    """Most bytes of tensors and kernels' scratch memory that a call of `step` adds, by the allocator's events.

    A CPU process may keep what it frees, so its size says little.
    """
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as found:
        step()
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def memory_error(rank: int, gpus: int, shape: dict, how: dict) -> dict:
    """A step's estimated and measured peak in one of `gpus` processes, beyond weights and AdamW's moments, in bytes."""
    run = Load(**dict(compile=False, parallel="fsdp" if gpus > 1 else "ddp", gpus=gpus, cpu=True) | how)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape, attention=run.attention, recompute=run.recompute))
    if gpus > 1:
        fsdp.shard(model, gpus, 1, CPU, DTYPES[run.dtype], compiled=False)
    if run.compile:
        model.compile()
    step = step_of(model, run)
    for _ in range(2):  # the first makes AdamW's moments
        step()
    estimate = Memory.of(model.config, run)
    return {"measured": peak_bytes(step), "estimate": estimate.total - estimate.weights - estimate.optimizer}
