"""How far off fusedgpt/scale.py is: its estimates beside what was measured, as the tables of docs/scale.md.

    python tests/plan_errors.py

Memory is measured here: the most that a step of a small model holds on a CPU beyond weights and AdamW's moments. Times
are those of results/cpu_avx512_bf16_older/ladder_124M and what others published, with one set of assumptions for all.
"""

import functools
import json
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fusedgpt import scale
from fusedgpt.bench.report import markdown
from fusedgpt.device import DTYPES, autocast
from fusedgpt.files import read_jsonl
from fusedgpt.gpus import GPUS, NETWORKS
from fusedgpt.memory import peak_bytes
from fusedgpt.scale import FLASH, PRODUCTS, Machine, Run
from model import GPT, GPTConfig
from tests import limited_memory

CPU = torch.device("cpu")
SMALL = dict(block_size=256, vocab_size=512, n_layer=4, n_head=4, n_embd=128, bias=False)
WIDE = SMALL | dict(block_size=512, n_layer=3, n_embd=256)
LONG = SMALL | dict(block_size=1024, n_layer=2)
FEW_TOKENS = SMALL | dict(
    block_size=64, n_layer=6, n_embd=256
)  # of one sequence: its gradients take more than its activations
MANY_IDS = SMALL | dict(vocab_size=20000, n_layer=2)  # its logits take more than all else
# the model, and what scale.Run is told of a process on a CPU; bfloat16 takes long on a CPU without instructions for it
ALONE = [
    *((SMALL, dict(batch_size=2, attention=name)) for name in ("flash", "manual", "blocked", "math")),
    *((SMALL, dict(batch_size=8, attention=name, dtype="float32")) for name in ("flash", "manual", "blocked")),
    *(
        (WIDE, dict(batch_size=2, attention=name, recompute=again, dtype="float32"))
        for name in ("flash", "manual")
        for again in ("none", "attention", "block")
    ),
    (WIDE, dict(batch_size=1, attention="manual", recompute="block")),
    (LONG, dict(batch_size=1, attention="manual")),
    (LONG, dict(batch_size=2, attention="blocked", dtype="float32")),
    (SMALL, dict(batch_size=2, attention="flash", gradient_accumulation_steps=2)),
    (FEW_TOKENS, dict(batch_size=1, attention="flash")),
    (MANY_IDS, dict(batch_size=1, attention="flash")),
    (MANY_IDS | dict(loss="chunked"), dict(batch_size=2, attention="flash")),
    (SMALL | dict(dropout=0.1), dict(batch_size=2, attention="manual")),
]
COMPILED = [
    (SMALL, dict(batch_size=2, attention="flash", compile=True)),
    (MANY_IDS, dict(batch_size=1, attention="flash", compile=True)),
    (MANY_IDS, dict(batch_size=4, attention="flash", compile=True)),
    (MANY_IDS, dict(batch_size=4, attention="flash", compile=True, dtype="float32")),
]
# of two processes that share the model; not FEW_TOKENS, whose peak varies by half with the messages that are under way
SHARED = [
    (SMALL, dict(batch_size=2, attention="flash")),
    (SMALL, dict(batch_size=4, attention="manual", dtype="float32")),
    (WIDE, dict(batch_size=2, attention="manual", recompute="attention", dtype="float32")),
    (SMALL, dict(batch_size=2, attention="flash", gradient_accumulation_steps=4)),
    (MANY_IDS, dict(batch_size=1, attention="flash")),
]

