"""Runs of train.py in fresh processes, so that benchmarks time what users run, and no row affects the next."""

import dataclasses
import gc
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import torch

from fusedgpt.bench.options import Trained, changed, family
from fusedgpt.errors import UserError
from fusedgpt.home import SCRIPTS
from fusedgpt.machine.device import dtype_name, resolve_device, resolve_dtype
from fusedgpt.machine.timing import summary
from fusedgpt.runs.metrics import read_metrics, record_of

TRAIN = SCRIPTS / "train.py"
KILLED = getattr(signal, "SIGKILL", 9)  # Windows has no SIGKILL
WARM_UP = 5  # first steps that do not count, as in train.py

# defaults of train.py's settings in benchmarks, if they differ from train.py's own
DEFAULTS = dict(dataset="python_stdlib", vocab_size=50257, gradient_accumulation_steps=1, eval_iters=1)
DEFAULTS |= dict(warmup_iters=100, lr_decay_iters=1000, eval_interval=10**9, log_interval=10**9)
ON_A_CPU = dict(n_layer=4, n_head=4, n_embd=256, block_size=1024, batch_size=1)
# fields of run.json that a row keeps
RAN = ("attention", "dtype", "tf32", "compile", "cuda_graphs", "padded_vocab_size", "device")
WORK = ("mask", "dropout", "optimizer", "loss", "recompute")  # beside the model, these decide what a step computes
# train.py's settings that no kind uses
UNUSED = {
    **dict.fromkeys(("max_iters", "minutes"), "--steps says how many steps each run of a benchmark makes"),
    "out_dir": "the runs of a benchmark go to a folder of their own in --results",
    "init_from": "every run of a benchmark starts from scratch",
    **dict.fromkeys(("eval_only", "dry_run"), "every run of a benchmark trains"),
    **dict.fromkeys(("sample_interval", "sample_prompts"), "a benchmark draws no samples"),
    "always_save_checkpoint": "a benchmark deletes its checkpoints",
    "choose": "the runs of a benchmark time anew what auto leaves open",
    **dict.fromkeys(("backend", "parallel", "shard_size"), "the runs of a benchmark have one process"),
    **dict.fromkeys(("eval_interval", "log_interval"), "a benchmark sets it itself"),
    **dict.fromkeys(("wandb_log", "wandb_project", "wandb_run_name", "tensorboard_log"), "a benchmark has no tracker"),
}


def settings(s: Trained, kind_settings: type) -> dict:
    """The settings of `s` that train.py has, which are all but those of the kind's dataclass, `kind_settings`.

    A dtype "auto" becomes the dtype that is compared with float64, because train.py would take the faster one.
    """
    added = {field.name for field in dataclasses.fields(kind_settings)}
    shared = {field.name: getattr(s, field.name) for field in dataclasses.fields(s) if field.name not in added}
    dtype = dtype_name(resolve_dtype(s.dtype, resolve_device(s.device)))
    return shared | {"max_iters": s.steps, "device": s.device, "profile": s.profile, "dtype": dtype}


def subject(s: dict) -> str:
    """The model, what changes the work of a step, and its tokens, for the title of a figure.

    s: the settings of a header.
    """
    sizes = f"{s['n_layer']} layers, {s['n_head']} heads, {s['n_embd']} channels"
    model = ", ".join([sizes, *family(s).values(), *changed(s, WORK)])
    count = s.get("gradient_accumulation_steps", 1)  # peers has none
    micro_batches = f"{count} × " if count > 1 else ""
    return f"a GPT of {model}, {micro_batches}{s['batch_size']} × {s['block_size']} tokens a step"


