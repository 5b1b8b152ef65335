"""What each attention kernel is worth on this machine: every experiment of the two articles, one command each.

    python bench.py                                     the ladder of PyTorch's article
    python bench.py sweep | prefill | numerics | max_batch
    python bench.py ladder config/bench_blog.py         at the article's own size, on any machine

Leaves rows.jsonl, report.md and figures in out-bench/KIND; interrupted, the same command goes on where it was.
"""

import dataclasses
import functools
import pathlib
import subprocess
import sys

import train
from configurator import configure
from parts import machine
from parts.bench import ladder, max_batch, numerics, prefill, report, rows, sweep
from parts.errors import UserError, one_sentence

ROOT = pathlib.Path(__file__).resolve().parent
KINDS = {"ladder": ladder, "sweep": sweep, "prefill": prefill, "numerics": numerics, "max_batch": max_batch}


@dataclasses.dataclass
class Settings(train.Settings):
    # the benchmark's own; all others are train.py's, and go to each run of it
    results: str = "out-bench"  # a folder for each kind goes here: rows.jsonl, report.md, figures
    only: str = ""  # measure the rows whose values hold one of these words, comma-separated; empty: all
    repeats: int = 256  # sweep, prefill, numerics: timed calls a row
    warmup: int = 4  # sweep, prefill, numerics: calls before those
    heads: str = "32x128,12x64"  # sweep: heads x head size
    lengths: str = "256-4096-64,8192,16384"  # sweep, prefill: tokens, as first-last-step or one by one
    # prefill: mistral-7b, llama-3-8b, phi-2, gpt2, gpt2-medium, gpt2-large, gpt2-xl; mistral-small, llama-small,
    # phi-small; or local folders and names of the Hugging Face hub
    models: str = "mistral-7b,llama-3-8b,phi-2,gpt2-xl"
    memory_gb: float = 2.0  # max_batch on a CPU: GiB that a run may hold

    def of_train(self):
        """The settings that train.py has too, as a dict; it is to train."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(train.Settings)}
        return {**settings, "eval_only": False}


def preset(kind, gpu):
    """Settings of a kind: the articles' own sizes on a GPU, minutes in all on two CPU cores."""
    s = Settings(dataset="python_stdlib", vocab_size=50257, gradient_accumulation_steps=1, eval_iters=1)
    s = dataclasses.replace(s, warmup_iters=100, lr_decay_iters=1000, eval_interval=10**9, log_interval=10**9)
    change = functools.partial(dataclasses.replace, s)
    if gpu:  # GPT-2 124M, 12 x 1024
        return {
            "ladder": change(max_iters=105, compile=True),
            "sweep": change(max_iters=55, compile=True, dtype="float16", batch_size=4),
            "prefill": change(lengths="512,1024,2048"),
            "numerics": change(repeats=20),
            "max_batch": change(max_iters=25, compile=True, eval_iters=100),
        }[kind]
    change = functools.partial(change, n_layer=4, n_head=4, n_embd=256, block_size=1024, batch_size=1, repeats=20)
    return {
        "ladder": change(max_iters=25, compile=True),
        "sweep": change(max_iters=25, vocab_size=None, lengths="256,512,1024,2048", heads="8x128,12x64"),
        "prefill": change(lengths="512,1024,2048", models="mistral-small,llama-small,phi-small,gpt2"),
        "numerics": change(),
        "max_batch": change(max_iters=25, vocab_size=None, block_size=512, memory_gb=1.0, eval_iters=12, batch_size=4),
    }[kind]


def main(kind, args):
    """Run one kind of benchmark as `args` (config files and flags) say. Raises UserError for bad input."""
    device = machine.device(configure(Settings, args, __doc__).device)
    s = configure(functools.partial(preset, kind, device.type == "cuda"), args, __doc__)
    if kind not in ("prefill", "numerics") and s.dataset == "python_stdlib":
        prepare = ROOT / "data" / s.dataset / "prepare.py"
        if not (prepare.parent / "meta.json").exists():
            subprocess.run([sys.executable, prepare], check=True)
    folder = pathlib.Path(s.results) / kind
    folder.mkdir(parents=True, exist_ok=True)
    words = [word.strip() for word in s.only.split(",")]
    plan = [spec for spec in KINDS[kind].plan(s, device) if any(w in str(v) for v in spec.values() for w in words)]
    if not plan:
        raise UserError(f"only={s.only!r} names no row of {kind}")
    measure = functools.partial(KINDS[kind].measure, s=s, device=device, folder=folder)
    settings = {
        name: value for name, value in dataclasses.asdict(s).items() if name not in ("results", "only", "profile")
    }
    head = {"benchmark": kind, "command": " ".join(["python bench.py", kind, *args]), "settings": settings}
    defaults = dataclasses.asdict(Settings())
    head["set"] = [name for name, value in settings.items() if value != defaults[name]]
    head["environment"] = machine.environment(device)

    def state():
        return machine.vitals(device) | {"commit": head["environment"]["commit"]}

    say = functools.partial(print, flush=True)  # into a pipe too: rows take minutes
    rows.run(plan, measure, folder / "rows.jsonl", head, state, say)
    print(f"wrote {', '.join(map(str, report.write(folder)))}")


if __name__ == "__main__":
    with one_sentence():
        kind, *args = sys.argv[1:] if sys.argv[1:2] and sys.argv[1] in KINDS else ["ladder", *sys.argv[1:]]
        main(kind, args)