GPT2 = dict(vocab_size=50257, vocab_multiple=64, bias=False)
XL = GPT2 | dict(n_layer=48, n_head=25, n_embd=1600)
# paxml/contrib/gpu/scripts_gpu/configs.py; bf16 with Transformer Engine, whose attention for JAX was not fused unless
# NVTE_FUSED_ATTN was set, and not at all over more than 512 tokens: NVIDIA/JAX-Toolbox, rosetta's page on Pax, 23.08
PAX = dict(block_size=2048, vocab_size=50304)
UNFUSED = dict(attention="manual")
# what was measured and where it stands, ms a step, the model, how it was trained, and on which GPUs
PUBLISHED = [
    ("PyTorch's article: flash, padded", 87, GPT2, dict(batch_size=12, gpus=8), "A100", "hdr"),
    ("llm.c, scripts/run_gpt2_124M.sh", 300, GPT2, dict(batch_size=64, gpus=8), "A100", "hdr"),
    ("llm.c, by modded-nanogpt's log", 140, GPT2, dict(batch_size=64, gpus=8), "H100", "ndr"),
    ("modded-nanogpt, track 3", 144, GPT2, dict(batch_size=64, gpus=8), "H200", "ndr"),
    ("nanoGPT 1.5B, 49.9k tokens/s, second-hand", 8192 / 49.9, XL, dict(batch_size=8), "H200", "ndr"),
    ("Pax 126M, 2339.8 sequences/s", 256 / 2.3398, PAX, UNFUSED | dict(batch_size=4, gpus=64), "A100", "hdr"),
    (
        "Pax 5B, 598.83 sequences/s",
        2048 / 0.59883,
        PAX | dict(n_layer=24, n_head=32, n_embd=4096),
        UNFUSED | dict(batch_size=8, gpus=256, parallel="fsdp"),
        "A100",
        "hdr",
    ),
    (
        "Pax 175B, 19.62 sequences/s",
        1536 / 0.01962,
        PAX | dict(n_layer=96, n_head=96, n_embd=12288),
        UNFUSED | dict(batch_size=6, gpus=256, parallel="fsdp", recompute="block"),
        "A100",
        "hdr",
    ),
]
# the CPU of those rows: the middle of 810 to 855 GFLOP/s, and of 41 to 73 GB/s
EPYC = Machine(peak=832e9, products=832e9, flash=832e9 * FLASH / PRODUCTS, traffic=57e9)
RUNGS = ("manual", "flash", "flash + padded vocabulary", "auto + padded vocabulary", "manual, again")  # compiled


def step_of(model: GPT, run: Run):
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


