"""The look of all figures: for the column of a README and for a phone, titled with the finding, and where it was found.

A kernel has the same colour and mark in every figure of kernels (numerics draws dtypes). Marks, hatches and lightness
differ too, so that figures can be read in grey.
"""

import pathlib
import textwrap
from collections.abc import Iterable
from math import inf

from fusedgpt.attention.table import KERNELS
from fusedgpt.bench.disturbance import comparable
from fusedgpt.bench.rows import unmeasured
from fusedgpt.machine.files import atomic
from fusedgpt.runs import style
from fusedgpt.runs.style import COLOURS, DPI, WIDTH

DRAWN_AS = {"eager": "manual", "flash_attention_2": "flash3"}  # transformers' names for a kernel
REASON, NAME = 60, 54  # most characters of a reason, and of a name above a bar; the report has them whole
HATCHES = ("", "///", "...", "xx", "\\\\", "")
FILLS = tuple(colour for colour in COLOURS if colour != "#000000")  # of pieces of bars, whose neighbours differ
STYLE = {"font.size": 8.5, "axes.titlesize": 8.5, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "hatch.linewidth": 0.6}
WHITE = dict(boxstyle="square,pad=0.1", facecolor="white", edgecolor="none")  # behind text, to hide what it stands on


def save(figures: Iterable[tuple], folder: pathlib.Path, machine: str, form: str = "svg") -> list[pathlib.Path]:
    """Save `figures`, each (name, title, subject, figure), as NAME.png and NAME.`form` in `folder`; returns all paths.

    Above each figure stand its title, its subject (what was measured) and `machine` (where, with what and when).
    """
    import matplotlib

    matplotlib.use("agg")
    paths = []
    with matplotlib.rc_context(STYLE):  # a generator draws while it is asked for the next figure
        for name, title, subject, figure in figures:
            style.title(figure, title, [subject, machine])
            for suffix in ("png", form):
                paths.append(folder / f"{name}.{suffix}")
                with atomic(paths[-1]) as file:
                    figure.savefig(file, format=suffix, dpi=DPI)
            _compress(folder / f"{name}.png")
    return paths


def _compress(path):
    """Reduce a PNG file to 256 colours, which makes it half as large."""
    from PIL import Image  # matplotlib needs it too

    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True, dpi=(DPI, DPI))


def shown(paths: list[pathlib.Path]) -> list[str]:
    """The lines of a report that show the PNG files among `paths`."""
    return [line for path in paths if path.suffix == ".png" for line in (f"![{path.stem}]({path.name})", "")]


def bar_style(n: int) -> dict:
    """The look of the n-th group of bars."""
    return dict(color=FILLS[n], edgecolor="white", hatch=HATCHES[n], linewidth=0.6)


def new(height: float, **options) -> tuple:
    """A new figure, `height` inches high without its title, and its axes as pyplot.subplots returns them.

    Closes all earlier figures.
    """
    from matplotlib import pyplot as plt

    plt.close("all")
    return plt.subplots(layout="constrained", figsize=(WIDTH, height), **options)


def left_out(rows: Iterable[dict]) -> str:
    """' Refused here: efficient (on GPUs only).': the rows that a figure does not show, and why; or nothing."""
    said = {}
    for (status, why), names in unmeasured(rows).items():
        status = "refused here" if status == "refused" else status
        short = textwrap.shorten(why, REASON, placeholder=" …")
        said.setdefault(status, []).append(f"{', '.join(names)} ({short})")
    return "".join(f" {status.capitalize()}: {'; '.join(each)}." for status, each in said.items())


def times(axes, rows: dict[str, dict], said: list[str], colors: list[str], limit: float = inf) -> None:
    """A horizontal bar for the median of each row, with its p10 to p90, under its name and its text of `said`.

    The bar of a disturbed row is hollow, and its text says so. A bar longer than `limit` is visibly cut; its text has
    the number. Rows that were not measured are left_out.
    """
    for n, (row, text, color) in enumerate(zip(rows.values(), said, colors)):
        calm, cut = comparable(row), row["median_ms"] > limit
        look = dict(color=color) if calm else dict(fill=False, edgecolor="black", linewidth=0.6)
        axes.barh(n, min(limit, row["median_ms"]), height=0.38, **look)
        if cut:
            at = [0.955 * limit, 0.97 * limit]
            axes.plot(at, [n + 0.3, n - 0.3], color="white", linewidth=4, solid_capstyle="butt")
        else:
            around = [[row["median_ms"] - row["p10_ms"]], [row["p90_ms"] - row["median_ms"]]]
            axes.errorbar(row["median_ms"], n, xerr=around, color="0.55", capsize=2, linewidth=1)
        where = dict(transform=axes.get_yaxis_transform(), ha="right", va="bottom", bbox=WHITE)
        axes.text(1, n - 0.24, text if calm else f"{text}, disturbed", **where)
    names = [name if len(name) <= NAME else f"…{name[1 - NAME :]}" for name in rows]
    for label in axes.set_yticks([n - 0.24 for n in range(len(rows))], names, ha="left", va="bottom"):
        label.label1.set_bbox(WHITE)
    axes.tick_params(axis="y", length=0, pad=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set(xlabel="ms: median, p10 to p90 (less is better)", xlim=(0, 1.02 * axes.dataLim.xmax))
    axes.set_ylim(len(rows) - 0.6, -0.85)


def line(axes, name: str, points: list[tuple], **options) -> None:
    """Draw the line of the kernel `name` in its usual look. points: (x, y, low, high); low and high may be None."""
    x, y, low, high = zip(*points)
    every = max(1, len(points) // 12)
    look = dict(color=color(name), marker=mark(name), markersize=4.5, linewidth=1.3, markevery=every, label=name)
    look |= options
    axes.plot(x, y, **look)
    if None not in low:
        axes.vlines(x, low, high, color=look["color"], linewidth=2.2, alpha=0.45)


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
