"""The figures of a study, as PNG, PDF and SVG: each has its finding as its title, and what was measured below it."""

import math
import pathlib
import textwrap
from collections.abc import Iterator

from fusedgpt.machine.files import atomic
from fusedgpt.runs import style
from fusedgpt.runs.style import COLOURS, DPI, MARKERS, SUFFIXES, WIDTH, label_x, plain, time_unit
from fusedgpt.studies import drawn
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.words import decimals, head, headline, labels, shown, summaries, what, without_value, word

STYLE = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
STYLE |= {"grid.alpha": 0.3, "legend.frameon": False, "legend.fontsize": 8}
STYLE |= {"pdf.fonttype": 42}  # TrueType: conferences refuse matplotlib's default, Type 3
WORDS = {"better": (COLOURS[6], "o"), "worse": (COLOURS[4], "X")}  # colour and mark of a verdict; otherwise grey
NO_WORD = ("0.45", "s")
MOST_ROWS = 60  # of the figure of differences; the table has them all
OTHERS = "0.8"  # colour of variants that have none of their own
PALEST = "#cfe0ef"  # of the scale from there to the darkest, which is the best


def write(results: Results, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw all figures that make sense for these results to `folder`; returns their paths.

    Raises UserError if the disk refuses.
    """
    from matplotlib import rc_context

    paths = []
    with rc_context(STYLE):
        for name, figure in draw(results):
            for suffix in SUFFIXES:
                paths.append(folder / f"{name}{suffix}")
                with atomic(paths[-1]) as file:
                    figure.savefig(file, format=suffix[1:], dpi=DPI)
    return paths


def draw(results: Results) -> Iterator[tuple[str, object]]:
    """The figures, each with a name for its files. What cannot be drawn, or says nothing, is left out."""
    found = drawn.curves(results)
    for axis in drawn.axes_of(found):
        yield f"curves_{axis}", curves(results, found, axis)
    if any(each.tested for each in results.comparisons()):
        yield "differences", differences(results)
    axes = drawn.coordinates(results)
    if len(axes) > 2 and len(axes[-1].at) > 1:  # two settings and the value
        yield "settings", settings(results, axes)
    shares = drawn.importance(results)
    if len(shares) > 1:
        yield "importance", importance(results, shares)


def _new(height, title, subject):
    """A figure and its axes, with its finding as its title, and its subject below that."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    style.title(figure, title, [subject])
    return figure, figure.subplots()


def _fit(name, width):
    """A variant's name in at most two lines."""
    return plain("\n".join(textwrap.wrap(name, width, max_lines=2, placeholder="…")))


def _runs(results):
    """'9 runs', or '8 of 9 runs' while some have no value."""
    every, known = len(results.outcomes), sum(len(each) for each in results.values().values())
    return f"{every} runs" if known == every else f"{known} of {every} runs"


def curves(results: Results, found: list[drawn.Curve], axis: str) -> object:
    """The loss of each variant: the mean over its seeds in a band from the lowest to the highest seed."""
    mine, names = drawn.coloured(results), labels(results.design)
    y = drawn.curves_show(results)
    against = "training time, without evaluations" if axis == "time" else axis
    band = f"line: mean over seeds, band: lowest to highest seed{drawn.cut_off(found)}"
    subject = f"{y} against {against}; {band}; {_runs(results)}"
    figure, axes = _new(3.3, drawn.curves_title(results, found), subject)
    bottom, top = drawn.loss_view(found)
    unit, scale = time_unit(drawn.runs_in(results)) if axis == "time" else ("", 1)
    for curve in sorted(found, key=lambda each: each.variant in mine):  # the pale ones lie below
        n = mine.get(curve.variant)
        color, mark = (OTHERS, "") if n is None else (COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)])
        at = curve.x[axis] / scale
        if curve.status != "finished":
            last = max(i for i, value in enumerate(curve.mean) if math.isfinite(value))
            axes.plot(at, curve.mean, color=color, linestyle=":", linewidth=1.1)
            axes.plot(at[last], min(curve.mean[last], top), "x", color=color, markersize=5, clip_on=False)
            continue
        look = dict(color=color, marker=mark, markersize=4, linewidth=1.3, markevery=max(1, len(at) // 12))
        axes.plot(at, curve.mean, label=_legend(curve, names, n), **look)
        if curve.runs > 1 and n is not None:
            axes.fill_between(at, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
    axes.set_ylim(bottom, top)
    label_x(axes, axis, unit)
    axes.set_ylabel(y)
    axes.grid(True)
    _add_legend(figure, axes, found, results)
    return figure


def _legend(curve, names, n):
    seeds = f"{curve.runs} seed{'s' * (curve.runs != 1)}"
    # the legend omits names that begin with _
    return "_" if n is None else f"\u200b{_fit(names[curve.variant], 34)} ({seeds})"


def _add_legend(figure, axes, found, results):
    from matplotlib.lines import Line2D

    handles, texts = axes.get_legend_handles_labels()
    extra = {
        "others": (dict(color=OTHERS), any(each.variant not in drawn.coloured(results) for each in found)),
        "diverged": (dict(color="0.3", linestyle=":", marker="x"), any(each.status == "diverged" for each in found)),
        "pruned": (dict(color="0.3", linestyle=":", marker="x"), any(each.status == "pruned" for each in found)),
    }
    for name, (look, needed) in extra.items():
        if needed:
            handles.append(Line2D([], [], linewidth=1.1, **look))
            texts.append(name)
    longest = max((len(line) for text in texts for line in text.split("\n")), default=0)
    columns = 3 if longest <= 20 else 2 if longest <= 34 else 1
    title = plain(head(results.design)) or None
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, title=title, title_fontsize=8)


def differences(results: Results) -> object:
    """The difference of each variant to the baseline, with its interval, in the order of the verdict."""
    comparisons, names = [each for each in results.comparisons() if each.n], labels(results.design)
    kept, (left, right) = comparisons[:MOST_ROWS], drawn.extent(comparisons)
    plan, places = results.design, decimals(summaries(results))
    baseline = f" ({head(plan)}: {names[plan.baseline]})" if head(plan) else f", {plan.baseline}"
    subject = f"difference in {what(plan)} to the baseline{baseline}, over pairs of equal seeds; 95 % intervals"
    if len(kept) < len(comparisons):
        subject += f"; the first {len(kept)} of {len(comparisons)} variants"
    figure, axes = _new(0.5 + 0.24 * len(kept), headline(results), f"{subject}; {_runs(results)}")
    for row, each in enumerate(kept):
        color, mark = WORDS.get(word(each), NO_WORD)
        if not math.isnan(each.low):
            axes.plot([each.low, each.high], [row, row], color=color, linewidth=2.2, solid_capstyle="butt")
        if left <= each.mean <= right:
            axes.plot([each.mean], [row], color=color, marker=mark, markersize=5)
        else:  # beyond the edge
            edge, arrow = (left, "<") if each.mean < 0 else (right, ">")
            axes.plot([edge], [row], color=color, marker=arrow, markersize=6, clip_on=False)
        said = f"{shown(each.mean, places, '+')}  {word(each)}".replace("-", "−")
        axes.annotate(said, (1.02, row), xycoords=("axes fraction", "data"), va="center", color=color, fontsize=8)
    axes.axvline(0, color="0.3", linewidth=0.9)
    axes.set(xlim=(left, right), ylim=(len(kept) - 0.5, -0.5), xlabel=f"difference in {what(plan)}: left is better")
    axes.set_yticks(range(len(kept)), [_fit(names[each.variant], 26) for each in kept], fontsize=8)
    axes.locator_params(axis="x", nbins=5)  # numbers of tokens are long
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    return figure


def settings(results: Results, axes_found: list[drawn.Axis]) -> object:
    """Parallel coordinates: a line for each variant through its settings to its value; the darker, the better."""
    from matplotlib.colors import LinearSegmentedColormap

    value = axes_found[-1].at
    best, worst = min(value, key=value.get), {each.variant for each in summaries(results) if each.stand_ins}
    dotted = f"dotted: a run {without_value(results.design)}"
    subject = f"{len(value)} variants, a line each, the darker the better; {dotted}; {_runs(results)}"
    figure, axes = _new(2.7, drawn.settings_title(results), subject)
    colour = LinearSegmentedColormap.from_list("", [COLOURS[0], PALEST])
    for variant in sorted(value, key=value.get, reverse=True):  # the best lies on top
        y = [each.at[variant] for each in axes_found]
        look = dict(linestyle=":" if variant in worst else "-", linewidth=2.4 if variant == best else 1.5)
        axes.plot(range(len(y)), y, color=colour(value[variant]), **look)
    for n, each in enumerate(axes_found):
        axes.axvline(n, color="0.3", linewidth=0.8)
        for place, text in each.ticks:
            box = dict(boxstyle="square,pad=0.1", facecolor="white", edgecolor="none", alpha=0.75)
            where = dict(textcoords="offset points", va="center", fontsize=7.5, bbox=box)
            axes.annotate(plain(text), (n, place), (4, 0), **where)
    axes.set_xticks(range(len(axes_found)), [textwrap.fill(plain(each.name), 20) for each in axes_found])
    axes.set(yticks=[], ylim=(-0.06, 1.06), xlim=(-0.15, len(axes_found) - 0.6))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure


def importance(results: Results, shares: dict[str, float]) -> object:
    """The share of the variance between variants that each setting explains alone."""
    subject = f"{drawn.importance_subject(results, shares)}; {_runs(results)}"
    figure, axes = _new(0.45 + 0.28 * len(shares), drawn.importance_title(shares), subject)
    axes.barh(range(len(shares)), [100 * share for share in shares.values()], height=0.62, color=COLOURS[0])
    for row, share in enumerate(shares.values()):
        axes.annotate(
            f"{100 * share:.0f} %", (100 * share, row), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(shares)), [plain(name) for name in shares])
    axes.set(xlim=(0, 108), ylim=(len(shares) - 0.5, -0.5), xlabel="share of the variance (%)")
    axes.set_xticks(range(0, 101, 20))
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    return figure
