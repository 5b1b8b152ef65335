"""How far off fusedgpt/estimates/ is: prints its estimates beside measurements, as in results/plan/README.md.

    python tests/plan_errors.py

This script measures memory: the most that a step of a small model holds on a CPU beyond weights and AdamW's moments.
Times are those of results/cpu_avx512_bf16_older/ladder_124M and those that others published, with one set of
assumptions for all of them.
"""

import dataclasses
import pathlib
import statistics
import sys
import warnings
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from fusedgpt.bench.report import markdown
from fusedgpt.estimates.memory import Memory
from fusedgpt.estimates.rates import FLASH, Machine
from fusedgpt.estimates.run import Run
from fusedgpt.estimates.step import RANGE, REST, Step
from fusedgpt.machine.device import DTYPES, autocast
from fusedgpt.machine.files import read_jsonl
from fusedgpt.machine.gpus import GPUS, NETWORKS, Network
from fusedgpt.machine.memory import peak_bytes
from fusedgpt.parallel import fsdp
from model import GPT, GPTConfig
from tests import launch

CPU = torch.device("cpu")
SMALL = dict(block_size=256, vocab_size=512, n_layer=4, n_head=4, n_embd=128, bias=False)
WIDE = SMALL | dict(block_size=512, n_layer=3, n_embd=256)
LONG = SMALL | dict(block_size=1024, n_layer=2)
# with one sequence, gradients take more than activations
FEW_TOKENS = SMALL | dict(block_size=64, n_layer=6, n_embd=256)
MANY_IDS = SMALL | dict(vocab_size=20000, n_layer=2)  # logits take more than all else
# the model, and Run's arguments for a process on a CPU; bfloat16 is slow on a CPU without instructions for it
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
# the other families' parts, one at a time and together; a Llama has a second, untied embedding
PARTS = dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_kv_head=2, tie_embeddings=False)
FAMILIES = [
    *(
        (SMALL | switch, dict(batch_size=8, attention="flash", dtype="float32"))
        for switch in (
            dict(position="rotary"),
            dict(norm="rmsnorm"),
            dict(mlp="swiglu", n_inner=352),
            dict(n_kv_head=1),
            dict(qk_norm=True, norm="rmsnorm"),
            dict(parallel_block=True),
        )
    ),
    (LONG | dict(window=64), dict(batch_size=2, attention="masked", dtype="float32")),
    (LONG | dict(window=64), dict(batch_size=2, attention="blocked", dtype="float32")),
    (MANY_IDS | dict(tie_embeddings=False), dict(batch_size=1, attention="flash")),
    (FEW_TOKENS | dict(tie_embeddings=False), dict(batch_size=1, attention="flash", dtype="float32")),
    (SMALL | PARTS | dict(n_inner=352), dict(batch_size=8, attention="flash", dtype="float32")),
    (SMALL | PARTS | dict(n_inner=352), dict(batch_size=2, attention="flash")),
    (WIDE | PARTS | dict(n_inner=704), dict(batch_size=2, attention="manual", dtype="float32", recompute="attention")),
    (WIDE | PARTS | dict(n_inner=704), dict(batch_size=2, attention="flash", dtype="float32", recompute="block")),
    (SMALL | PARTS | dict(n_inner=352), dict(batch_size=4, attention="flash", compile=True)),
]
COMPILED = [
    (SMALL, dict(batch_size=2, attention="flash", compile=True)),
    (MANY_IDS, dict(batch_size=1, attention="flash", compile=True)),
    (MANY_IDS, dict(batch_size=4, attention="flash", compile=True)),
    (MANY_IDS, dict(batch_size=4, attention="flash", compile=True, dtype="float32")),
]
# for two processes that share the model. FEW_TOKENS is left out: its peak varies by half with the messages under way
SHARED = [
    (SMALL, dict(batch_size=2, attention="flash")),
    (SMALL, dict(batch_size=4, attention="manual", dtype="float32")),
    (WIDE, dict(batch_size=2, attention="manual", recompute="attention", dtype="float32")),
    (SMALL, dict(batch_size=2, attention="flash", gradient_accumulation_steps=4)),
    (MANY_IDS, dict(batch_size=1, attention="flash")),
]

