"""Writes the page of a run, report.html in its folder, or one page of several runs: curves, samples, settings."""

import dataclasses
import math
import pathlib
import time

import numpy as np

from fusedgpt.errors import shown
from fusedgpt.machine.files import atomic
from fusedgpt.runs.metrics import MEANING, Run, above, losses_in, names_of, number, section, thinned, view
from fusedgpt.runs.pages import fill
from fusedgpt.runs.style import time_unit
from fusedgpt.settings import Settings
from fusedgpt.terminal import in_words

RELOAD = '<meta http-equiv="refresh" content="30">'
NO_SCRIPT = "<noscript><p>This page needs JavaScript; its figures are in metrics.jsonl and run.json too.</p></noscript>"
SAMPLES = 100  # a page has about this many of a run, spread evenly over it
POINTS = 600  # of a line, about
PLACES = ("out_dir", "wandb_run_name", "init_from")  # settings that say where a run is, and not what it is
COMPARED = ("dataset", "mask", "eval_iters", "batch_size")  # settings that decide what a validation loss means


def write(out_dir: str | pathlib.Path, running: bool = False) -> pathlib.Path:
    """Write report.html in the folder of a run, from its metrics.jsonl and run.json; return its path.

    running: the run goes on, so the page reloads itself every 30 seconds. run.json cannot tell: a resumed run has the
    times of an earlier start in it, and a killed run has none.
    Damaged parts of those files are left out. Raises UserError if there is no metrics.jsonl, or the disk refuses.
    """
    run = Run(out_dir)
    content = fill(run.name, NO_SCRIPT, _page([run], "loss") | {"state": _state(run, running)}, RELOAD * running)
    path = run.folder / "report.html"
    with atomic(path) as file:
        file.write(content)
    return path


def compare(runs: list[Run], path: pathlib.Path) -> None:
    """Write a page with several runs beside each other to the file `path`.

    Raises UserError if their tokenizers differ and a run has no bits per byte, or if the disk refuses.
    """
    loss = losses_in(runs)
    content = fill(f"{len(runs)} runs", NO_SCRIPT, _page(runs, loss) | {"headline": headline(runs, loss)})
    with atomic(path) as file:
        file.write(content)


def headline(runs: list[Run], loss: str) -> str:
    """Which of several runs ends lowest, and what makes their last losses differ: the iteration, or COMPARED settings.

    loss: as losses_in(runs).
    """
    unit = "bits per byte" if loss == "bits_per_byte" else "nats per token"
    ends = {name: end for name, run in zip(names_of(runs), runs) if math.isfinite(end := _end(run, loss))}
    if len(ends) < 2:
        return "Fewer than two of these runs have been evaluated."
    lowest = min((f"{end:.4f}" for end in ends.values()), key=float)
    best = [name for name, end in ends.items() if f"{end:.4f}" == lowest]
    if len(best) == len(runs):
        said = f"All runs end at {lowest} {unit}."
    else:
        said = f"{' and '.join(best)} end{'s' * (len(best) == 1)} lowest, at {lowest} {unit}."
    evaluated = [run for run in runs if math.isfinite(_end(run, loss))]
    after = [f"{run.eval['iter'][-1]:,.0f}" for run in evaluated]
    if len(set(after)) > 1:
        said += f" But they were last evaluated after {', '.join(after[:-1])} and {after[-1]} iterations."
    settings = [section(run.record, "settings") for run in evaluated]
    found = {name: {str(each[name]) for each in settings if name in each} for name in COMPARED}
    if differ := [name for name, values in found.items() if len(values) > 1]:
        said += f" But they were evaluated with different {' and '.join(differ)}, so these losses may not compare."
    return said


def _end(run, loss):
    values = run.eval["val_bits_per_byte" if loss == "bits_per_byte" else "val_loss"]
    return float(values[-1]) if len(values) else math.nan


def _page(runs, loss):
    """What page.js draws: texts, and curves whose numbers are all finite or null."""
    unit, seconds = time_unit(runs)
    axes, scales = {"iterations": "iteration", "time": unit}, {"iterations": 1.0, "time": seconds}
    if all(run.tokens_per_step > 0 for run in runs):
        axes["tokens"], scales["tokens"] = "tokens", 1.0
    others = sorted({name for run in runs for name in run.others})
    small = [y for y in (*MEANING, *others) if y not in ("loss", "bits_per_byte")]
    charts = [_chart(runs, y, scales) for y in (loss, *small)]
    known = [chart for chart in charts[1:] if any(set(line["y"]) - {None} for line in chart["lines"])]
    return {
        "runs": names_of(runs),
        "state": None,
        "headline": "",
        "axes": axes,
        "charts": [charts[0], *known],
        "samples": [{"run": n, **sample} for n, run in enumerate(runs) for sample in _samples(run.samples)],
        "summary": [
            _table("Results", map(_results, runs), runs, open=True),
            _table("Attention", [_attention(run.record) for run in runs], runs, open=True),
        ],
        "tables": _tables(runs),
    }


def _state(run, running):
    """What the run was doing when the page was written, and how far it was."""
    settings = section(run.record, "settings")
    planned, limit = number(settings.get("max_iters")), number(settings.get("max_seconds"))
    done = int(max([0, *(run.train["iter"][-1:] + 1), *run.eval["iter"][-1:]]))
    seconds, now = _median(run.train["ms"][-100:]) / 1e3 * (planned - done), "Stopped"
    said = [f"iteration {done:,} of {planned:,.0f}".replace(" of nan", "")]
    if running:
        now = "Running"
    elif done >= planned:
        now = "Finished"
    if running and seconds > 0:
        ends = "" if math.isnan(limit) else f"; max_seconds={limit:g} may end it before"
        said.append(f"about {in_words(seconds)} of training left{ends}")
    said.append(time.strftime("written on %Y-%m-%d at %H:%M %Z"))
    return {"now": now, "said": " · ".join(said), "done": done, "planned": float(np.nan_to_num(planned))}


