"""What a limit on the memory of each process lets train: one process, two with a copy each, two that share the model.

    python tests/limited_memory.py [MEGABYTES [STEPS]]        default: 1900 4

Each process may have so many MB of memory of its own (RLIMIT_DATA), as a GPU has. The model has 99M parameters, which
take 1.6 GB to train with AdamW in float32. Prints one line of JSON for each: whether it trained, its validation loss at
the end, and the most memory that a process held. Needs data/python_stdlib.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = dict(n_layer=14, n_head=12, n_embd=768, block_size=128, batch_size=2, dataset="python_stdlib")
RUN = dict(device="cpu", dtype="float32", compile=False, attention="manual", gradient_accumulation_steps=2)
RUN |= dict(eval_iters=2, eval_interval=1000, warmup_iters=1, learning_rate=1e-4)
ROWS = [
    (1, dict(parallel="ddp")),
    (1, dict(parallel="ddp", recompute="block")),
    (2, dict(parallel="ddp")),
    (2, dict(parallel="fsdp")),
    (2, dict(parallel="fsdp", recompute="block")),
]


def row(processes, settings, megabytes, steps, out_dir):
    """A run, as a line of JSON says it."""
    given = {**MODEL, **RUN, **settings, "max_iters": steps, "out_dir": out_dir}
    start = f"-m torch.distributed.run --standalone --nproc_per_node={processes}" if processes > 1 else ""
    flags = " ".join(f"--{name}={value}" for name, value in given.items())
    command = f"ulimit -d {megabytes * 1000**2 // 1024}; {sys.executable} {start} train.py {flags}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    found = {"processes": processes, **settings, "limit_mb": megabytes, "trained": done.returncode == 0}
    if done.returncode:
        said = re.search(r"error: (.*)", done.stderr) or re.search(r"(\w*Error.*)", done.stderr)
        return found | {"why_not": said[1].split(". ")[0] if said else done.stderr[-120:]}
    metrics = [json.loads(line) for line in (pathlib.Path(out_dir) / "metrics.jsonl").read_text().splitlines()]
    peak = max(m["peak_memory"] for m in metrics if m["kind"] == "train")
    return found | {"val_loss": metrics[-1]["val_loss"], "peak_mb": round(peak / 1e6)}


def main(megabytes=1900, steps=4):
    """Print what each way of training does under the limit."""
    for processes, settings in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(row(processes, settings, megabytes, steps, folder)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
