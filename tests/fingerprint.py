"""Print one hash for each result of a set of small runs: a refactor must not change a line.

    python tests/fingerprint.py > after.txt
    python tests/fingerprint.py ../clone-of-the-commit-before > before.txt
    diff before.txt after.txt

Compare hashes only on one machine with one version of PyTorch. Times are left out; all else counts to the bit.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

PROJECT = pathlib.Path(__file__).resolve().parents[1]
SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, gradient_accumulation_steps=2, max_iters=12)
SMALL |= dict(eval_interval=4, eval_iters=4, learning_rate=1e-2, warmup_iters=2, lr_decay_iters=100, device="cpu")
SMALL |= dict(attention="manual")  # auto picks by timing, and another kernel has other last digits
DROPOUT = dict(dtype="float32", compile=False, dropout=0.1, bias=True)
RUNS = {
    "dropout": DROPOUT,
    "bfloat16": dict(dtype="bfloat16", compile=False),
    "float16 math": dict(dtype="float16", compile=False, attention="math", always_save_checkpoint=False),
    "compiled": dict(dtype="float32", compile=True),
    "deterministic": dict(dtype="float32", compile=False, deterministic=True, schedule="constant", seed=7),
}
TIMES = {"ms", "tokens_per_s", "mfu", "peak_memory"}


def sha(data):
    """The first digits of the SHA-256 of bytes, or of anything that has a repr."""
    raw = data if isinstance(data, bytes) else repr(data).encode()
    return hashlib.sha256(raw).hexdigest()[:16]


def leaves(state):
    """Every tensor, as bytes, and number in a nested state, in a fixed order."""
    if isinstance(state, torch.Tensor):
        return [sha(state.contiguous().flatten().view(torch.uint8).numpy().tobytes())]
    if isinstance(state, dict):
        return [[str(key), *leaves(state[key])] for key in sorted(state, key=str)]
    if isinstance(state, (list, tuple)):
        return [leaves(each) for each in state]
    return [repr(state)]


def results(root, folder):
    """Yield (name, hash) of every small run of the project in `root`, with `folder` for its files."""

    def script(*args, prefix=(sys.executable,)):
        how = dict(cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        done = subprocess.run([*prefix, *args], **how, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, args))}\n{done.stdout}{done.stderr}")
        return done.stdout

    def train(name, prefix=(sys.executable,), **settings):
        out_dir = folder / name.replace(" ", "-")
        settings = {**SMALL, **settings, "out_dir": out_dir, "dataset": folder / "data"}
        script("train.py", *(f"--{key}={value}" for key, value in settings.items()), prefix=prefix)
        saved = torch.load(out_dir / "ckpt.pt", weights_only=True)
        for part in ("model", "optimizer", "scaler", "best_val_loss"):
            yield f"{name}: {part}", sha(leaves(saved[part]))
        rows = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if row["kind"] in ("train", "eval")]
        yield f"{name}: losses", sha([sorted((k, v) for k, v in row.items() if k not in TIMES) for row in rows])

    (folder / "book.txt").write_text("".join(chr(32 + (n * n // 7 + n // 3) % 90) for n in range(20_000)))
    script("data/shakespeare_char/prepare.py", f"--input={folder / 'book.txt'}", f"--out_dir={folder / 'data'}")
    for name in ("train.bin", "val.bin", "meta.json"):
        yield f"data: {name}", sha((folder / "data" / name).read_bytes())
    for name, settings in RUNS.items():
        yield from train(name, **settings)
    yield from train("resumed", **DROPOUT | dict(max_iters=6))
    yield from train("resumed", **DROPOUT, init_from="resume")
    two = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    yield from train("two ranks", prefix=two, **DROPOUT)
    drawn = [f"--out_dir={folder / 'dropout'}", "--start=A", "--num_samples=2", "--max_new_tokens=40", "--device=cpu"]
    yield "sample", sha(script("sample.py", *drawn, "--dtype=float32").split("\n", 1)[1])
    script("export.py", folder / "dropout", folder / "hf")
    for name in ("model.safetensors", "config.json"):
        yield f"export: {name}", sha((folder / "hf" / name).read_bytes())


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else PROJECT).resolve()
    with tempfile.TemporaryDirectory() as folder:
        for name, digest in results(root, pathlib.Path(folder)):
            print(f"{digest}  {name}", flush=True)
