"""The figures of a study: each has its finding as its title, and what was measured below it."""

import io
import math
import textwrap
from collections.abc import Iterator

import numpy as np

from fusedgpt.runs import style
from fusedgpt.runs.style import COLOURS, DPI, MARKERS, WIDTH, plain
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.words import WHAT, headline, number, what, word

STYLE = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
STYLE |= {"grid.alpha": 0.3, "legend.frameon": False, "legend.fontsize": 8}
# TrueType: conferences refuse matplotlib's default, Type 3. The same figure has the same bytes
STYLE |= {"pdf.fonttype": 42, "svg.hashsalt": "study", "svg.fonttype": "none"}
UNDATED = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
WORDS = {"better": (COLOURS[6], "o"), "worse": (COLOURS[4], "X")}  # colour and mark of a verdict; otherwise grey
NO_WORD = ("0.45", "s")
MOST_ROWS = 40  # of the figure of differences; the table has them all


def saved(figure: object, form: str) -> bytes:
    """A figure as a png, pdf or svg, the same bytes each time."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(file, format=form, dpi=DPI, metadata=UNDATED[form])
    return file.getvalue()


def svg(figure: object) -> str:
    """A figure as a part of a page."""
    text = saved(figure, "svg").decode()
    return text[text.index("<svg") :]


def draw(results: Results) -> Iterator[tuple[str, object]]:
    """The figures, each with a name for its files. What cannot be drawn is left out."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        if any(o.status == "finished" for o in results.outcomes):
            yield "curves_iterations", curves(results)
        if any(c.n for c in results.comparisons):
            yield "differences", differences(results)


def _new(height, title, subject, results):
    """A figure and its axes, with its finding as its title, and its subject and what to know below that."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    style.title(figure, title, [subject, *(f"Note: {each}" for each in results.warnings()[:3])])
    return figure, figure.subplots()


def curves(results: Results) -> object:
    """The loss of each variant: the mean over its seeds in a band from the lowest to the highest seed."""
    column, y = "val_loss", WHAT["val_loss"]
    if results.design.metric == "bits_per_byte":
        column, y = "val_bits_per_byte", WHAT["bits_per_byte"]
    subject = f"{y} against iterations; line: mean over seeds, band: lowest to highest seed"
    figure, axes = _new(3.3, headline(results), subject, results)
    tops = []
    for n, name in enumerate(results.design.variants):
        runs = [o for o in results.outcomes if o.variant == name and o.status == "finished"]
        if not runs:
            continue
        fewest = min(len(o.evals(column)) for o in runs)
        at, losses = runs[0].evals("iter")[:fewest], np.array([o.evals(column)[:fewest] for o in runs])
        look = dict(color=COLOURS[n % len(COLOURS)], linewidth=1.3)
        mark = dict(marker=MARKERS[n % len(MARKERS)], markersize=4, markevery=max(1, len(at) // 12))
        axes.plot(at, losses.mean(axis=0), label=f"\u200b{_fit(name, 30)} ({len(losses)})", **look, **mark)
        axes.fill_between(at, losses.min(axis=0), losses.max(axis=0), color=look["color"], alpha=0.18, linewidth=0)
        tops += losses.mean(axis=0)[max(1, fewest // 10) :].tolist()  # the fall at the start would hide the rest
    if np.isfinite(tops).any():
        axes.set_ylim(top=float(np.nanmax(tops)) * 1.02)
    axes.set(xlabel="iterations", ylabel=y)
    axes.grid(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _fit(name, width):
    """A variant's name in at most two lines."""
    return plain("\n".join(textwrap.wrap(name, width, max_lines=2, placeholder="…")))


def differences(results: Results) -> object:
    """The difference of each variant to the baseline, with its interval, in the order of the design."""
    plan = results.design
    found = [c for c in results.comparisons if c.n][:MOST_ROWS]
    subject = f"difference in {what(plan)} to {plan.baseline}, over pairs of equal seeds; 95 % intervals;"
    subject += f" {len(found)} of {len(results.comparisons)} variants"
    figure, axes = _new(0.5 + 0.24 * len(found), headline(results), subject, results)
    for row, each in enumerate(found):
        color, mark = WORDS.get(each.word, NO_WORD) if each.planned else NO_WORD
        if not math.isnan(each.low):
            axes.plot([each.low, each.high], [row, row], color=color, linewidth=2.2, solid_capstyle="butt")
        axes.plot([each.mean], [row], color=color, marker=mark, markersize=5)
        said = f"{number(each.mean, 3, '+')}  {word(each)}".replace("-", "−")
        axes.annotate(said, (1.02, row), xycoords=("axes fraction", "data"), va="center", color=color, fontsize=8)
    axes.axvline(0, color="0.3", linewidth=0.9)
    axes.set(ylim=(len(found) - 0.5, -0.5), xlabel=f"difference in {what(plan)}: left is better")
    axes.set_yticks(range(len(found)), [_fit(each.variant, 26) for each in found], fontsize=8)
    axes.locator_params(axis="x", nbins=5)  # numbers of tokens are long
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    return figure
