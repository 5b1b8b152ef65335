"""The look of all figures: as wide as the column of a README, titled with what was measured, where and when.

A kernel has the same colour and mark in every figure of kernels (numerics draws dtypes). Marks and hatches differ, so
that figures can be read in grey.
"""

import pathlib
import textwrap
from collections.abc import Iterable
from math import inf

from fusedgpt.attention.table import KERNELS
from fusedgpt.bench.disturbance import comparable
from fusedgpt.runs import style
from fusedgpt.runs.style import WIDTH

DRAWN_AS = {"eager": "manual", "flash_attention_2": "flash3"}  # transformers' names for a kernel
REASON = 60  # most characters of a reason in place of a bar; the report has the whole reason
HATCHES = ("", "///", "...", "xx", "\\\\", "")
GREYS = ("0.35", "0.75", "0.55", "0.9", "0.65", "1.0")
STYLE = {"font.size": 8.5, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "hatch.linewidth": 0.6}


def save(figures: Iterable[tuple], folder: pathlib.Path, machine: str, form: str = "png") -> list[pathlib.Path]:
    """Save `figures`, each (name, title, subject, figure), as files NAME.`form` in `folder`; returns their paths.

    Above each figure stand its title, its subject (what was measured) and `machine` (where, with what and when).
    """
    import matplotlib

    matplotlib.use("agg")
    paths = []
    with matplotlib.rc_context(STYLE):  # a generator draws while it is asked for the next figure
        for name, title, subject, figure in figures:
            style.title(figure, title, [line for text in (subject, machine) for line in textwrap.wrap(text, 100)])
            paths.append(folder / f"{name}.{form}")
            figure.savefig(paths[-1], dpi=130)
    return paths


def bar_style(n: int) -> dict:
    """The look of the n-th group of bars."""
    return dict(color=GREYS[n], edgecolor="black", hatch=HATCHES[n], linewidth=0.6)


def new(height: float, **options) -> tuple:
    """A new figure, `height` inches high without its title, and its axes as pyplot.subplots returns them.

    Closes all earlier figures.
    """
    from matplotlib import pyplot as plt

    plt.close("all")
    return plt.subplots(layout="constrained", figsize=(WIDTH, height), **options)


def reason(text: str, limit: int = REASON) -> str:
    """The reason why a row has no measurement, cut at a space to at most `limit` characters."""
    return textwrap.shorten(text, limit, placeholder=" …")


def times(axes, names: list[str], rows: list[dict], said: list[str], colors: list[str], limit: float = inf) -> None:
    """A horizontal bar for the median of each row, with its p10 to p90, and its text of `said` to the right.

    The bar of a disturbed row is hollow, and its text says so. A row that was not measured has the beginning of its
    text in place of a bar. A bar longer than `limit` is visibly cut; its text has the number.
    """
    axes.set_yticks(range(len(rows)), names, fontsize=7.5)
    for n, (row, text, color) in enumerate(zip(rows, said, colors)):
        end = 0
        if row["status"] == "measured":
            cut = row["median_ms"] > limit
            look = dict(color=color)
            if not comparable(row):
                look, text = dict(fill=False, edgecolor="black", linewidth=0.6), f"{text}, disturbed"
            axes.barh(n, limit if cut else row["median_ms"], height=0.65, **look)
            if cut:
                end = limit
                at = [0.955 * limit, 0.97 * limit]
                axes.plot(at, [n + 0.45, n - 0.45], color="white", linewidth=5, solid_capstyle="butt")
            else:
                around = [[row["median_ms"] - row["p10_ms"]], [row["p90_ms"] - row["median_ms"]]]
                axes.errorbar(row["median_ms"], n, xerr=around, color="0.3", capsize=2, linewidth=1)
                end = min(row["p90_ms"], limit)
        box = dict(boxstyle="square,pad=0.1", facecolor="white", edgecolor="none")
        style = dict(textcoords="offset points", va="center", fontsize=8, bbox=box)
        drawn = axes.annotate(text if end else reason(text), (end, n), (4, 0), **style)
        drawn.set_in_layout(bool(end))  # a long reason must not take room from the bars
    axes.invert_yaxis()
    axes.set(xlabel="ms: median, p10 to p90 (less is better)", xlim=(0, 1.22 * axes.dataLim.xmax))


def line(axes, name: str, points: list[tuple], **options) -> None:
    """Draw the line of the kernel `name` in its usual look. points: (x, y, low, high); low and high may be None."""
    x, y, low, high = zip(*points)
    every = max(1, len(points) // 12)
    look = dict(color=color(name), marker=mark(name), markersize=4.5, linewidth=1.3, markevery=every, label=name)
    axes.plot(x, y, **look | options)
    if None not in low:
        axes.vlines(x, low, high, color=color(name), linewidth=2.2, alpha=0.45)


def doubling(axis: str, *all_axes, ticks: Iterable[float] | None = None) -> None:
    """Make the x or y axes logarithmic, with ticks that double and are plain numbers."""
    for axes in all_axes:
        if not axes.has_data():  # all rows are disturbed: a logarithmic axis without values cannot be drawn
            continue
        getattr(axes, f"set_{axis}scale")("log", base=2)
        which = getattr(axes, f"{axis}axis")
        which.set_major_formatter("{x:g}")
        if ticks:
            which.set_ticks(list(ticks))


def color(attention: str) -> str:
    """The colour of an attention kernel."""
    return _kernel(attention).color


def mark(attention: str) -> str:
    """The mark of an attention kernel's line."""
    return _kernel(attention).mark


def _kernel(attention):
    return KERNELS.get(DRAWN_AS.get(attention, attention), KERNELS["sdpa"])
