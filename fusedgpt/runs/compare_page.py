"""Writes a page with several runs side by side: curves, final figures, differences, receipts and samples."""

import math
import pathlib

import numpy as np

from fusedgpt.machine.files import atomic
from fusedgpt.runs.metrics import Run, losses_in, names_of, number, section
from fusedgpt.runs.pages import charts, duration, fill, median, table, text
from fusedgpt.runs.style import time_unit

TEMPLATE = pathlib.Path(__file__).with_suffix(".html")  # how the page looks; this file says what is on it
POINTS = 500  # of a line
PLACES = ("out_dir", "wandb_run_name", "init_from")  # settings that say where a run is, and not what it is


def write(runs: list[Run], path: pathlib.Path) -> None:
    """Write the page of the `runs` to the file `path`.

    Raises UserError if their tokenizers differ and a run has no bits per byte, or if the disk refuses.
    """
    names = names_of(runs)
    content = fill(TEMPLATE, " and ".join(names) if len(names) < 4 else f"{len(names)} runs", _page(runs, names))
    with atomic(path) as file:
        file.write(content)


def _page(runs, names):
    """What the template's script draws: texts, and curves whose numbers are all finite or null."""
    loss = losses_in(runs)
    unit, seconds = time_unit(runs)
    scales, axes = {"iterations": 1.0}, {"iterations": "iteration"}
    if any(np.nansum(run.train["ms"]) > 0 for run in runs):
        scales["time"], axes["time"] = seconds, unit
    if all(run.tokens_per_step > 0 for run in runs):
        scales["tokens"], axes["tokens"] = 1.0, "tokens"
    ends = [_end(run, loss) for run in runs]
    compared = "validation loss" if loss == "loss" else "bits per byte"
    return {
        "runs": names,
        "headline": headline(runs, loss),
        "axes": axes,
        "charts": charts(runs, loss, scales, POINTS),
        "head": ["run", compared, "lowest", "tokens/s", "ms a step", "training time", "memory"],
        "ends": [_figures(run, end, loss) for run, end in zip(runs, ends)],
        "samples": _samples(runs),
        "tables": [each for each in _tables(runs, names) if each["rows"]],
    }


def _validation(run, loss):
    return run.eval["val_bits_per_byte" if loss == "bits_per_byte" else "val_loss"]


def _end(run, loss):
    return float(_validation(run, loss)[-1]) if len(run.eval["iter"]) else math.nan


def headline(runs: list[Run], loss: str) -> str:
    """Which of several runs ends lowest, and whether their last losses are of one iteration, data, mask and windows.

    loss: as losses_in(runs).
    """
    names, ends = names_of(runs), [_end(run, loss) for run in runs]
    unit = "bits per byte" if loss == "bits_per_byte" else "nats per token"
    known = [(f"{end:.4f}", name) for end, name in zip(ends, names) if math.isfinite(end)]
    if len(known) < 2:
        return "Fewer than two of these runs have been evaluated."
    lowest = min((end for end, _ in known), key=float)
    best = [name for end, name in known if end == lowest]
    if len(best) == len(runs):
        said = f"All runs end at {lowest} {unit}"
    else:
        said = f"{' and '.join(best)} end{'s' * (len(best) == 1)} lowest, at {lowest} {unit}"
    said += "."
    after = [f"{run.eval['iter'][-1]:,.0f}" for run, end in zip(runs, ends) if math.isfinite(end)]
    if len(set(after)) > 1:
        said += f" But they were last evaluated after {', '.join(after[:-1])} and {after[-1]} iterations."
    settings = [section(run.record, "settings") for run, end in zip(runs, ends) if math.isfinite(end)]
    for name, differs in (("dataset", "on different data"), ("mask", "with different masks")):
        found = {str(each.get(name)) for each in settings} - {"None"}
        if len(found) > 1:
            said += f" But they were evaluated {differs}, {' and '.join(sorted(found))}: such losses do not compare."
    windows = {number(each.get("eval_iters")) * number(each.get("batch_size")) for each in settings}
    numbers = [f"{n:,.0f}" if n else "all" for n in sorted(windows) if math.isfinite(n)]
    if len(numbers) > 1:
        said += f" But they were evaluated on {' and '.join(numbers)} windows: small differences may come from that."
    return said


def _figures(run, end, loss):
    """The row of a run in the table at the top, as texts under `head`, without its name."""
    values, iters = _validation(run, loss), run.eval["iter"]
    lowest = ""
    if np.isfinite(values).any():
        best = int(np.nanargmin(values))
        lowest = f"{values[best]:.4f} at {iters[best]:,.0f}"
    memory = np.nanmax(run.train["peak_memory"], initial=-math.inf) / 2**30
    speed, ms, total = (median(run.train["tokens_per_s"]), median(run.train["ms"]), float(np.nansum(run.train["ms"])))
    return [
        f"{end:.4f}" if math.isfinite(end) else "not finite" if len(values) else "",
        lowest,
        f"{speed:,.0f}" if math.isfinite(speed) else "",
        f"{ms:,.4g}" if math.isfinite(ms) else "",
        duration(total / 1e3) if total > 0 else "",
        f"{memory:.2f} GiB" if memory > 0 else "",
    ]


def _samples(runs):
    """{prompt: the last sample of each run from it}, or None for a run that has none. Each is [iteration, text]."""
    last = [{sample["prompt"]: [sample["iter"], sample["text"]] for sample in run.samples} for run in runs]
    return [[prompt, [each.get(prompt) for each in last]] for prompt in dict.fromkeys(p for each in last for p in each)]


def _tables(runs, names):
    records = [run.record for run in runs]
    settings = [{n: v for n, v in section(record, "settings").items() if n not in PLACES} for record in records]
    became = [{n: record.get(n) for n in ("device", "dtype", "compile", "world_size")} for record in records]
    machine = [{n: v for n, v in section(record, "environment").items() if n != "memory"} for record in records]
    receipts = [section(record, "receipt") for record in records]
    attention = [
        {"asked for": section(record, "settings").get("attention"), "ran": record.get("attention")}
        | {"forward seen": receipt.get("forward"), "backward seen": receipt.get("backward")}
        for record, receipt in zip(records, receipts)
    ]
    timed = [
        {
            name: f"{number(trial.get('median_ms')):.4g} ms"
            for name, trial in section(record, "attention_trials").items()
            if isinstance(trial, dict) and number(trial.get("p10_ms")) > 0
        }
        for record in records
    ]
    sizes = [{n.replace("_", " "): record.get(n) for n in ("parameters", "tokens_per_step")} for record in records]
    return [
        table("Settings that differ", _beside(settings, differing=True), ["setting", *names], open=True),
        table(
            "What auto became, and the machine, where they differ",
            _beside([{**a, **b, **c} for a, b, c in zip(became, sizes, machine)], differing=True),
            ["", *names],
            open=True,
        ),
        table("Attention: the receipts", _beside(attention), ["", *names], open=True),
        table("What auto timed", _beside(timed), ["kernel", *names]),
        table("All settings", _beside(settings), ["setting", *names]),
    ]


def _beside(columns, differing=False):
    """Rows of a table: a name, then its value in each column; if `differing`, only those that are not all the same."""
    rows = [
        [name, *(text(column[name]) if column.get(name) is not None else "" for column in columns)]
        for name in dict.fromkeys(name for column in columns for name in column)
    ]
    return [row for row in rows if any(row[1:]) and (not differing or len(set(row[1:])) > 1)]