GPT2 = dict(vocab_size=50257, vocab_multiple=64, bias=False)
UNPADDED = GPT2 | dict(vocab_multiple=1)
MEDIUM, LARGE, XL = (
    GPT2 | dict(n_layer=layers, n_head=heads, n_embd=64 * heads) for layers, heads in ((24, 16), (36, 20), (48, 25))
)
# paxml/contrib/gpu/scripts_gpu/configs.py; bf16 with Transformer Engine. Its attention for JAX was fused only if
# NVTE_FUSED_ATTN was set, and never over more than 512 tokens: NVIDIA/JAX-Toolbox, rosetta's page on Pax, 23.08
PAX = dict(block_size=2048, vocab_size=50304, bias=False)
PAX_5B, PAX_175B = PAX | dict(n_layer=24, n_head=32, n_embd=4096), PAX | dict(n_layer=96, n_head=96, n_embd=12288)
UNFUSED, BLOCK = dict(attention="manual"), dict(recompute="block")
SHARDED = UNFUSED | dict(gpus=256, parallel="fsdp")
# Llamas are no GPT-2s. Layers and channels are those of a GPT with as many parameters in its blocks and as many FLOPs
# of attention, both within 1 %. Llama 3.1 8B (32 x 4096 with SwiGLU and grouped queries) becomes 29 x 4480, 70B becomes
# 75 x 8704. Llama 2 13B has a GPT's 12 L C² anyway. The second, untied embedding and RoPE are left out
LLAMA = dict(block_size=8192, vocab_size=128256, n_layer=29, n_head=35, n_embd=4480, bias=False)
LLAMA_70B = LLAMA | dict(n_layer=75, n_head=68, n_embd=8704)
LLAMA2 = dict(block_size=4096, vocab_size=32000, n_layer=40, n_head=40, n_embd=5120, bias=False)
LLAMA2_70B = LLAMA2 | dict(n_layer=75, n_head=68, n_embd=8704)
# torchtitan's selective recomputation: every second layer, or every second product (37 % of a block's FLOPs, where
# recompute=block has 67 and none 0). Both are estimated as the mean of block and none
HALF = dict(recompute=("none", "block"))
ONE_HALF = HALF | dict(batch_size=1)
TITAN = dict(parallel="fsdp", gpus=64, batch_size=2)
# models/1.4B/pythia-1.4b.yml: flash, every block recomputed, ZeRO-1, taken as ddp here. Its data lie on Amazon's FSx;
# Amazon's nodes of eight A100 40GB have 400 Gbit/s. The second embedding is left out
PYTHIA = dict(block_size=2048, vocab_size=50688, n_layer=24, n_head=16, n_embd=2048, bias=False)
# torchtitan's H100s have 96 GB of HBM2e, 2.4 TB/s, a limit of 500 W, and a peak between SXM's 989 and NVL's 835
H100_96GB = dataclasses.replace(GPUS["H100"], memory=96e9, bandwidth=2.4e12, peak=912e12)
MACHINES = {
    "A100": Machine.of(GPUS["A100"], NETWORKS["hdr"]),
    "A100 40GB": Machine.of(GPUS["A100 40GB"], Network(50e9 / 8)),
    "H100": Machine.of(GPUS["H100"], NETWORKS["ndr"]),
    "H100 96GB": Machine.of(H100_96GB, NETWORKS["ndr"]),
    "H200": Machine.of(GPUS["H200"], NETWORKS["ndr"]),
}


