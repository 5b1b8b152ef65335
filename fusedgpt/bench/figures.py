"""The figures of all benchmarks: ratios with their intervals, titled with the finding, readable on a phone and in grey.

A kernel has the same colour and mark in every figure.
"""

import pathlib
from collections.abc import Iterable

from fusedgpt.attention.table import KERNELS
from fusedgpt.bench.rows import Result
from fusedgpt.machine.files import atomic
from fusedgpt.runs import style
from fusedgpt.runs.style import DPI, WIDTH

DRAWN_AS = {"eager": "manual", "flash_attention_2": "flash3"}  # transformers' names for a kernel
PROJECTS = {"ours": "#009e73", "Hugging Face": "#e69f00", "nanoGPT": "#cc79a7"}
STYLE = {"font.size": 8.5, "axes.titlesize": 8.5, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3}
TICKS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


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


def lines_of(paths: list[pathlib.Path]) -> list[str]:
    """The lines of a report that show the PNG files among `paths`."""
    return [line for path in paths if path.suffix == ".png" for line in (f"![{path.stem}]({path.name})", "")]


def new(height: float, **options) -> tuple:
    """A new figure, `height` inches high without its title, and its axes as pyplot.subplots returns them.

    Closes all earlier figures.
    """
    from matplotlib import pyplot as plt

    plt.close("all")
    return plt.subplots(layout="constrained", figsize=(WIDTH, height), **options)


def milliseconds(ms: float) -> str:
    """A time with four digits, or all of its whole part."""
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}"


def bars(result: Result):
    """A line for each contender: its ratio with the interval, and its time."""
    names = [name for name in result.measured if result.ms(name)]
    figure, axes = new(0.30 * len(names) + 0.5)
    for n, name in enumerate(names):
        ratio, ms, look = result.ratio(name), result.ms(name)["median_ms"], color(name, result.measured[name])
        if ratio and ratio.known:
            axes.plot([ratio.low, ratio.high], [n, n], color=look, linewidth=2)
        axes.plot(ratio.times if ratio else 1.0, n, color=look, marker="o", markersize=4)
        text = f"{milliseconds(ms)} ms" + (f", {ratio.times:.3g}×" if ratio else "")
        axes.text(1.01, n, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    axes.axvline(1, color="0.2", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.08)
    axes.set_xlabel(f"times as fast as {result.baseline}{_interval([result])}")
    return figure


def lines(groups: dict[str, list[Result]], axis: str, label: str):
    """A panel for each group of comparisons that differ in `axis` alone: a line for each contender, with intervals."""
    across = min(2, len(groups))
    down = -(-len(groups) // across)
    figure, grid = new(2.0 * down + 0.3, nrows=down, ncols=across, squeeze=False, sharex=True, sharey=True)
    handles = {}
    for axes, (panel, group) in zip(grid.flat, groups.items()):
        for name in dict.fromkeys(name for result in group for name in result.measured):
            found = {result.of[axis]: result.ratio(name) for result in group}
            found = {x: ratio for x, ratio in sorted(found.items()) if ratio}
            if found:
                look = dict(color=color(name), marker=mark(name), markersize=4.5, linewidth=1.3, label=name)
                (handles[name],) = axes.plot(found.keys(), [ratio.times for ratio in found.values()], **look)
                for x, ratio in found.items():
                    if ratio.known:
                        axes.vlines(x, ratio.low, ratio.high, color=look["color"], linewidth=2.2, alpha=0.45)
        axes.axhline(1, color="0.2", linewidth=0.8, linestyle="--", zorder=0)
        axes.set_title(panel)
    results = [result for group in groups.values() for result in group]
    ticks = sorted({result.of[axis] for result in results})
    for axes in grid.flat:
        _doubling(axes, [x for x in ticks if x & (x - 1) == 0] or ticks)
    for axes in grid[-1]:
        axes.set_xlabel(label)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"times as fast as\n{results[0].baseline}{_interval(results)}")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _interval(results):
    """What the label of an axis says of intervals: nothing if there were too few laps for any."""
    return ", 95 % interval" if any(result.known for result in results) else ""


def _doubling(axes, ticks):
    """Make both axes logarithmic, with plain numbers."""
    if not axes.lines[1:]:  # nothing but the line at 1: a logarithmic axis without values cannot be drawn
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_ticks(ticks)
    low, high = axes.get_ylim()
    axes.yaxis.set_ticks([y for y in TICKS if low <= y <= high] or [1])
    axes.set_ylim(low, high)


def color(name: str, line: dict | None = None) -> str:
    """The colour of a contender: of its project, or of its kernel, by its name or by the attention in its line."""
    if project := next((PROJECTS[project] for project in PROJECTS if name.startswith(project)), None):
        return project
    return _kernel(name, line).color


def mark(name: str) -> str:
    """The mark of a contender's line."""
    return "*" if name.startswith("ours") else _kernel(name, None).mark


def _kernel(name, line):
    words = [(line or {}).get("ran", {}).get("attention", ""), name.partition(",")[0].partition(" +")[0]]
    known = [KERNELS[DRAWN_AS.get(word, word)] for word in words if DRAWN_AS.get(word, word) in KERNELS]
    return known[0] if known else KERNELS["sdpa"]