def run(
    settings: dict,
    out_dir: pathlib.Path,
    memory: int | None = None,
    trace: pathlib.Path | None = None,
    variables: dict[str, str] | None = None,
) -> tuple[dict, list[dict]]:
    """Run train.py with `settings`; returns its run.json and the lines of its metrics.jsonl. Deletes its checkpoints.

    memory: bytes of data (not code) that the process may hold; an allocation beyond this limit fails. trace: the file
    for the profile, if settings["profile"] is set. variables: environment variables for the process, beside ours.
    Raises UserError if train.py refused its kernel, MemoryError if memory ran out, ChildProcessError with train.py's
    last sentence if that was another, RuntimeError if it failed otherwise.
    """
    given = {**settings, "out_dir": out_dir, "choose": "again"}  # what was remembered is no measurement of today
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    limit = None
    if memory:
        import resource  # not on Windows

        def limit():
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    shutil.rmtree(out_dir, ignore_errors=True)
    if torch.cuda.is_available():  # leave all memory to the child
        gc.collect()
        torch.cuda.empty_cache()
    done = subprocess.run(
        [sys.executable, TRAIN, *flags],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
        env=os.environ | (variables or {}),
    )
    for name in ("ckpt.pt", "best.pt"):
        (out_dir / name).unlink(missing_ok=True)
    if done.returncode:
        raise error_of(done, "train.py", limited=bool(memory))
    if settings["profile"] and trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        (out_dir / "trace.json").replace(trace)
    return record_of(out_dir), read_metrics(out_dir)


def error_of(done: subprocess.CompletedProcess, name: str, limited: bool = False) -> Exception:
    """The exception to raise for a failed process called `name`. limited: whether its memory was limited.

    Only a kernel's refusal is a UserError. Another sentence, such as one about missing data or a full disk, may not
    hold for the next call, so it is a ChildProcessError.
    """
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    sentences = [line for line in lines if line.startswith("error: ")]
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]  # CUDA adds lines of advice
    said = (sentences or exceptions or lines)[-1].removeprefix("error: ")
    signs = ["of memory or more, and", "out of memory.", "CUDA out of memory", "CUDA error: out of memory"]
    signs += ["bad_alloc", "Cannot allocate memory", "STATUS_ALLOC_FAILED"]
    if limited:
        signs += ["could not create a primitive", "can't start new thread"]  # from oneDNN and Python
    if done.returncode == -KILLED or any(words in done.stderr for words in signs):
        return MemoryError(said)
    if done.returncode == 1 and f"error: {said}" in lines:
        return UserError(said) if said.startswith("attention=") else ChildProcessError(said)
    return RuntimeError(f"{name} ended with status {done.returncode}: {said}")


def held_by_pytorch() -> tuple[int, int]:
    """Bytes (data, resident) that a process holds after it has imported train.py, before it makes a model.

    Raises UserError if this is not Linux.
    """
    if sys.platform != "linux":
        raise UserError("on a CPU, max_batch needs Linux, which limits a process's memory: run it there, or on a GPU")
    read = "import train; print(open('/proc/self/status', encoding='utf-8').read())"
    done = subprocess.run([sys.executable, "-c", read], cwd=TRAIN.parent, capture_output=True, text=True, check=True)
    status = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    return tuple(1024 * int(status[name].split()[0]) for name in ("VmData", "VmRSS"))


def measured(record: dict, metrics: list[dict]) -> dict:
    """What a row keeps of a run: times of the steps after the first WARM_UP, memory, losses, and what ran.

    Raises UserError if the run made no more than WARM_UP steps.
    """
    steps = [m for m in metrics if m["kind"] == "train"]
    ms = [m["ms"] for m in steps[WARM_UP:]]
    if not ms:
        raise UserError(f"steps={len(steps)} leaves no step to time: {WARM_UP} are warm-up")
    times = summary(ms)
    tokens_per_s = 1e3 * record["tokens_per_step"] / times["median_ms"]
    return {
        **times,
        "samples_ms": ms,
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * steps[-1]["mfu"] / steps[-1]["tokens_per_s"],
        "peak_flops": record["mfu"]["peak_flops"],
        "peak_source": record["mfu"]["peak_source"],
        "peak_memory": steps[-1]["peak_memory"],
        "final_loss": steps[-1]["loss"],
        "steps": len(steps),
        "kernel": record["receipt"],
        "ran": {name: record[name] for name in RAN},
    }
