"""Writes the page of a run, report.html in its folder, or one page of several runs: curves, receipts, samples."""

import html
import math
import pathlib
import string
import time

import numpy as np

from fusedgpt.machine.files import atomic
from fusedgpt.runs.metrics import MEANING, LoggedRun, above, losses_in, median, names_of, number, section, thinned, view
from fusedgpt.runs.style import time_unit
from fusedgpt.settings import Settings
from fusedgpt.terminal import in_words

RELOAD = '<meta http-equiv="refresh" content="30">'
SAMPLED = 50  # a page has the samples of about this many iterations, spread evenly over the run
POINTS = 600  # of a line, about
PLACES = ("out_dir", "wandb_run_name", "init_from")  # settings that say where a run is, and not what it is
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 60, 470, 8, 190, 212  # of the axes in a chart, and its height


def fill(title: str, body: str, refresh: str = "") -> bytes:
    """A page with the HTML `body`: one file with its style, which has no script and loads nothing."""
    page, style = (pathlib.Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    text = string.Template(page).substitute(title=html.escape(title), refresh=refresh, style=style, body=body)
    return text.encode("utf-8", "replace")  # a folder's name may not be UTF-8


def write(out_dir: str | pathlib.Path, running: bool = False) -> pathlib.Path:
    """Write report.html in the folder of a run, from its metrics.jsonl and run.json; return its path.

    running: the run goes on, so the page reloads itself every 30 seconds. run.json cannot tell: a resumed run has the
    times of an earlier start in it, and a killed run has none. Raises UserError if there is no metrics.jsonl, or the
    disk refuses.
    """
    run = LoggedRun(out_dir)
    path = run.folder / "report.html"
    with atomic(path) as file:
        file.write(fill(run.name, _state(run, running) + _body([run], "loss"), RELOAD * running))
    return path


def compare(runs: list[LoggedRun], path: pathlib.Path) -> None:
    """Write a page with several runs beside each other to the file `path`. Raises UserError if the disk refuses."""
    loss = losses_in(runs)
    lead = f"<p class='lead'>{html.escape(headline(runs, loss))}</p>"
    with atomic(path) as file:
        file.write(fill(f"{len(runs)} runs", lead + _body(runs, loss)))


def headline(runs: list[LoggedRun], loss: str) -> str:
    """Which of several runs ends lowest, and whether they were last evaluated at different iterations."""
    unit = "bits per byte" if loss == "bits_per_byte" else "nats per token"
    column, ends = "val_bits_per_byte" if loss == "bits_per_byte" else "val_loss", {}
    for name, run in zip(names_of(runs), runs):
        if np.isfinite(run.eval[column][-1:]).sum():
            ends[name] = f"{run.eval[column][-1]:.4f}", f"{run.eval['iter'][-1]:,.0f}"
    if len(ends) < 2:
        return "Fewer than two of these runs end with a loss that is finite."
    lowest = min((end for end, _ in ends.values()), key=float)
    best = [name for name, (end, _) in ends.items() if end == lowest]
    said = f"{' and '.join(best)} end{'s' * (len(best) == 1)} lowest, at {lowest} {unit}."
    after = [after for _, after in ends.values()]
    if len(set(after)) > 1:
        said += f" But they were last evaluated after {', '.join(after[:-1])} and {after[-1]} iterations."
    return said


def about(run: LoggedRun) -> str:
    """What a reader needs to judge a figure: machine, model, batch, versions, date. Unknown parts are left out."""
    record, settings = run.record, section(run.record, "settings")
    environment, model = section(record, "environment"), section(record, "model")
    parameters, tokens = np.nan_to_num([number(record.get("parameters")), run.tokens_per_step])
    said = [
        ("{} ({})", record.get("device"), environment.get("device")),
        ("{}", record.get("dtype")),
        ("attention {}", record.get("attention")),
        ("layers × channels: {} × {}", model.get("n_layer"), model.get("n_embd")),
        ("{:,.0f} parameters", parameters),
        ("{:,.0f} tokens a step", tokens),
        ("optimizer {}", settings.get("optimizer")),
        ("torch {}", environment.get("torch")),
        ("commit {}", environment.get("commit")),
        ("{}", record.get("date")),  # not that of a file, which a copy or a clone may change
    ]
    return ", ".join(form.format(*values) for form, *values in said if all(values))


def _state(run, running):
    """What the run was doing when the page was written, and how far it was."""
    planned = number(section(run.record, "settings").get("max_iters"))
    done = int(max([0, *(run.train["iter"][-1:] + 1), *run.eval["iter"][-1:]]))
    now = "Running" if running else "Finished" if done >= planned else "Stopped"
    said = f"<b>{now}</b> · iteration {done:,} of {planned:,.0f} · written on {time.strftime('%Y-%m-%d at %H:%M %Z')}"
    return f"<p>{said}</p><progress max='{planned}' value='{done}'></progress>"


def _body(runs, loss):
    names, several = [html.escape(name) for name in names_of(runs)], len(runs) > 1
    settings = [section(run.record, "settings") for run in runs]
    if several:
        made = [f"<p>{_mark(n)}<b>{name}</b>, {html.escape(about(runs[n]))}</p>" for n, name in enumerate(names)]
        title, settings = "Settings that differ", [{n: v for n, v in s.items() if n not in PLACES} for s in settings]
    else:
        made = [f"<p class='muted'>{html.escape(about(runs[0]))}</p>"]
        title, settings = "Settings", [{n: v for n, v in settings[0].items() if v != getattr(Settings, n, None)}]
    tables = [
        _table("Results", [_results(run) for run in runs], names),
        _table("Attention", [_attention(run.record) for run in runs], names),
        _table(title, settings, names, differing=several),
    ]
    others = sorted({name for run in runs for name in run.others})
    charts = [_chart(runs, loss, "iterations"), *[_chart(runs, loss, "time")] * several]
    charts += [_chart(runs, y, "iterations") for y in (*MEANING, *others) if y not in ("loss", "bits_per_byte")]
    columns = [f"<section class='columns'>{''.join(each)}</section>" for each in (tables, charts)]
    return "\n".join([*made, *columns, *_samples(runs, names)])


def _mark(n, look=""):
    return f'<i class="{look}" style="--mine: var(--c{n % 7})"></i>'


def _chart(runs, y, axis):
    """A figure of `y` over iterations or time: a grid with its numbers, and a path for each line."""
    unit, scale = time_unit(runs) if axis == "time" else ("iterations", 1)
    lines = [(n, line) for n, run in enumerate(runs) for line in run.lines(y)]
    shown = [line for _, line in lines]
    if not any(np.isfinite(line.values).any() for line in shown):
        return ""
    places = [runs[n].position(line.iters, axis) / scale for n, line in lines]
    (low, high), last = view(shown, y), max(x.max(initial=0) for x in places) or 1
    drawn, ends, is_loss = [], [], y in ("loss", "bits_per_byte")
    for value in _ticks(low, high):
        at = TOP + (BOTTOM - TOP) * (high - value) / (high - low)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:,.9g}</text>')
    for value in _ticks(0, last):
        at = LEFT + (RIGHT - LEFT) * value / last
        drawn.append(f'<text x="{at:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{value:,.9g}</text>')
    for (n, line), x in zip(lines, places):
        kept = thinned(line.values, POINTS)
        across = LEFT + (RIGHT - LEFT) * x[kept] / last
        down = TOP + (BOTTOM - TOP) * (high - line.values[kept]) / (high - low)
        pale = "pale" * (is_loss and line.name == "training")
        d = _path(across, np.clip(down, TOP - 4, BOTTOM))  # what is above the view runs along its edge
        drawn.append(f'<path class="line {pale}" style="--mine: var(--c{n % 7})" d="{d}"/>')
        if is_loss and line.name == "validation" and np.isfinite(line.values).any():
            lowest = np.nanargmin(line.values[kept])
            drawn.append(f'<circle cx="{across[lowest]:.1f}" cy="{down[lowest]:.1f}" r="4" fill="var(--c{n % 7})"/>')
        if len(line.values) and not (pale and len(runs) > 1):
            end = float(f"{line.values[-1]:.4g}")  # 64,120 is 64,100, and not 6.412e+04
            ends.append(f"{_mark(n, pale)}{line.name * (is_loss and len(runs) == 1)} <b>{end:,.9g}</b>")
    top = above(shown, (low, high))
    cut = f"<small> ▲ up to {top:.3g} above</small>" if top else ""
    caption = f"<b>{html.escape(MEANING.get(y, y))}</b> over {unit}{cut}<br>{''.join(ends)}"
    svg = f'<svg viewBox="0 0 480 {HEIGHT}" role="img">{"".join(drawn)}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"


