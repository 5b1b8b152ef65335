"""The figures of all benchmarks: ratios with their intervals, titled with the finding, readable on a phone and in grey.

A kernel has the same colour and mark in every figure.
"""

import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fusedgpt.attention.table import KERNELS
from fusedgpt.bench.rows import Result, family, panels
from fusedgpt.machine.files import atomic
from fusedgpt.runs import style
from fusedgpt.runs.style import DPI, WIDTH

DRAWN_AS = {"eager": "manual"}  # transformers' name for it
PROJECTS = {"ours": "#009e73", "Hugging Face": "#e69f00", "nanoGPT": "#cc79a7"}
STYLE = {"font.size": 8.5, "axes.titlesize": 8.5, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3}


class Drawn(NamedTuple):
    """A figure: the name of its files, its finding in a sentence, its results, and the function that draws it."""

    name: str
    finding: str
    results: list[Result]
    draw: Callable[[], Any]


def save(drawn: Iterable[Drawn], folder: pathlib.Path, about: Callable) -> list[pathlib.Path]:
    """Save figures as NAME.png and NAME.svg, titled with their finding and `about(results)`; returns all paths."""
    from matplotlib import rc_context

    paths = []
    with rc_context(STYLE):
        for each in drawn:
            figure = each.draw()
            style.title(figure, each.finding, about(each.results))
            for suffix in ("png", "svg"):
                paths.append(folder / f"{each.name}.{suffix}")
                with atomic(paths[-1]) as file:
                    figure.savefig(file, format=suffix, dpi=DPI)
    return paths


def new(height: float, **options) -> tuple:
    """A new figure, `height` inches high without its title, and its axes as Figure.subplots returns them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(**options)


def milliseconds(ms: float) -> str:
    """A time with four digits, or all of its whole part."""
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}"


def bars(result: Result):
    """A line for each contender: its ratio with the interval, and its time."""
    names = [name for name in result.measured if result.ms(name)]
    figure, axes = new(0.30 * len(names) + 0.5)
    for n, name in enumerate(names):
        ratio, look = result.ratio(name), color(name, result.measured[name])
        text = f"{milliseconds(result.ms(name)['median_ms'])} ms"
        if ratio:
            text += f", {ratio.times:.3g}×"
            axes.plot(ratio.times, n, color=look, marker="o", markersize=4)
            if ratio.known:
                axes.plot([ratio.low, ratio.high], [n, n], color=look, linewidth=2)
        axes.text(1.01, n, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    axes.axvline(1, color="0.2", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.08)
    axes.set_xlabel(_label([result]))
    return figure


def lines(results: list[Result]):
    """A panel for each group of comparisons that differ in T alone: a line for each contender, with intervals."""
    groups = panels(results)
    across = min(2, len(groups))
    down = -(-len(groups) // across)
    figure, grid = new(2.0 * down + 0.3, nrows=down, ncols=across, squeeze=False, sharex=True, sharey=True)
    handles = {}
    for axes, (panel, group) in zip(grid.flat, groups.items()):
        for name in dict.fromkeys(name for result in group for name in result.ratios):
            found = {result.workload["T"]: result.ratios[name] for result in group if name in result.ratios}
            found = dict(sorted(found.items()))
            look = dict(color=color(name), marker=mark(name), markersize=4.5, linewidth=1.3, label=name)
            (handles[name],) = axes.plot(found.keys(), [ratio.times for ratio in found.values()], **look)
            for T, ratio in found.items():
                if ratio.known:
                    axes.vlines(T, ratio.low, ratio.high, color=look["color"], linewidth=2.2, alpha=0.45)
        axes.axhline(1, color="0.2", linewidth=0.8, linestyle="--", zorder=0)
        axes.set_title(panel)
    ticks = sorted({result.workload["T"] for result in results})
    grid[0, 0].set_xscale("log", base=2)
    grid[0, 0].xaxis.set_major_formatter("{x:g}")
    grid[0, 0].xaxis.set_ticks([T for T in ticks if T.bit_count() == 1] or ticks)  # powers of two
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    for axes in grid[:, 0]:
        axes.set_ylabel(_label(results).replace("fast as ", "fast as\n"))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _label(results):
    """The label of the axis of ratios; it names intervals if there are any."""
    known = any(ratio.known for result in results for ratio in result.ratios.values())
    return f"times as fast as {results[0].baseline}" + ", 95 % interval" * known


def color(name: str, line: dict | None = None) -> str:
    """The colour of a contender: of its project, or of its kernel, by its name or by the attention in its line."""
    return PROJECTS.get(family(name)) or _kernel(name, line).color


def mark(name: str) -> str:
    """The mark of a contender's line."""
    return "*" if family(name) == "ours" else _kernel(name, None).mark


def _kernel(name, line):
    words = [(line or {}).get("ran", {}).get("attention", ""), family(name)]
    known = [KERNELS[DRAWN_AS.get(word, word)] for word in words if DRAWN_AS.get(word, word) in KERNELS]
    return known[0] if known else KERNELS["sdpa"]
