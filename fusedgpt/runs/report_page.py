"""Writes report.html in a run's folder: its curves, samples, kernel receipt and settings on one page."""

import dataclasses
import math
import os
import pathlib
import sys
import time

import numpy as np

from fusedgpt.attention.table import EXPANDED
from fusedgpt.errors import one_sentence
from fusedgpt.machine.files import atomic
from fusedgpt.runs.metrics import Run, number, section
from fusedgpt.runs.pages import charts, duration, fill, median, table, text
from fusedgpt.settings import Settings

TEMPLATE = pathlib.Path(__file__).with_suffix(".html")  # how the page looks; this file says what is on it
RELOAD = '<meta http-equiv="refresh" content="30">'
SAMPLES = 100  # the page has about this many, spread evenly over the run
DAY = 86400.0  # seconds


def write(out_dir: str | pathlib.Path, running: bool = False, parent: int | None = None) -> pathlib.Path:
    """Write report.html in the folder of a run, from its metrics.jsonl and run.json; return its path.

    running: the run goes on, so the page reloads itself every 30 seconds. run.json cannot tell: a resumed run has the
    times of an earlier start in it, and a killed run has none.
    parent: the id of the run's process, if this process is its child. A child writes nothing if its parent was killed,
    because the run may go on in another process with its own page, or if the folder is gone, which it would bring back.
    Damaged parts of those files are left out. Raises UserError if there is no metrics.jsonl, or the disk refuses.
    """
    run = Run(out_dir)
    content = fill(TEMPLATE, run.name, _page(run, running), RELOAD if running else "")
    path = run.folder / "report.html"
    if parent is not None and (os.getppid() != parent or not run.folder.is_dir()):
        return path
    with atomic(path, aside="" if parent is None else ".child") as file:
        file.write(content)
    return path


def _page(run, running):
    """What the template's script draws: texts, and curves whose numbers are all finite or null."""
    settings, steps = section(run.record, "settings"), run.train["iter"]
    planned, limit = number(settings.get("max_iters")), number(settings.get("max_seconds"))
    done = int(max([0, *(steps[-1:] + 1), *run.eval["iter"][-1:]]))
    left = median(run.train["ms"][-100:]) / 1e3 * (planned - done)
    unless = "" if math.isnan(limit) else f"; max_seconds={limit:g} may end it before"
    return {
        "name": run.name,
        "running": running,
        "written": time.time(),
        "patience": _patience(run, _since(run)),
        "done": done,
        "planned": None if math.isnan(planned) else planned,
        "left": f"about {duration(left)} of training left{unless}" if running and left > 0 else "",
        "tiles": _tiles(run),
        "attention": _attention(run.record),
        "axes": {"iterations": "iteration"},
        "charts": charts([run], "loss", {"iterations": 1}),
        "samples": _samples(run.samples),
        "tables": [each for each in _tables(run) if each["rows"]],
    }


