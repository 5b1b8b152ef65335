"""Whole commands as contenders of peers.py: nanoGPT's recipe for cheap computers, and our own for the same."""

import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import time

from fusedgpt.bench import training
from fusedgpt.errors import UserError
from fusedgpt.home import SCRIPTS
from fusedgpt.machine.environment import commit
from fusedgpt.machine.turns import Turn

# nanoGPT's config/train_shakespeare_char.py with the flags of its README for cheap computers
RECIPE = dict(device="cpu", compile=False, gradient_accumulation_steps=1, batch_size=12, block_size=64)
RECIPE |= dict(n_layer=4, n_head=4, n_embd=128, dropout=0.0, learning_rate=0.001, min_lr=0.0001, beta2=0.99)
RECIPE |= dict(warmup_iters=100, lr_decay_iters=2000, eval_interval=250, eval_iters=20, log_interval=10)
RECIPE |= dict(max_iters=2000, always_save_checkpoint=False)
OURS = "config/train_shakespeare_cpu.py"  # our own recipe for the same computers


def build(name: str, s) -> tuple[Turn, dict]:
    """A whole command, from the start of Python to its end: nanoGPT's recipe, or our own for the same computers.

    The run that builds it is its warm-up, and says to which validation loss it comes.
    """
    folder, meta = training.data(s)
    if meta.get("dtype", "uint16") != "uint16":
        raise UserError(f"dataset={s.dataset!r} has ids of {meta['dtype']}, and nanoGPT reads uint16: name another")
    losses = []

    def run():
        """Run the command once; its milliseconds. Notes its loss. Each of our runs has another seed."""
        with tempfile.TemporaryDirectory() as out:
            began = time.perf_counter()
            if name == "ours":
                command = ["train.py", OURS, f"--dataset={folder.resolve()}", f"--out_dir={out}"]
                text = _ended([sys.executable, *command, f"--seed={len(losses)}"], SCRIPTS)
            else:
                text = _ended([sys.executable, "-B", "train.py", *_nanogpts_flags(folder, meta, out)], s.nanogpt)
            ms = 1e3 * (time.perf_counter() - began)
        losses.append(min(map(float, re.findall(r"val loss ([\d.]+)", text))))  # of the weights that it keeps
        return ms

    warm_up = run()

    def turn(seconds):
        return [run() if seconds else warm_up]

    ran = {"commit": commit(s.nanogpt)} if name == "nanoGPT" else {}
    return turn, {"val_loss": losses[0], "ran": ran}


def _ended(command, folder):
    # threads wait as they do for a user: bench.py's choice is for contenders that are alive together
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise RuntimeError(f"{' '.join(command[1:3])} ended with status {done.returncode}: {last}")
    return done.stdout + done.stderr


def _nanogpts_flags(folder, meta, out):
    data = pathlib.Path(out, "data")
    data.mkdir()
    for name in ("train.bin", "val.bin"):
        (data / name).symlink_to(folder.resolve() / name)
    with open(data / "meta.pkl", "wb") as file:
        pickle.dump({"vocab_size": meta["vocab_size"]}, file)
    given = RECIPE | {"dataset": data, "out_dir": out}  # nanoGPT looks for a relative path in its data/
    return [f"--{name}={value}" for name, value in given.items()]
