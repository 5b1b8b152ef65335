"""How the figures of all kinds look. Lines differ in marks and bars in hatching, so that they can be read in grey."""

import pathlib
from collections.abc import Iterable

from fusedgpt.bench.disturbance import comparable

MARKS = {"manual": "o", "math": "s", "efficient": "^", "flash": "D", "cudnn": "v", "flex": "P", "eager": "o"}
MARKS |= {"blocked": "p", "masked": "X", "flash3": "<", "flash4": ">"}
HATCHES = ("", "///", "...", "xx", "\\\\")
GREYS = ("0.35", "0.75", "0.55", "0.9", "0.65")


def save(figures: Iterable[tuple], folder: pathlib.Path) -> list[pathlib.Path]:
    """Save (name, figure) pairs as PNG files in `folder`; their paths."""
    import matplotlib

    matplotlib.use("agg")
    paths = []
    for name, figure in figures:
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def new(**options) -> tuple:
    """A new figure and its axes, as pyplot.subplots returns them; all earlier figures are closed."""
    from matplotlib import pyplot as plt

    plt.close("all")
    return plt.subplots(layout="constrained", **options)


def bar_style(n: int) -> dict:
    """The look of the n-th group of bars."""
    return dict(color=GREYS[n], edgecolor="black", hatch=HATCHES[n], linewidth=0.6)


def hollow(bars: Iterable, rows: Iterable[dict]) -> None:
    """Draw only the outline of those `bars` whose rows were disturbed."""
    for bar, row in zip(bars, rows):
        if not comparable(row):
            bar.set(fill=False, edgecolor="black", linewidth=0.6)


def mark(attention: str) -> str:
    """The mark of an attention kernel's line."""
    return MARKS.get(attention, "x")