def recompute(model: GPT, what: str) -> None:
    """Let the backward compute the inside of attention, or of every block, again."""
    for block in model.transformer.h:
        if what == "attention":
            block.attn.attend = functools.partial(checkpoint, block.attn.attend, use_reentrant=False)
        elif what == "block":
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def memory_error(shape: dict, how: dict, gpus: int = 1) -> dict:
    """The estimate for a step beside its measured peak, both beyond weights and AdamW's moments, in bytes.

    With more `gpus`, this process is one of as many.
    """
    run = Run(**dict(compile=False, parallel="fsdp" if gpus > 1 else "ddp", gpus=gpus, cpu=True) | how)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape, attention=run.attention))
    recompute(model, run.recompute)
    if gpus > 1:
        mesh = init_device_mesh("cpu", (gpus,))
        low = None if run.dtype == "float32" else DTYPES[run.dtype]
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.transformer.h:
            fully_shard([block.attn, block.mlp], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
    if run.compile:
        model.compile()
    step = step_of(model, run)
    for _ in range(2):  # the first makes AdamW's moments
        step()
    estimate = scale.memory(model.config, run)
    return {"measured": peak_bytes(step, CPU), "estimate": estimate.total - estimate.weights - estimate.optimizer}


def shared_errors() -> list[dict]:
    """memory_error of each of SHARED, measured by two processes of this script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, "shared"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def print_shared() -> None:
    """As one of two processes: measure SHARED; rank 0 prints it."""
    distributed.init_process_group("gloo")
    found = [memory_error(*case, gpus=2) for case in SHARED]
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.destroy_process_group()


def times() -> Iterator[tuple[str, str, float, float]]:
    """(what, on what, measured ms, estimated ms) of a step."""
    rows = read_jsonl(ROOT / "results" / "cpu_avx512_bf16_older" / "ladder_124M" / "rows.jsonl")
    for row in rows:
        if row.get("rung") in RUNGS:
            run = Run(batch_size=1, attention=row["ran"]["attention"])
            config = GPTConfig(vocab_size=row["ran"]["padded_vocab_size"], bias=False)
            yield f"`{row['rung']}`", "2 cores of an EPYC", row["median_ms"], 1e3 * scale.step(config, run, EPYC).total
    for what, ms, shape, how, gpu, network in PUBLISHED:
        run = Run(**how, gradient_accumulation_steps=how.get("gpus", 1))
        found = scale.step(GPTConfig(**shape), run, Machine.of(GPUS[gpu], NETWORKS[network]))
        yield what, f"{run.gpus} x {gpu}", ms, 1e3 * found.total


def process_table() -> list[str]:
    """What whole processes held at their peak on a CPU, beside the tensors that a step is estimated to hold."""
    held = []
    for row in read_jsonl(ROOT / "results" / "cpu_avx512_bf16_older" / "ladder_124M" / "rows.jsonl"):
        if ran := row.get("ran"):
            run = Run(1, attention=ran["attention"], dtype=ran["dtype"], compile=ran["compile"], cpu=True)
            config = GPTConfig(vocab_size=ran["padded_vocab_size"], bias=False)
            held.append((f"`{row['rung']}`", row["peak_memory"], config, run))
    model = {name: value for name, value in limited_memory.MODEL.items() if name not in ("dataset", "batch_size")}
    config = GPTConfig(**model, vocab_size=256, bias=False)
    for row in read_jsonl(ROOT / "results" / "cpu_amx" / "limited_memory.jsonl"):
        if row["trained"]:
            how = dict(recompute=row.get("recompute", "none"), parallel=row["parallel"], gpus=row["processes"])
            run = Run(2, 2, **how, attention="manual", dtype="float32", compile=False, cpu=True)
            held.append((f"99M, {how['parallel']}, recompute {how['recompute']}", 1e6 * row["peak_mb"], config, run))
    cells = []
    for what, measured, config, run in held:
        tensors = scale.memory(config, run).total
        cells.append([what, *(f"{each / 1e9:.2f}" for each in (measured, tensors, measured - tensors))])
    return markdown(["what", "process, GB", "tensors, estimated", "the rest"], cells)


def time_table() -> list[str]:
    """The errors of times."""
    digits = ["{:,.0f}" if ms >= 1000 else "{:.1f}" for _, _, ms, _ in times()]
    cells = [
        (what, on, form.format(ms), form.format(mine), f"{100 * (mine / ms - 1):+.0f} %")
        for form, (what, on, ms, mine) in zip(digits, times())
    ]
    return markdown(["what", "on", "measured, ms a step", "estimated", "error"], cells)


def memory_table() -> list[str]:
    """The errors of memory; measures for a minute or more."""
    errors = [memory_error(*case) for case in ALONE + COMPILED] + shared_errors()
    cells = []
    for n, ((shape, how), found) in enumerate(zip(ALONE + COMPILED + SHARED, errors)):
        model = f"{shape['n_layer']} x {shape['n_embd']}, {how['batch_size']} x {shape['block_size']}"
        shown = {name: value for name, value in how.items() if name not in ("batch_size", "attention", "dtype")}
        shown = {name: value for name, value in shown.items() if value != "none"}
        shown |= {name: shape[name] for name in ("dropout", "loss", "vocab_size") if shape.get(name, 512) != 512}
        shown |= {"parallel": "fsdp", "processes": 2} if n >= len(ALONE + COMPILED) else {}
        more = ", ".join(f"{name} {value}" for name, value in shown.items())
        mib = [f"{found[name] / 2**20:.1f}" for name in ("measured", "estimate")]
        error = f"{100 * (found['estimate'] / found['measured'] - 1):+.1f} %"
        cells.append([model, how["attention"], how.get("dtype", "bfloat16"), more, *mib, error])
    return markdown(
        ["layers x channels, micro-batch", "attention", "dtype", "settings", "measured, MiB", "estimated", "error"],
        cells,
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # PyTorch's, of kernels that it did not take
    if sys.argv[1:] == ["shared"]:
        print_shared()
    else:
        print(*time_table(), "", *process_table(), "", *memory_table(), sep="\n")
