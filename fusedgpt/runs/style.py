"""The look that figures share: colours, marks, the title above the axes, and the axis below a curve."""

import textwrap

from fusedgpt.runs.metrics import LoggedRun

AXES = ("iterations", "tokens", "time")
SUFFIXES = (".png", ".pdf", ".svg")
# Okabe and Ito's colours, which the colour-blind can tell apart; neighbours differ in lightness, so grey works too
COLOURS = ("#0072B2", "#E69F00", "#000000", "#CC79A7", "#D55E00", "#56B4E9", "#009E73")
MARKERS = "os^vDP*X"  # eight markers and seven colours give 56 runs a look of their own
WIDTH = 5.2  # inches: letters are large enough if a phone shrinks the figure to its own width
DPI = 320  # 1664 pixels: two for each that a README's column has
MARGIN = 0.08  # inches beside a title
TITLE, SUBTITLE = 54, 84  # letters of a line that fit: of English and settings, 1 line in 500 would fill 95 %
LINE = 0.135  # inches: height of a line of the subtitle
UNITS = (("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400))


def time_unit(runs: list[LoggedRun]) -> tuple[str, int]:
    """(name, seconds) of the largest unit of time that fits at least twice into the longest run."""
    longest = max(run.position(run.train["iter"][-1:] + 1, "time").max(initial=0) for run in runs)
    return max((unit for unit in UNITS if longest >= 2 * unit[1]), key=lambda unit: unit[1], default=UNITS[0])


def label_x(axes, x: str, unit: str) -> None:
    """Label the x-axis, one of AXES. unit: of time."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(f"training time ({unit})" if x == "time" else x, fontsize=8)
    if x == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 5k, 1.2M
    else:
        axes.ticklabel_format(axis="x", style="plain")


def title(figure, text: str, subtitle: list[str]) -> None:
    """Make room above the axes of a figure, and write a title and the paragraphs of a subtitle there."""
    above = textwrap.wrap(text, TITLE, break_on_hyphens=False)
    below = [line for paragraph in subtitle for line in textwrap.wrap(paragraph, SUBTITLE, break_on_hyphens=False)]
    room, before = 0.13 + 0.19 * len(above) + LINE * len(below), figure.get_figheight()
    height = before + room
    figure.set_figheight(height)
    figure.get_layout_engine().set(rect=(0, 0, 1, before / height))
    left, lower = MARGIN / WIDTH, 1 - (0.09 + 0.19 * len(above)) / height
    figure.text(left, 1 - 0.07 / height, plain("\n".join(above)), va="top", fontsize=10, weight="bold")
    figure.text(left, lower, plain("\n".join(below)), va="top", fontsize=7.5, color="0.3")


def plain(text: str) -> str:
    """`text` as matplotlib shows it unchanged: it reads text between two $ as a formula."""
    return text.replace("$", r"\$")