def _samples(samples):
    """About SAMPLES of the samples, from iterations evenly over the run, with every prompt at each."""
    its = sorted({sample["iter"] for sample in samples})
    count = max(2, SAMPLES * len(its) // max(1, len(samples)))
    kept = {its[n] for n in np.linspace(0, len(its) - 1, count).astype(int)} if len(its) > count else {*its}
    return [sample for sample in samples if sample["iter"] in kept]


def _since(run):
    """Seconds since the previous page, or since this start of the run, which writes run.json first."""
    written = [path.stat().st_mtime for name in ("report.html", "run.json") if (path := run.folder / name).exists()]
    return max(0.0, time.time() - max(written)) if written else 0.0


def _patience(run, since):
    """Seconds without a newer page after which the run counts as killed.

    since: seconds from the previous page to this one, including the evaluation and the checkpoint in between.
    """
    if len(run.eval["iter"]) < 2:
        return DAY  # nobody knows yet how long the steps between two evaluations take
    before, last = run.position(run.eval["iter"][-2:], "time").tolist()
    return max(120.0, 5 * since, 5 * (last - before))


def _tiles(run):
    """The figures at the top of the page: [what, value, remark]."""
    tiles = []
    for column, what in (("val_loss", "validation loss"), ("val_bits_per_byte", "bits per byte")):
        values, iters = run.eval[column], run.eval["iter"]
        if np.isfinite(values).any():
            best = int(np.nanargmin(values))
            last = f"{values[-1]:.4f}" if math.isfinite(values[-1]) else "not finite"
            lowest = f"lowest {values[best]:.4f} at {iters[best]:,.0f}"
            tiles.append([what, last, "the lowest" if best == len(values) - 1 else lowest])
        elif len(values) and column == "val_loss":
            tiles.append([what, "not finite", "in every evaluation"])
    speed, mfu, memory = (median(run.train[name]) for name in ("tokens_per_s", "mfu", "peak_memory"))
    ms = run.train["ms"]
    if math.isfinite(speed):
        tiles.append(["tokens per second", f"{speed:,.0f}", f"median; {median(ms):,.4g} ms a step"])
    if math.isfinite(mfu):
        tiles.append(["MFU", f"{100 * mfu:.1f} %", section(run.record, "mfu").get("peak_source", "")])
    if math.isfinite(memory):
        tiles.append(["peak memory", f"{np.nanmax(run.train['peak_memory']) / 2**30:.2f} GiB", "of a process"])
    if np.nansum(ms) > 0:
        tiles.append(["training time", duration(float(np.nansum(ms)) / 1e3), "of the steps alone"])
    return [[text(each) for each in tile] for tile in tiles]


def _tables(run):
    """Tables of texts: title, whether it is open, the heads of its columns, its rows."""
    record, settings = run.record, section(run.record, "settings")
    defaults, environment = dataclasses.asdict(Settings()), section(record, "environment")
    changed = [[n, v, defaults[n]] for n, v in settings.items() if n in defaults and v != defaults[n]]
    memory = number(environment.get("memory"))
    machine = {"device": record.get("device"), "dtype": record.get("dtype"), "compiled": record.get("compile")}
    machine |= {"processes": record.get("world_size"), "hardware": environment.get("device")}
    machine |= {n: v for n, v in environment.items() if n not in ("device", "memory")}
    machine |= {"memory": f"{memory / 2**30:.0f} GiB" if memory > 0 else None}
    model = section(record, "model") | {
        n.replace("_", " "): f"{number(record.get(n)):,.0f}"
        for n in ("parameters", "parameters_in_products", "tokens_per_step")
        if number(record.get(n)) >= 0
    }
    operators = section(record, "receipt").get("ops")
    times = {n: f"{number(v):,.4g}" for n, v in section(record, "time").items()}
    return [
        table("What the profiler saw of attention", [["operators", operators]] if operators else []),
        table("Settings that are not the default", changed, ["setting", "value", "default"], open=True),
        table("All settings", settings.items(), ["setting", "value"]),
        table("Model", model.items()),
        table("Machine", ((n, v) for n, v in machine.items() if v is not None)),
        table("Times of the steps", times.items()),
    ]


def _attention(record):
    """What the page says of the kernel: what was asked for, ran and was seen, and what auto timed, fastest first."""
    receipt, asked = section(record, "receipt"), section(record, "settings").get("attention")
    rows = {"asked for": asked, "ran": record.get("attention")}
    rows |= {"forward seen": receipt.get("forward"), "backward seen": receipt.get("backward")}
    rows |= {"grouped queries": EXPANDED} if receipt.get("expanded") is True else {}
    trials = {n: trial for n, trial in section(record, "attention_trials").items() if isinstance(trial, dict)}
    times = {name: number(trial.get("median_ms")) for name, trial in trials.items()}
    timed = sorted((name for name, ms in times.items() if ms > 0), key=times.__getitem__)
    refused = {}
    for name, trial in trials.items():
        if trial.get("refused"):
            refused.setdefault(text(trial["refused"]), []).append(name)
    return {
        "receipt": [[what, text(value)] for what, value in rows.items() if value],
        "timed": [[name, times[name]] for name in timed],
        "refused": [f"{', '.join(names)}: {why}" for why, names in refused.items()],
    }


if __name__ == "__main__":  # a long run's logger gives OUT_DIR, whether the run goes on, and its process id
    with one_sentence():
        out_dir, running, parent = sys.argv[1:]
        write(out_dir, running == "True", int(parent))
