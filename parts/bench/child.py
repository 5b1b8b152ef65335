"""train.py in a fresh process: what users run is what is timed, and nothing of one row is left for the next."""

import gc
import pathlib
import shutil
import signal
import subprocess
import sys

import torch

from parts.clock import summary
from parts.errors import UserError
from parts.journal import read_record, read_rows

TRAIN = pathlib.Path(__file__).resolve().parents[2] / "train.py"
WARM_UP = 5  # steps that are not counted


def train(settings, out_dir, memory=None):
    """Run train.py with `settings` (a dict); its run.json and the rows of its metrics.jsonl. The checkpoint is deleted.

    memory: bytes that the process may hold (data, not code), past which an allocation fails. Raises UserError with the
    sentence that train.py ended on, MemoryError where that says out of memory, RuntimeError for any other end.
    """
    flags = [f"--{name}={value}" for name, value in {**settings, "out_dir": out_dir}.items() if value is not None]
    limit = None
    if memory:
        import resource  # not on Windows

        def limit():
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    shutil.rmtree(out_dir, ignore_errors=True)
    if torch.cuda.is_available():  # all memory is the child's
        gc.collect()
        torch.cuda.empty_cache()
    done = subprocess.run(
        [sys.executable, TRAIN, *flags], capture_output=True, text=True, preexec_fn=limit, check=False
    )
    for name in ("ckpt.pt", "best.pt"):
        (pathlib.Path(out_dir) / name).unlink(missing_ok=True)
    if done.returncode == 0:
        return read_record(out_dir), read_rows(out_dir)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1]).removeprefix("error: ")
    full = ["out of memory.", "CUDA out of memory", "bad_alloc", "Cannot allocate memory", "STATUS_ALLOC_FAILED"]
    if memory:
        full.append("could not create a primitive")  # how oneDNN says it
    if done.returncode == -signal.SIGKILL or any(words in done.stderr for words in full):
        raise MemoryError(said)
    if done.returncode == 1 and f"error: {said}" in lines:
        raise UserError(said)
    raise RuntimeError(f"train.py ended with status {done.returncode}: {said}")


def held_by_pytorch():
    """Bytes that a process has once it has imported train.py, before a model: of data, and resident (Linux)."""
    read = "import train; print(open('/proc/self/status').read())"
    done = subprocess.run([sys.executable, "-c", read], cwd=TRAIN.parent, capture_output=True, text=True, check=True)
    status = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    return tuple(1024 * int(status[name].split()[0]) for name in ("VmData", "VmRSS"))


def timing(record, rows):
    """What a benchmark's row keeps of a run: the times of its steps after the first WARM_UP, and what came of them."""
    steps = [row for row in rows if row["kind"] == "train"]
    ms = [row["ms"] for row in steps[WARM_UP:]]
    if not ms:
        raise UserError(f"max_iters={len(steps)} leaves no step to time: {WARM_UP} are warm-up")
    times = summary(ms)
    rate = 1e3 * record["tokens_per_step"] / times["median_ms"]
    return {
        **times,
        "samples_ms": ms,
        "tokens_per_s": rate,
        "mfu": rate * steps[-1]["mfu"] / steps[-1]["tokens_per_s"],
        "peak_flops": record["mfu"]["peak_flops"],
        "peak_source": record["mfu"]["peak_source"],
        "peak_memory": steps[-1]["peak_memory"],
        "final_loss": steps[-1]["loss"],
        "steps": len(steps),
        "kernel": record["receipt"],
        "ran": {name: record[name] for name in ("attention", "dtype", "compile", "padded_vocab_size", "device")},
    }
