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

PROJECT = pathlib.Path(__file__).resolve().parents[1]
SMALL = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=4 --gradient_accumulation_steps=2 --device=cpu"
SMALL += " --eval_interval=4 --eval_iters=4 --learning_rate=1e-2 --warmup_iters=2 --lr_decay_iters=100"
SMALL += " --attention=manual"  # auto picks by timing, and another kernel has other last digits
EXACT = "--dtype=float32 --compile=False --dropout=0.1 --bias=True"
RUNS = {
    "dropout": f"train.py {EXACT} --max_iters=12",
    "bfloat16": "train.py --dtype=bfloat16 --compile=False --schedule=constant --seed=7 --max_iters=12",
    "compiled": "train.py --dtype=float32 --compile=True --max_iters=12",
    "half": f"train.py {EXACT} --max_iters=6",
    "resumed": f"train.py {EXACT} --max_iters=12 --init_from=resume",
    "ranks": f"-m torch.distributed.run --standalone --nproc_per_node=2 train.py {EXACT} --max_iters=12",
}
TIMES = {"ms", "tokens_per_s", "mfu", "peak_memory"}


def results(root, folder):
    """Yield (name, bytes) of every small run of the project in `root`, with `folder` for its files."""

    def script(command):
        how = dict(cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
        return subprocess.run([sys.executable, *command.split()], check=True, **how).stdout

    data, book = folder / "data", folder / "book.txt"
    book.write_text("".join(chr(32 + (n * n // 7 + n // 3) % 90) for n in range(20_000)))
    script(f"data/shakespeare_char/prepare.py --input={book} --out_dir={data}")
    for name in ("train.bin", "val.bin", "meta.json"):
        yield name, (data / name).read_bytes()
    for name, command in RUNS.items():
        out = folder / name
        if name == "resumed":
            (folder / "half").rename(out)
        script(f"{command} {SMALL} --dataset={data} --out_dir={out}")
        script(f"export.py {out} {out}/{name}")  # the folder of "half" becomes that of "resumed"
        yield f"{name}: weights", (out / name / "model.safetensors").read_bytes()
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        rows = [sorted(row.items()) for row in rows if row["kind"] in ("train", "eval")]
        yield f"{name}: losses", repr([[pair for pair in row if pair[0] not in TIMES] for row in rows]).encode()
    drawn = script(f"sample.py {folder}/dropout --start=A --num_samples=2 --max_new_tokens=40 --device=cpu")
    yield "sample", drawn.partition(b"\n")[2]


if __name__ == "__main__":
    root = pathlib.Path(*sys.argv[1:] or [PROJECT]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in results(root, pathlib.Path(folder)):
            print(f"{hashlib.sha256(raw).hexdigest()[:16]}  {name}", flush=True)