# (whose software, what was measured and where it is published, ms a step, the model, how it was trained, the GPU).
# llm.c: scripts/run_gpt2_*.sh; that of 1558M says 2.80 s, and 24 hours for 32,000 steps, which is 2.70. nanoGPT: README
# at 23a8e70, 4 days for 600,000 steps with evaluations; its issue 110 has 562 ms without. It had an early flash in a
# nightly of PyTorch 2.0, with a vocabulary of 50257. torchtitan: benchmarks/llama3_h100_202412_torchtitan.md, and
# docs/performance.md for A100s. Pythia: 7,120 GPU hours for 143,000 steps, the paper's table from memory
PUBLISHED = [
    ("PyTorch", "PyTorch's article: flash, padded", 87, GPT2, dict(batch_size=12, gpus=8), "A100"),
    ("nanoGPT", "nanoGPT, 4 days", 576, UNPADDED, dict(batch_size=12, gpus=8, micro_steps=5), "A100 40GB"),
    ("build-nanogpt", "build-nanogpt's video, second-hand", 90, GPT2, dict(batch_size=16), "A100"),
    ("llm.c", "llm.c 124M", 300, GPT2, dict(batch_size=64, gpus=8), "A100"),
    ("llm.c", "llm.c 350M", 820, MEDIUM, dict(batch_size=64, gpus=8), "A100"),
    ("llm.c", "llm.c 774M", 1700, LARGE, dict(batch_size=32, gpus=8, micro_steps=2), "A100"),
    ("llm.c", "llm.c 124M, by modded-nanogpt's log", 140, GPT2, dict(batch_size=64, gpus=8), "H100"),
    ("llm.c", "llm.c 1.5B", 2700, XL, dict(batch_size=16, gpus=8, micro_steps=8), "H100"),
    ("modded-nanogpt", "modded-nanogpt, track 3", 144, GPT2, dict(batch_size=64, gpus=8), "H200"),
    ("nanoGPT", "nanoGPT 1.5B, 49.9k tokens/s, second-hand", 8192 / 49.9, XL, dict(batch_size=8), "H200"),
    ("Pax", "Pax 126M, 2339.8 sequences/s", 256 / 2.3398, PAX, UNFUSED | dict(batch_size=4, gpus=64), "A100"),
    ("Pax", "Pax 5B, 598.83 sequences/s", 2048 / 0.59883, PAX_5B, SHARDED | dict(batch_size=8), "A100"),
    ("Pax", "Pax 175B, 19.62 sequences/s", 1536 / 0.01962, PAX_175B, SHARDED | BLOCK | dict(batch_size=6), "A100"),
    ("NeoX", "Pythia 1.4B, from memory", 2801, PYTHIA, BLOCK | dict(batch_size=16, gpus=64), "A100 40GB"),
    ("torchtitan", "torchtitan Llama 3.1 8B", 16384 / 6.667, LLAMA, TITAN | HALF | dict(gpus=8), "H100 96GB"),
    ("torchtitan", "torchtitan Llama 3.1 8B", 16384 / 6.514, LLAMA, TITAN | HALF | dict(gpus=128), "H100 96GB"),
    ("torchtitan", "torchtitan Llama 3 8B, layers", 8192 / 2.904, LLAMA, TITAN | ONE_HALF, "A100"),
    ("torchtitan", "torchtitan Llama 3 8B, products", 8192 / 2.973, LLAMA, TITAN | ONE_HALF, "A100"),
    ("torchtitan", "torchtitan Llama 3 70B", 8192 / 0.331, LLAMA_70B, TITAN | BLOCK | dict(batch_size=1), "A100"),
    ("torchtitan", "torchtitan Llama 2 13B", 8192 / 2.162, LLAMA2, TITAN, "A100"),
    ("torchtitan", "torchtitan Llama 2 13B, layers", 8192 / 1.914, LLAMA2, TITAN | HALF, "A100"),
    ("torchtitan", "torchtitan Llama 2 13B, products", 8192 / 1.904, LLAMA2, TITAN | HALF, "A100"),
    ("torchtitan", "torchtitan Llama 2 70B, products", 4096 / 0.355, LLAMA2_70B, TITAN | ONE_HALF, "A100"),
    ("torchtitan", "torchtitan Llama 2 70B", 8192 / 0.353, LLAMA2_70B, TITAN | BLOCK, "A100"),
]
# {GPUs: GiB reserved}, from the same table for H100s; the blocks were compiled, the loss was not
RESERVED = {8: 77.0, 128: 62.0}
# 2 cores of an AMD EPYC with AVX-512-BF16, as they were measured: the middle of 810 to 855 GFLOP/s and of 41 to 73 GB/s
EPYC = Machine(peak=832e9, products=832e9, flash=832e9 * FLASH / 0.65, traffic=57e9)
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


def memory_error(shape: dict, how: dict, gpus: int = 1) -> dict:
    """A step's estimated and measured peak, both beyond weights and AdamW's moments, in bytes.

    If `gpus` is more than 1, this process is one of as many.
    """
    run = Run(**dict(compile=False, parallel="fsdp" if gpus > 1 else "ddp", gpus=gpus, cpu=True) | how)
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
    return {"measured": peak_bytes(step, CPU), "estimate": estimate.total - estimate.weights - estimate.optimizer}


def shared_errors() -> list[dict]:
    """memory_error of each of SHARED, measured by two processes."""
    return launch.together(2, _measure_shared)[0]


def _measure_shared(rank, ranks):
    return [memory_error(*case, gpus=ranks) for case in SHARED]


@dataclasses.dataclass(frozen=True)
class Case:
    """A measured step and its estimate, in ms."""

    who: str  # whose software on what device: cases of one kind err together
    what: str
    on: str
    measured: float
    computation: float  # the part that formulas count
    exposed: float

    def estimate(self, rest: float = REST) -> float:
        """The estimate with another `rest`, the share for what no formula counts."""
        return (1 + rest) * self.computation + self.exposed

    @property
    def rest(self) -> float:
        """The `rest` that would have been right."""
        return (self.measured - self.exposed) / self.computation - 1

    @classmethod
    def of(cls, who, what, on, measured, config, runs, machine) -> "Case":
        """A case whose estimate is the mean of `runs`."""
        steps = [Step.of(config, run, machine) for run in runs]
        exposed = statistics.mean(step.exposed for step in steps)
        total = statistics.mean(step.total for step in steps)
        return cls(who, what, on, measured, 1e3 * (total - exposed) / (1 + REST), 1e3 * exposed)


def times() -> Iterator[Case]:
    """Every case."""
    rows = read_jsonl(ROOT / "results" / "cpu_avx512_bf16_older" / "ladder_124M" / "rows.jsonl")
    for row in rows:
        if row.get("rung") in RUNGS:
            run = Run(batch_size=1, attention=row["ran"]["attention"])
            config = GPTConfig(vocab_size=row["ran"]["padded_vocab_size"], bias=False)
            yield Case.of("ours, CPU", f"`{row['rung']}`", "2 cores of an EPYC", row["median_ms"], config, [run], EPYC)
    for who, what, ms, shape, how, gpu in PUBLISHED:
        runs = published_runs(how)
        yield Case.of(f"{who}, {gpu}", what, f"{runs[0].gpus} x {gpu}", ms, GPTConfig(**shape), runs, MACHINES[gpu])


def published_runs(how: dict) -> list[Run]:
    """The runs whose mean estimates a case: one, or two if half is recomputed."""
    how = dict(gpus=1, micro_steps=1, recompute="none") | how
    how["gradient_accumulation_steps"] = how.pop("micro_steps") * how["gpus"]
    again = how.pop("recompute")
    return [Run(**how, recompute=each) for each in ((again,) if isinstance(again, str) else again)]


def fitted(cases: list[Case]) -> float:
    """REST from `cases`: the median over kinds of each kind's median, so that a kind with many cases counts once."""
    kinds = {case.who: [each.rest for each in cases if each.who == case.who] for case in cases}
    return statistics.median(map(statistics.median, kinds.values()))


def left_out() -> list[tuple[Case, float]]:
    """Each case with measured over estimated time; REST comes from all other kinds, as if this one were unknown."""
    cases = list(times())
    rests = {case.who: fitted([each for each in cases if each.who != case.who]) for case in cases}
    return [(case, case.measured / case.estimate(rests[case.who])) for case in cases]


def reserved() -> Iterator[tuple[int, float, Memory]]:
    """(GPUs, measured bytes, estimate) of torchtitan's Llama 3.1 8B on H100s; the estimate is the mean over HALF."""
    for gpus, gib in RESERVED.items():
        runs = published_runs(TITAN | HALF | dict(gpus=gpus, compile=False))
        found = [dataclasses.asdict(Memory.of(GPTConfig(**LLAMA), run)) for run in runs]
        mean = {part: statistics.mean(each[part] for each in found) for part in found[0]}
        yield gpus, gib * 2**30, Memory(**mean)


def process_table() -> list[str]:
    """What whole processes held at their peak on a CPU, beside the estimate of a step's tensors."""
    held = []
    for row in read_jsonl(ROOT / "results" / "cpu_avx512_bf16_older" / "ladder_124M" / "rows.jsonl"):
        if ran := row.get("ran"):
            run = Run(1, attention=ran["attention"], dtype=ran["dtype"], compile=ran["compile"], cpu=True)
            config = GPTConfig(vocab_size=ran["padded_vocab_size"], bias=False)
            held.append((f"`{row['rung']}`", row["peak_memory"], config, run))
    config = GPTConfig(n_layer=14, n_head=12, n_embd=768, block_size=128, vocab_size=256, bias=False)
    for row in read_jsonl(ROOT / "results" / "cpu_amx" / "limited_memory.jsonl"):
        if row["trained"]:
            how = dict(recompute=row.get("recompute", "none"), parallel=row["parallel"], gpus=row["processes"])
            run = Run(2, 2, **how, attention="manual", dtype="float32", compile=False, cpu=True)
            held.append((f"99M, {how['parallel']}, recompute {how['recompute']}", 1e6 * row["peak_mb"], config, run))
    cells = []
    for what, measured, config, run in held:
        tensors = Memory.of(config, run).total
        cells.append([what, *(f"{each / 1e9:.2f}" for each in (measured, tensors, measured - tensors))])
    return markdown(["what", "process, GB", "tensors, estimated", "the rest"], cells)


def time_table() -> list[str]:
    """Every case of times: estimates by formulas alone and with what they do not count, and the range."""
    cells = []
    for case, ratio in left_out():
        form = "{:,.0f}" if case.measured >= 1000 else "{:.1f}"
        counted, mine = case.estimate(0), case.estimate()
        shown = [form.format(ms) for ms in (case.measured, counted, mine)]
        before, after = (f"{100 * (ms / case.measured - 1):+.0f} %" for ms in (counted, mine))
        low, high = (form.format(share * mine) for share in RANGE)
        cells.append([case.what, case.on, *shown[:2], before, shown[2], after, f"{low} to {high}", f"{ratio:.2f}"])
    names = ["what", "on", "measured, ms a step", "counted", "error", "estimated", "error", "range", "left out"]
    return markdown(names, cells)


def reserved_table() -> list[str]:
    """The errors of memory on GPUs."""
    cells = []
    for gpus, measured, found in reserved():
        gib = [f"{each / 2**30:.1f}" for each in (measured, found.total, *found.range)]
        cells.append(
            [f"{gpus} x H100 96GB", *gib[:2], f"{100 * (found.total / measured - 1):+.0f} %", " to ".join(gib[2:])]
        )
    return markdown(["torchtitan Llama 3.1 8B on", "reserved, GiB", "estimated", "error", "range"], cells)


def memory_table() -> list[str]:
    """The errors of memory; measures for a minute or more."""
    alone = ALONE + FAMILIES + COMPILED
    errors = [memory_error(*case) for case in alone] + shared_errors()
    processes = [1] * len(alone) + [2] * len(SHARED)
    cells = []
    for (shape, how), number, found in zip(alone + SHARED, processes, errors):
        settings = ", ".join(f"{name} {value}" for name, value in (shape | how).items())
        mib = [f"{found[name] / 2**20:.1f}" for name in ("measured", "estimate")]
        error = f"{100 * (found['estimate'] / found['measured'] - 1):+.1f} %"
        cells.append([settings, number, *mib, error])
    return markdown(["settings", "processes", "measured, MiB", "estimated", "error"], cells)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # from PyTorch, about kernels that it did not take
    print(*time_table(), "", *reserved_table(), "", *process_table(), "", *memory_table(), sep="\n")
