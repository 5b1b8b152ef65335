"""The figures of a study: each has its finding as its title, and what was measured below it."""

import io
import math
import textwrap
from collections.abc import Iterator
from typing import IO

import numpy as np

from fusedgpt.runs import style
from fusedgpt.runs.style import COLOURS, DPI, MARKERS, UNITS, WIDTH, plain
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.words import WHAT, decimals, headline, labels, shown, what, word

STYLE = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
STYLE |= {"grid.alpha": 0.3, "legend.frameon": False, "legend.fontsize": 8}
# TrueType: conferences refuse matplotlib's default, Type 3. The same figure has the same bytes
STYLE |= {"pdf.fonttype": 42, "svg.hashsalt": "study", "svg.fonttype": "none"}
WORDS = {"better": (COLOURS[6], "o"), "worse": (COLOURS[4], "X")}  # colour and mark of a verdict; otherwise grey
NO_WORD = ("0.45", "s")
MOST_ROWS = 40  # of the figure of differences; the table has them all


def save(figure: object, file: IO, form: str) -> None:
    """Write a figure to an open file as png, pdf or svg, the same bytes each time."""
    from matplotlib import rc_context

    dated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form)
    with rc_context(STYLE):
        figure.savefig(file, format=form, dpi=DPI, metadata=dated)


def svg(figure: object) -> str:
    """A figure as a part of a page."""
    text = io.StringIO()
    save(figure, text, "svg")
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def draw(results: Results) -> Iterator[tuple[str, object]]:
    """The figures, each with a name for its files. What cannot be drawn is left out."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        found = _curves(results)
        if found:
            yield "curves_iterations", curves(results, found, dict.fromkeys(found, 1.0), "iterations")
            seconds = {name: results.ms(name) / 1e3 for name in found}
            longest = max(seconds[name] * iters[-1] for name, (iters, _) in found.items())
            if math.isfinite(longest):
                unit, size = max((u for u in UNITS if longest >= 2 * u[1]), key=lambda u: u[1], default=UNITS[0])
                scale = {name: each / size for name, each in seconds.items()}
                yield "curves_time", curves(results, found, scale, f"training time ({unit})")
        if any(c.n for c in results.comparisons):
            yield "differences", differences(results)


def _curves(results):
    """{variant: (iterations, losses of its runs)} over the runs that finished."""
    column, found = "val_bits_per_byte" if results.design.metric == "bits_per_byte" else "val_loss", {}
    for name in results.design.variants:
        runs = [o for o in results.outcomes if o.variant == name and o.status == "finished"]
        runs = [o for o in runs if len(o.evals(column)) and np.isfinite(o.evals(column)).any()]
        if runs:
            fewest = min(len(o.evals(column)) for o in runs)
            found[name] = runs[0].evals("iter")[:fewest], np.array([o.evals(column)[:fewest] for o in runs])
    return found


def _new(height, title, subject, results):
    """A figure and its axes, with its finding as its title, and its subject and what to know below that."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    notes = results.warnings()
    more = [f"Note: {notes[0]}" + (f" (and {len(notes) - 1} more)" if len(notes) > 1 else "")] if notes else []
    style.title(figure, title, [subject, *more])
    return figure, figure.subplots()


def curves(results: Results, found: dict, scale: dict[str, float], label: str) -> object:
    """The loss of each variant: the mean over its seeds in a band from the lowest to the highest seed."""
    names, mean = labels(results.design), {name: each.mean(axis=0) for name, (_, each) in found.items()}
    best = min(mean, key=lambda name: mean[name][-1])
    y = WHAT["bits_per_byte" if results.design.metric == "bits_per_byte" else "val_loss"]
    subject = f"{y} against {label}; line: mean over seeds, band: lowest to highest seed"
    title = f"{names[best]} ends lowest, at {shown(float(mean[best][-1]), 4)}"
    figure, axes = _new(3.3, title, subject, results)
    for n, (name, (iters, losses)) in enumerate(found.items()):
        look = dict(color=COLOURS[n % len(COLOURS)], linewidth=1.3)
        at = iters * scale[name]
        mark = dict(marker=MARKERS[n % len(MARKERS)], markersize=4, markevery=max(1, len(at) // 12))
        axes.plot(at, mean[name], label=f"\u200b{_fit(names[name], 34)} ({len(losses)})", **look, **mark)
        axes.fill_between(at, losses.min(axis=0), losses.max(axis=0), color=look["color"], alpha=0.18, linewidth=0)
    late = [each[max(1, len(each) // 10) :] for each in mean.values()]  # the fall at the start would hide the rest
    top = max(float(np.nanmax(each)) for each in late if len(each)) if any(map(len, late)) else None
    axes.set_ylim(top=top * 1.02 if top else None)
    axes.set(xlabel=label, ylabel=y)
    axes.grid(True)
    handles, texts = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, texts)) <= 34 else 1
    figure.legend(handles, texts, loc="outside lower center", ncols=columns)
    return figure


def _fit(name, width):
    """A variant's name in at most two lines."""
    return plain("\n".join(textwrap.wrap(name, width, max_lines=2, placeholder="…")))


def differences(results: Results) -> object:
    """The difference of each variant to the baseline, with its interval, in the order of the design."""
    found, names, plan = [c for c in results.comparisons if c.n], labels(results.design), results.design
    kept, places = found[:MOST_ROWS], decimals(results)
    subject = f"difference in {what(plan)} to {names[plan.baseline]}, over pairs of equal seeds; 95 % intervals"
    subject += f"; the first {len(kept)} of {len(found)} variants" * (len(kept) < len(found))
    figure, axes = _new(0.5 + 0.24 * len(kept), headline(results), subject, results)
    for row, each in enumerate(kept):
        color, mark = WORDS.get(each.word, NO_WORD) if each.planned else NO_WORD
        if not math.isnan(each.low):
            axes.plot([each.low, each.high], [row, row], color=color, linewidth=2.2, solid_capstyle="butt")
        axes.plot([each.mean], [row], color=color, marker=mark, markersize=5)
        said = f"{shown(each.mean, places, '+')}  {word(each)}".replace("-", "−")
        axes.annotate(said, (1.02, row), xycoords=("axes fraction", "data"), va="center", color=color, fontsize=8)
    axes.axvline(0, color="0.3", linewidth=0.9)
    axes.set(ylim=(len(kept) - 0.5, -0.5), xlabel=f"difference in {what(plan)}: left is better")
    axes.set_yticks(range(len(kept)), [_fit(names[each.variant], 26) for each in kept], fontsize=8)
    axes.locator_params(axis="x", nbins=5)  # numbers of tokens are long
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    return figure
