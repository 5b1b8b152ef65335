"""nanoGPT's recipe for cheap computers, run by two programs: our train.py, and the unchanged one of a nanoGPT clone.

The recipe is in nanoGPT's README: a small GPT on characters, on a CPU. Both programs get the same bins. In `run` they
get the same flags too; in `command` ours has its own recipe.
"""

import os
import pathlib
import pickle
import re
import runpy
import subprocess
import sys
import tempfile
import time

from fusedgpt.bench import child
from fusedgpt.data import dataset
from fusedgpt.errors import UserError
from fusedgpt.home import ROOT, SCRIPTS
from fusedgpt.machine.environment import commit
from fusedgpt.machine.timing import summary

# config/train_shakespeare_char.py with the flags of nanoGPT's README
RECIPE = dict(device="cpu", compile=False, gradient_accumulation_steps=1, batch_size=12, block_size=64)
RECIPE |= dict(n_layer=4, n_head=4, n_embd=128, dropout=0.0, learning_rate=0.001, min_lr=0.0001, beta2=0.99)
RECIPE |= dict(warmup_iters=100, lr_decay_iters=2000, eval_interval=250, eval_iters=20, log_interval=1)
RECIPE |= dict(max_iters=2000, always_save_checkpoint=False)
OURS = SCRIPTS / "config" / "train_shakespeare_cpu.py"
CASE = " of {n_layer} layers, {n_embd} channels, {batch_size} × {block_size} tokens".format(**RECIPE)
ITERATION = re.compile(r"^iter \d+: loss ([\d.]+), time ([\d.]+)ms", re.M)
EVALUATION = re.compile(r"^step \d+: train loss [\d.]+, val loss ([\d.]+)", re.M)


def run(peer: str, s, folder: pathlib.Path) -> dict:
    """What `peer` ("ours" or "nanoGPT") measured in iterations of the recipe; its files go to `folder`.

    Raises UserError if it cannot run, RuntimeError if it ends with an error.
    """
    flags = RECIPE | {"max_iters": s.iterations, "eval_interval": min(RECIPE["eval_interval"], s.iterations)}
    if peer == "ours":  # nanoGPT's model has the exact GELU; which form costs more depends on the processor
        flags["activation"] = "gelu"
    found = _run(peer, flags, s, folder)
    ms = found["samples_ms"][child.WARM_UP :]
    return {**summary(ms), **found, "samples_ms": ms, "tokens": 12 * 64}


def command(peer: str, s, folder: pathlib.Path) -> dict:
    """What `peer` measured in its whole command, from the start of Python to its end: the recipe, or OURS.

    Raises UserError if it cannot run, RuntimeError if it ends with an error.
    """
    flags = RECIPE
    if peer == "ours":
        flags = {name: value for name, value in runpy.run_path(OURS).items() if not name.startswith("_")}
    found = _run(peer, flags, s, folder)
    ms = [1e3 * found["seconds"]]
    tokens = flags["max_iters"] * flags["batch_size"] * flags["block_size"]
    return {**summary(ms), **found, "samples_ms": ms, "tokens": tokens}


def _run(peer, flags, s, folder):
    data, meta = _data(s.dataset)
    flags = flags | {"dataset": str(data)}
    began, before = time.perf_counter(), os.times()
    found = _ours(flags, folder / "recipe-ours") if peer == "ours" else _theirs(flags, meta, s.nanogpt)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    whole = {"seconds": time.perf_counter() - began, "cpu_seconds": round(cpu, 2)}  # counted in hundredths
    return found | whole | {"vocab_size": meta["vocab_size"]}


def _data(name):
    """The data folder and its meta. Raises UserError if nanoGPT cannot read the bins."""
    folder = dataset.find_folder(ROOT, name).resolve()
    meta = dataset.read_meta(folder)
    if meta.get("dtype", "uint16") != "uint16":
        raise UserError(f"dataset={name!r} has ids of {meta['dtype']}, and nanoGPT reads uint16: name another")
    for split in ("train", "val"):
        dataset.TokenFile(folder, split, meta)  # raises if it is missing, and says what to do
    return folder, meta


def _ours(flags, out_dir):
    record, metrics = child.run(flags | {"profile": False}, out_dir)
    steps = [m for m in metrics if m["kind"] == "train"]
    # only the evaluations that nanoGPT makes too, because ours adds one at the end
    losses = [m["val_loss"] for m in metrics if m["kind"] == "eval" and m["iter"] % flags["eval_interval"] == 0]
    ran = {name: record[name] for name in ("attention", "dtype", "compile", "device")}
    ran |= {"rows_of_embedding": record["padded_vocab_size"], "parameters": record["parameters"]}
    ran |= {"activation": record["model"]["activation"]}
    return {
        "samples_ms": [m["ms"] for m in steps],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "val_loss": losses[-1],
        "peak_memory": steps[-1]["peak_memory"],
        "kernel": record["receipt"],
        "ran": ran,
    }


def _theirs(flags, meta, clone):
    clone = pathlib.Path(clone).resolve()
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder, "data")
        data.mkdir()
        for name in ("train.bin", "val.bin"):
            (data / name).symlink_to(pathlib.Path(flags["dataset"], name))
        with open(data / "meta.pkl", "wb") as file:
            pickle.dump({"vocab_size": meta["vocab_size"]}, file)
        given = flags | {"dataset": data, "out_dir": folder}  # nanoGPT looks for a relative path in its data/
        command = [sys.executable, "-B", "train.py", *(f"--{name}={value}" for name, value in given.items())]
        # cwd, because nanoGPT reads configurator.py from the current folder; it writes to out_dir only
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise child.error_of(done, "nanoGPT's train.py")
    steps, losses = ITERATION.findall(done.stdout), EVALUATION.findall(done.stdout)
    if len(steps) <= child.WARM_UP or not losses:
        raise UserError(f"{clone / 'train.py'} printed {len(steps)} lines like 'iter 0: loss 4.17, time 36.00ms'")
    return {
        "samples_ms": [float(ms) for _, ms in steps],
        "first_loss": float(steps[0][0]),
        "last_loss": float(steps[-1][0]),
        "val_loss": float(losses[-1]),
        "ran": {"attention": "sdpa", "dtype": "float32", "compile": False, "device": "cpu", "commit": commit(clone)},
    }