def _chart(runs, y, scales):
    """The lines of `y`: the values of each at its places on all axes."""
    lines, drawn = [(n, line) for n, run in enumerate(runs) for line in run.lines(y)], []
    both = [line for _, line in lines]
    seen = view(both, y)
    for n, line in lines:
        kept = thinned(line.values, POINTS)
        x = {axis: _json(runs[n].position(line.iters[kept], axis) / scale) for axis, scale in scales.items()}
        drawn.append({"run": n, "name": line.name, "x": x, "y": _json(line.values[kept])})
    return {"title": MEANING.get(y, y), "range": seen, "above": above(both, seen), "lines": drawn}


def _json(values):
    """`values` with six digits: null in place of NaN, and whole numbers in full."""
    rounded = [float(f"{value:.6g}") if value % 1 else value for value in values.tolist()]
    return [None if math.isnan(value) else value for value in rounded]


def _samples(samples):
    """About SAMPLES of the samples, from iterations evenly over the run, with every prompt at each."""
    its = sorted({sample["iter"] for sample in samples})
    count = min(len(its), max(2, SAMPLES * len(its) // max(1, len(samples))))
    kept = {its[n] for n in np.linspace(0, len(its) - 1, count).astype(int)}
    return [sample for sample in samples if sample["iter"] in kept]


def _results(run):
    """What a run has reached, as {what: text}."""
    found, train = {}, run.train
    for column, what in (("val_loss", "validation loss"), ("val_bits_per_byte", "bits per byte")):
        values = run.eval[column]
        if np.isfinite(values).any():
            best = int(np.nanargmin(values))
            found[what] = f"{values[-1]:.4f}".replace("nan", "not finite")
            found[f"lowest {what}"] = f"{values[best]:.4f} at {run.eval['iter'][best]:,.0f}"
    memory, seconds = np.nanmax(train["peak_memory"], initial=-math.inf) / 2**30, float(np.nansum(train["ms"])) / 1e3
    figures = {
        "tokens per second": (_median(train["tokens_per_s"]), "{:,.0f}"),
        "ms a step": (_median(train["ms"]), "{:,.4g}"),
        "MFU": (_median(train["mfu"]), "{:.1%}"),
        "peak memory of a process": (memory, "{:.2f} GiB"),
    }
    found |= {what: form.format(value) for what, (value, form) in figures.items() if value > 0}
    return found | ({"time of the steps": in_words(seconds)} if seconds > 0 else {})


def _attention(record):
    """What was asked for, ran and was seen by the profiler, and what auto timed, the fastest first."""
    receipt, trials = section(record, "receipt"), section(record, "attention_trials")
    said = {"asked for": section(record, "settings").get("attention"), "ran": record.get("attention")}
    said |= {"forward seen": receipt.get("forward"), "backward seen": receipt.get("backward")}
    trials = {name: trial for name, trial in trials.items() if isinstance(trial, dict)}
    times = {name: number(trial.get("median_ms")) for name, trial in trials.items()}
    timed = sorted((name for name in times if times[name] > 0), key=times.__getitem__)
    said |= {f"auto: {name}": f"{times[name]:.4g} ms" for name in timed}
    return said | {f"auto: {name}": trial["refused"] for name, trial in trials.items() if trial.get("refused")}


def _tables(runs):
    several, records = len(runs) > 1, [run.record for run in runs]
    settings = [section(record, "settings") for record in records]
    if several:
        chosen = [{n: v for n, v in each.items() if n not in PLACES} for each in settings]
        changed = _table("Settings that differ", chosen, runs, differing=True, open=True)
    else:
        defaults = {n: v for n, v in dataclasses.asdict(Settings()).items() if n in settings[0]}
        changed = _table("Settings that are not the default", [*settings, defaults], runs, differing=True, open=True)
        changed["head"] = ["", "value", "default"]
    parts = {"Run": [{n: v for n, v in record.items() if not isinstance(v, dict)} for record in records]}
    for name in ("model", "environment", "receipt", "time"):
        parts[name.capitalize()] = [section(record, name) for record in records]
    others = [_table(title, each, runs, differing=several, open=several) for title, each in parts.items()]
    return [changed, _table("All settings", settings, runs), *others]


def _table(title, columns, runs, differing=False, open=False):
    """Rows of texts: a name, then its value in each column. differing: only those that are not the same in all."""
    columns = list(columns)
    rows = [
        [name, *("" if column.get(name) is None else _text(column[name]) for column in columns)]
        for name in dict.fromkeys(name for column in columns for name in column)
    ]
    rows = [row for row in rows if any(row[1:]) and (not differing or len(set(row[1:])) > 1)]
    return {"title": title, "open": open, "head": ["", *names_of(runs)] if len(runs) > 1 else [], "rows": rows}


def _text(value):
    """A value of run.json, of at most some 1,000 characters."""
    values = value if isinstance(value, list) else [value]
    said = ", ".join(shown(each) if not isinstance(each, str) or each.isspace() else each for each in values)
    return said if len(said) <= 1000 else f"{said[:1000]}…"


def _median(values):
    """The median of the finite values; NaN if there is none."""
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan
