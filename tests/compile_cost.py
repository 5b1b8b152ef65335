"""What compiling costs and gains on a CPU, and whether a whole run with `compile=auto` takes longer than an eager one.

    OMP_NUM_THREADS=1 python tests/compile_cost.py costs [CONFIG ...]
    OMP_NUM_THREADS=1 python tests/compile_cost.py runs CONFIG SECONDS ...

costs: a line of JSON for each config (in quotes, with flags): milliseconds of an eager and of a compiled forward and
backward, in turns, and the seconds to compile without and with cached graphs. runs: a line for each length of a run, in
seconds of its eager steps: the seconds of the whole command with compile=False, with auto on a machine that has never
compiled it, and with auto if the graphs are cached and their gain is known. All are seconds of the CPU, added over
processes and threads, so that other programs hardly count. Needs the data of the configs.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = ["config/quickstart.py", "config/train_shakespeare_cpu.py", "config/train_text_cpu.py"]
CONFIGS += ["config/train_shakespeare_cpu.py --n_layer=12"]
# compiles however short the run is, and ends once that is measured
MEASURE = """
import json, resource, sys, time, types, train
from fusedgpt.training import compiling
def cpu_s():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
train.tuning.time = compiling.time = types.SimpleNamespace(perf_counter=cpu_s)
decide, weigh = compiling.decide, compiling.weigh
compiling.weigh = lambda *given: {**weigh(*given), "pays": True}
def measure(memory, case, length, seconds, layers, attempt):
    print(json.dumps(decide(memory, case, length, seconds, layers, attempt)), flush=True)
    sys.exit()
compiling.decide = measure
train.main(train.read_settings([*sys.argv[1:], "--compile=auto", "--dry_run=True", "--choose=again"]))
"""


def timed(command, caches):
    """What a command printed, and the CPU's seconds of all its processes, with the caches in a folder."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    environment = os.environ | {name: os.path.join(caches, name) for name in names}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of processes would end after us, and not be counted
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    how = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    printed = subprocess.run([sys.executable, *command], check=True, **how).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return printed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def costs(config):
    """The row of a config, whose second measurement finds the graphs of the first."""
    with tempfile.TemporaryDirectory() as caches:
        visits = [timed(["-c", MEASURE, *config.split()], caches) for _ in range(2)]
    cold, warm = (json.loads(printed.splitlines()[-1]) for printed, _ in visits)
    least = {name: min(each[name] for each in (cold, warm)) for name in ("eager_ms", "compiled_ms")}
    found = {"config": config, **least, "gain": least["eager_ms"] / least["compiled_ms"]}
    return {**found, "cold_s": cold["compile_s"], "warm_s": warm["compile_s"], "was_cached": warm["was_cached"]}


def run(config, iterations, compile_, caches):
    """(CPU seconds, last validation loss, whether it was compiled) of a whole training command."""
    with tempfile.TemporaryDirectory() as out_dir:
        flags = [f"--max_iters={iterations}", f"--lr_decay_iters={iterations}", f"--compile={compile_}"]
        _, cpu_s = timed(["train.py", *config.split(), *flags, f"--out_dir={out_dir}"], caches)
        lines = (pathlib.Path(out_dir) / "metrics.jsonl").read_text().splitlines()
        record = json.loads((pathlib.Path(out_dir) / "run.json").read_text())
    return {"cpu_s": cpu_s, "val_loss": json.loads(lines[-1])["val_loss"], "compiled": record["compile"]}


def runs(config, seconds):
    """The row of a config and a length."""
    with tempfile.TemporaryDirectory() as known:
        timed(["-c", MEASURE, *config.split()], known)
        step_s = json.loads(timed(["-c", MEASURE, *config.split()], known)[0].splitlines()[-1])["eager_ms"] / 1e3
        iterations = round(seconds / step_s)
        row = {"config": config, "seconds": seconds, "iterations": iterations}
        with tempfile.TemporaryDirectory() as new:
            row |= {"eager": run(config, iterations, False, new), "auto, new": run(config, iterations, "auto", new)}
        return row | {"auto, cached": run(config, iterations, "auto", known)}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    found = map(costs, rest or CONFIGS) if what == "costs" else (runs(rest[0], float(each)) for each in rest[1:])
    for line in found:
        print(json.dumps(line), flush=True)