def _ticks(low, high):
    """Round numbers from `low` to `high`, at most five."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return step * np.arange(math.ceil(low / step), math.floor(high / step) + 1)


def _path(across, down):
    """The line through points of an SVG, in which NaN is a gap."""
    points, pen = [], "M"
    for x, y in zip(across, down):
        if math.isnan(y):
            pen = "M"
        else:
            points.append(f"{pen}{x:.1f} {y:.1f}h0")  # h0: a point between two gaps is a dot
            pen = "L"
    return "".join(points)


def _samples(runs, names):
    """The samples of the runs side by side, the latest first and open."""
    its = sorted({sample["iter"] for run in runs for sample in run.samples}, reverse=True)
    for it in its[:: 1 + len(its) // SAMPLED]:
        cards = []
        for n, run in enumerate(runs):
            head = f"{_mark(n)}{names[n]}" * (len(runs) > 1)
            for sample in run.samples:
                if sample["iter"] == it:
                    text = f"<b>{html.escape(sample['prompt'])}</b>{html.escape(sample['text'])}"
                    cards.append(f"<div>{head}<pre>{text}</pre></div>")
        is_open = " open" * (it == its[0])
        summary = f"<summary>What it writes after {it:,} iterations</summary>"
        yield f"<details{is_open}>{summary}<div class='columns'>{''.join(cards)}</div></details>"


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
        "tokens per second": (median(train["tokens_per_s"]), "{:,.0f}"),
        "ms a step": (median(train["ms"]), "{:,.4g}"),
        "MFU": (median(train["mfu"]), "{:.1%}"),
        "peak memory of a process": (memory, "{:.2f} GiB"),
    }
    found |= {what: form.format(value) for what, (value, form) in figures.items() if value > 0}
    return found | ({"time of the steps": in_words(seconds)} if seconds > 0 else {})


def _attention(record):
    """What was asked for, ran and was seen by the profiler, and what auto timed, the fastest first."""
    receipt, trials = section(record, "receipt"), section(record, "attention_trials")
    said = {"asked for": section(record, "settings").get("attention"), "ran": record.get("attention")}
    said |= {"forward seen": receipt.get("forward"), "backward seen": receipt.get("backward")}
    times = {name: trial["median_ms"] for name, trial in trials.items() if trial.get("median_ms")}
    said |= {f"auto: {name}": f"{times[name]:.4g} ms" for name in sorted(times, key=times.get)}
    return said | {f"auto: {name}": trial["refused"] for name, trial in trials.items() if trial.get("refused")}


def _table(title, columns, names, differing=False):
    """A row for each name in the columns, dicts of the runs. differing: only those that are not the same in all."""
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = [_text(column.get(name)) for column in columns]
        if any(cells) and not (differing and len(set(cells)) == 1):
            rows.append([_text(name), *cells])
    if len(names) > 1:
        rows.insert(0, ["", *names])
    body = "".join(f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, *cells in rows)
    return f"<div class='card scroll'><b>{title}</b><table>{body}</table></div>"


def _text(value):
    """A name or value of run.json as HTML that a phone may break after _ and /, and nowhere within a word."""
    if value is None:
        return ""
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    text = html.escape(str(value) if str(value).strip() else repr(value))
    return text.replace("_", "_<wbr>").replace("/", "/<wbr>")
