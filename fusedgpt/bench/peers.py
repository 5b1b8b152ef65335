"""Our GPT beside others, in turns: transformers' GPT-2 and Llama, and nanoGPT.

There are five parts: a training step, generation, a training step of a Llama with the FLOPs of that GPT-2, an iteration
of nanoGPT's recipe for cheap computers, and that whole command. The last two need a clone of nanoGPT, --nanogpt.
"""

import dataclasses
import gc
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

import train
from fusedgpt.attention.case import Case
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.bench import options, training
from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.foreign import NanoGPT, Transformers
from fusedgpt.bench.proof import ParityError
from fusedgpt.bench.report import Shown, gib, how_it_ran, shares
from fusedgpt.bench.rows import Result
from fusedgpt.data.dataloader import DataLoader
from fusedgpt.errors import UserError
from fusedgpt.generation import engines, generate
from fusedgpt.home import SCRIPTS
from fusedgpt.machine import determinism, flops, memory, timing
from fusedgpt.machine.device import autocast, cpu_multiplies_bfloat16, dtype_name, resolve_compile, resolve_dtype
from fusedgpt.machine.environment import commit
from fusedgpt.machine.turns import Turn
from fusedgpt.training.optimizer import learning_rate
from model import GPT, GPTConfig

BASELINE = "ours"
# nanoGPT's config/train_shakespeare_char.py with the flags of its README for cheap computers
RECIPE = dict(device="cpu", compile=False, gradient_accumulation_steps=1, batch_size=12, block_size=64)
RECIPE |= dict(n_layer=4, n_head=4, n_embd=128, dropout=0.0, learning_rate=0.001, min_lr=0.0001, beta2=0.99)
RECIPE |= dict(warmup_iters=100, lr_decay_iters=2000, eval_interval=250, eval_iters=20, log_interval=10)
RECIPE |= dict(max_iters=2000, always_save_checkpoint=False)
OURS = "config/train_shakespeare_cpu.py"  # our own recipe for the same computers
EVALUATION = re.compile(r"^step \d+: train loss [\d.]+, val loss ([\d.]+)", re.M)
# what each contender sets; "auto" is what `ours` has. nanoGPT fuses AdamW on CUDA only, and has no padding of its own
HUGGING = {"vocab_multiple": 1}
NANOGPTS = {"vocab_multiple": 64, "activation": "gelu"}
TRAINING = {
    "ours": {},
    "ours, eager": {"compile": False},
    "ours, compiled": {"compile": True},
    "Hugging Face, eager": HUGGING | {"compile": False},
    "Hugging Face, compiled": HUGGING | {"compile": True},
    "nanoGPT, eager": NANOGPTS | {"compile": False},
    "nanoGPT, compiled": NANOGPTS | {"compile": True},
}
LLAMA = {name: TRAINING[name] for name in ("ours", "Hugging Face, eager", "Hugging Face, compiled")}
LLAMA |= {"ours, GPT-2": {}}
GENERATION = {  # `ours` has the defaults of sample.py
    "ours": {"dtype": "auto", "compile": False},
    "ours, compiled": {"dtype": "auto", "compile": True},
    "ours, float32": {"dtype": "float32", "compile": False},
    **{
        f"Hugging Face, {dtype}{', compiled' * compiled}": HUGGING | {"dtype": dtype, "compile": compiled}
        for dtype in ("bfloat16", "float16", "float32")
        for compiled in (False, True)
    },
    "nanoGPT, float32": NANOGPTS | {"dtype": "float32", "compile": False, "vocab_multiple": 1},
}
PROGRAMS = {"ours": {}, "nanoGPT": {"dtype": "float32"}}
PARTS = {"training": TRAINING, "generation": GENERATION, "llama": LLAMA, "recipe": PROGRAMS, "command": PROGRAMS}
# largest relative difference of a loss from ours in float32. For GPT-2 124M the difference is 2e-7 in float32, 1e-4 in
# bfloat16, and 6e-3 without a causal mask
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 3e-3}
SAME_IDS = 4  # first ids that must equal ours if both run in float32; later ids may differ by rounding
INITIAL_SCALE = 4  # factor on the blocks' matrices to generate; without it, greedy ids soon repeat, whatever the dtype

TRAINS, TOGETHER, TURN = True, False, 0.5
UNUSED = {
    **training.UNUSED,
    "gradient_accumulation_steps": "a step is one micro-batch",
    "activation": "each contender has the form of GELU of its project",
    "optimizer": "every contender trains with AdamW",
    "mask": "every contender has attention over the whole window",
    "dropout": "every contender trains without dropout",
    **dict.fromkeys(("loss", "recompute"), "every contender computes all logits at once, and recomputes nothing"),
    "deterministic": "contenders only make steps",
}


@dataclasses.dataclass
class Settings(options.Common):
    nanogpt: str = ""  # folder of a clone of nanoGPT, to measure its model.py and train.py too; empty: leave it out
    prompt_tokens: int = 32  # tokens of the prompt, in generation
    new_tokens: int = 32  # tokens generated after the prompt


def defaults(gpu: bool) -> dict:
    """GPT-2 124M: at 12 x 1024 on a GPU, at 1 x 1024 on a CPU."""
    return training.DEFAULTS | ({} if gpu else {"batch_size": 1})


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """A comparison for each part.

    Raises UserError if --nanogpt names no clone, or if generation needs more than block_size tokens.
    """
    for name in ("model.py", "train.py"):
        if s.nanogpt and not pathlib.Path(s.nanogpt, name).is_file():
            raise UserError(f"nanogpt={s.nanogpt!r} has no {name}: name the folder of a clone of nanoGPT")
    if min(s.prompt_tokens, s.new_tokens) < 2 or s.prompt_tokens + s.new_tokens > s.block_size:
        raise UserError(
            f"prompt_tokens={s.prompt_tokens} and new_tokens={s.new_tokens} must be 2 or more, and together at most"
            f" block_size={s.block_size}"
        )
    left_out = ["ours, compiled" if resolve_compile(s.compile, device)[0] else "ours, eager"]  # `ours` is the same
    parts = {part: [peer for peer in peers if peer not in left_out] for part, peers in PARTS.items()}
    parts["generation"] = list(GENERATION)
    if device.type == "cpu" and not cpu_multiplies_bfloat16():  # such a CPU takes five times as long in 16 bits
        parts["generation"] = [peer for peer in GENERATION if not (peer.startswith("Hugging") and "16" in peer)]
    if not s.nanogpt:
        parts = {part: [peer for peer in peers if "nanoGPT" not in peer] for part, peers in parts.items()}
    return [Comparison({"part": part}, tuple(peers), BASELINE) for part, peers in parts.items() if len(peers) > 1]


def variables(name: str) -> dict[str, str]:
    """None that differ."""
    return {}


def build(of: dict, name: str, s: Settings, device: torch.device) -> tuple[Turn, dict]:
    """A contender of a part. Raises ParityError if it does not compute what ours does, UserError if it cannot run."""
    part = of["part"]
    changes = dict(PARTS[part][name])
    if part == "command":
        return _command(name, s)
    if part == "recipe":
        recipe = {field: value for field, value in RECIPE.items() if hasattr(s, field)}
        s = dataclasses.replace(s, **recipe | {"vocab_size": None, "vocab_multiple": 1, "activation": "gelu"})
    if part == "llama" and name != "ours, GPT-2":  # three matrices of 8/3 n_embd have the FLOPs of GPT-2's two of 4
        changes |= dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_inner=8 * s.n_embd // 3)
    s = dataclasses.replace(s, dropout=0.0, **changes)
    if part == "generation":
        return _generation(name, s, device)
    if name.startswith("ours"):
        found = training.proven(s)
        turn, more = training.build(s)
        return turn, found | more
    return _foreign_step(name, s, device)


def _config(s, vocab_size):
    """Our GPTConfig for the settings of a contender of another project."""
    activation = getattr(s, "activation", None) or "gelu_tanh"
    return GPTConfig.of(s, vocab_size=vocab_size, activation=activation, dropout=0.0)


def _beside_ours(name, s, config, device):
    """(the contender, our GPT with its weights, which computes what it should), both in float32 on `device`."""
    determinism.seed(s.seed, "init")
    ours = GPT(config)
    if name.startswith("nanoGPT"):  # it does not tell padding from other ids
        ours = GPT(dataclasses.replace(config, vocab_size=config.padded_vocab_size))
    state = ours.state_dict()
    hugging = name.startswith("Hugging")
    contender = Transformers.of(config, state) if hugging else NanoGPT(s.nanogpt, ours.config, state)
    contender.model.to(device)
    ours.use_attention("manual")
    return contender, ours.to(device)


def _foreign_step(name, s, device):
    """A training step of another project's model, as its own loop makes it, on the batches that ours gets."""
    folder, meta = train.find_data(training.settings(s))
    contender, ours = _beside_ours(name, s, _config(s, s.vocab_size or meta["vocab_size"]), device)
    batches = DataLoader(folder, meta, s.block_size, s.batch_size, s.seed, device, 0, 1).batches(0, range(1))
    batch = next(batches)
    with torch.no_grad():
        want = ours(*batch, logits=False)[1].item()
        error = _same(contender.loss(*batch).item(), want, ALLOWED[torch.float32], "in float32")
    per_token = ours.flops_per_token()
    del ours
    dtype = resolve_dtype(s.dtype, device)
    if dtype not in ALLOWED:
        raise UserError(f"dtype={dtype_name(dtype)!r} would need a scaler of gradients: take bfloat16 or float32")
    compiled, why_eager = resolve_compile(s.compile, device)
    if s.compile is True and not compiled:
        raise UserError(why_eager)
    memory.keep_freed_memory(keep=True)  # as train.py does
    if compiled:
        contender.model.compile()
    optimizer, cast, iteration, losses = _adamw(name, contender, s, device), autocast(device, dtype), 0, []

    def forward_backward(batch):
        with cast:
            loss = contender.loss(*batch)
        loss.backward()
        return loss.detach()

    def step():
        nonlocal batch, iteration
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration, s)
        losses[:] = [forward_backward(batch)]
        batch, iteration = next(batches), iteration + 1
        nn.utils.clip_grad_norm_(contender.model.parameters(), s.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    first = forward_backward(batch).item()  # compiles
    case = Case.of_model(_config(s, contender.ids), s.batch_size, device, dtype)
    receipt = observe(lambda: forward_backward(batch), case=case)
    if reason := contradiction("sdpa", receipt, case):
        raise UserError(reason)
    optimizer.zero_grad(set_to_none=True)
    errors = {"float32": error, "first step": _same(first, want, ALLOWED[dtype], f"in {dtype_name(dtype)}")}
    memory.reset_peak_memory(device)
    gc.collect()
    gc.freeze()
    for _ in range(training.WARM_UP):
        step()
    peak, source = flops.peak_flops(device, dtype)
    ran = {"attention": "sdpa", "dtype": dtype_name(dtype), "compile": compiled, "ids": contender.ids}
    return timing.Steps(step, device, warmup=0), {
        "loss": losses[0].item(),
        "tokens": s.batch_size * s.block_size,
        "peak_memory": memory.peak_memory(device),
        "kernel": receipt,
        "errors": errors,
        "ran": ran | ({"commit": commit(s.nanogpt)} if name.startswith("nanoGPT") else {}),
        "flops_per_token": per_token,
        "peak_flops": peak,
        "peak_source": source,
    }


def _adamw(name, contender, s, device):
    """AdamW as its project makes it: nanoGPT's by its own function, transformers' fused, with the groups of ours."""
    if name.startswith("nanoGPT"):
        model = contender.model
        return model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), device.type)
    parameters = list(contender.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": s.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=True)


def _same(got, want, allowed, where):
    """The relative difference of a loss from ours. Raises ParityError if it is more than `allowed`."""
    error = abs(got / want - 1)
    if not error <= allowed:  # `not <=` catches NaN too
        raise ParityError(
            f"its loss {where} is {got:.6g}, ours with the same weights and batch {want:.6g}: a difference of"
            f" {error:.1e}, allowed {allowed:.0e}"
        )
    return error


@torch.no_grad()
def _generation(name, s, device):
    """Greedy generation after a random prompt; before, its loss and its first ids are compared with ours."""
    memory.keep_freed_memory(keep=True)
    config = _config(s, s.vocab_size)
    idx = torch.randint(s.vocab_size, (1, s.prompt_tokens), generator=torch.Generator().manual_seed(s.seed)).to(device)
    if name.startswith("ours"):
        determinism.seed(s.seed, "init")
        ours = GPT(config).to(device)
        _scale(ours)
    else:
        contender, ours = _beside_ours(name, s, config, device)
        _scale(ours)
        _scale(contender.model)
        x, y = idx[:, :-1], idx[:, 1:].contiguous()
        _same(contender.loss(x, y).item(), ours(x, y)[1].item(), ALLOWED[torch.float32], "in float32")
    want = ours.generate(idx, s.new_tokens, temperature=0)
    if name.startswith("ours"):
        compiled = s.compile is True
        sizes = dict(prompt_length=s.prompt_tokens, new_tokens=s.new_tokens, compiled=compiled)
        engine = engines.prepare(ours, device, s.dtype, **sizes)
        dtypes = engine.dtypes

        def sample():
            ids = generate.new_tokens(engine, idx, s.new_tokens, temperature=0, cache=engine.cache)
            return torch.cat([idx, *ids], dim=1)
    else:
        dtypes = (resolve_dtype(s.dtype, device),) * 2
        contender.model.to(dtypes[0]).eval()
        if s.compile is True:
            contender.compile_decode(device)

        def sample():
            return contender.generate(idx, s.new_tokens)

    memory.reset_peak_memory(device)
    got = sample()  # compiles
    if got.shape != want.shape:
        raise ParityError(f"it made {got.size(1) - s.prompt_tokens} new tokens, not {s.new_tokens}")
    equal = (got == want)[0, s.prompt_tokens :].long().cumprod(dim=0).sum().item()
    if set(dtypes) == {torch.float32} and equal < min(SAME_IDS, s.new_tokens):  # the loss was compared without a cache
        raise ParityError(f"in float32 only its first {equal} ids equal ours, not {min(SAME_IDS, s.new_tokens)}")
    ran = {"compile": s.compile is True, "prompt": dtype_name(dtypes[0]), "tokens": dtype_name(dtypes[1])}
    return timing.Steps(sample, device, warmup=1), {"tokens": s.new_tokens, "equal_ids": equal, "ran": ran}


def _scale(model):
    """Multiply the matrices of a model's blocks by INITIAL_SCALE."""
    for name, p in model.named_parameters():
        if p.dim() == 2 and ".h." in name:
            p *= INITIAL_SCALE


def _command(name, s):
    """A whole command, from the start of Python to its end: nanoGPT's recipe, or our own for the same computers.

    The run that builds it is its warm-up, and says to which validation loss it comes.
    """
    folder, meta = train.find_data(train.Settings(dataset=s.dataset))
    if meta.get("dtype", "uint16") != "uint16":
        raise UserError(f"dataset={s.dataset!r} has ids of {meta['dtype']}, and nanoGPT reads uint16: name another")
    losses, cpu_s = [], []

    def run():
        with tempfile.TemporaryDirectory() as out:
            began, before = time.perf_counter(), os.times()
            if name == "ours":
                command = ["train.py", OURS, f"--dataset={folder.resolve()}", f"--out_dir={out}"]
                text = _ended([sys.executable, *command], SCRIPTS)
                losses.append(min(float(loss) for loss in re.findall(r"val loss ([\d.]+)", text)))
            else:
                text = _ended([sys.executable, "-B", "train.py", *_nanogpts_flags(folder, meta, out)], s.nanogpt)
                losses.append(float(EVALUATION.findall(text)[-1]))
            after = os.times()
        cpu_s.append(after.children_user + after.children_system - before.children_user - before.children_system)
        return 1e3 * (time.perf_counter() - began)

    warm_up = run()

    def turn(seconds):
        return [run() if seconds else warm_up]

    ran = {"commit": commit(s.nanogpt)} if name == "nanoGPT" else {}
    return turn, {"val_loss": losses[0], "cpu_s": round(cpu_s[0], 1), "ran": ran}


def _ended(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise RuntimeError(f"{' '.join(command[1:3])} ended with status {done.returncode}: {last}")
    return done.stdout + done.stderr


def _nanogpts_flags(folder, meta, out):
    """The flags of nanoGPT's train.py, for our bins in a folder that it can read."""
    data = pathlib.Path(out, "data")
    data.mkdir()
    for name in ("train.bin", "val.bin"):
        (data / name).symlink_to(folder.resolve() / name)
    with open(data / "meta.pkl", "wb") as file:
        pickle.dump({"vocab_size": meta["vocab_size"]}, file)
    given = RECIPE | {"dataset": data, "out_dir": out}  # nanoGPT looks for a relative path in its data/
    return [f"--{name}={value}" for name, value in given.items()]


def columns(result: Result, name: str) -> dict[str, str]:
    """What a contender computed, and how."""
    line, ms = result.measured[name], result.ms(name)
    part, ran = result.of["part"], line["ran"]
    if part == "command":
        return {"validation loss": f"{line['val_loss']:.4f}", "CPU time, s": f"{line['cpu_s']:.0f}"}
    if part == "generation":
        compiled = ", compiled" if ran["compile"] else ""
        return {
            "tokens/s": f"{1e3 * line['tokens'] / ms['median_ms']:,.1f}" if ms else "",
            "first ids equal to ours in float32": f"{line['equal_ids']} of {line['tokens']}",
            "as it ran": f"prompt in {ran['prompt']}, tokens in {ran['tokens']}{compiled}",
        }
    return {
        **shares(result, name),
        "peak memory": gib(line["peak_memory"]),
        f"loss after {training.WARM_UP} steps": f"{line['loss']:.4f}",
        "kernel seen forward / backward (as it ran)": how_it_ran(line),
    }


def headline(result: Result) -> list[str]:
    """The fastest contender of each other project."""
    found = {}
    for name in result.measured:
        project, ratio = name.partition(",")[0], result.ratio(name)
        if project != "ours" and ratio and ratio.times > found.get(project, (0.0, ""))[0]:
            found[project] = ratio.times, name
    return [name for _, name in found.values()]


def notes(results: list[Result]) -> list[str]:
    """What was the same for all, and what was not."""
    found = [
        "Before its turns each contender of another project computed our loss in float32, with the same weights and"
        " batch; `ours` is train.py's own step, or sample.py's engine.",
        "`Hugging Face` always has biases, which start at 0. nanoGPT's softmax goes over padding too, and it has no KV"
        " cache. Where nanoGPT has no autocast, on a CPU, it runs under ours.",
    ]
    if any(result.of["part"] == "command" for result in results):
        found.append(f"command: `ours` is `train.py {OURS}`, `nanoGPT` its recipe; losses are over different windows.")
    return found


SHOWN = Shown(
    "ms", columns, headline, notes, lambda s: f"{training.subject(s)}; generation of {s['new_tokens']} tokens"
)
