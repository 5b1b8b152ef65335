"""What the figures and the page of a study draw: numbers only, so that both draw the same."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusedgpt.runs.metrics import LARGEST, Line, Run, number, section, thinned, view
from fusedgpt.runs.style import AXES, COLOURS
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.verdict import Comparison
from fusedgpt.studies.words import WHAT, decimals, shown, summaries, what, without_value

LEVELS = 10  # a setting with more values is drawn on a scale
BINS = 4  # and is divided into so many ranges where values are counted
TRAINED = ("finished", "not reached")  # statuses of runs that trained to their end
FAR = 3.0  # a difference from stand-ins that reaches so many times as far as the others is cut


@dataclasses.dataclass
class Curve:
    """The validation loss of a variant, over the seeds that trained to their end; or of one run that did not."""

    variant: str
    status: str  # finished, diverged or pruned
    runs: int
    x: dict[str, np.ndarray]  # {one of AXES: where each evaluation is}; NaN if a run does not say
    mean: np.ndarray
    low: np.ndarray  # of the runs
    high: np.ndarray


def curves(results: Results) -> list[Curve]:
    """A curve for each variant, then one for each run that diverged or was pruned. Runs that go on have none."""
    column = "val_bits_per_byte" if results.design.metric == "bits_per_byte" else "val_loss"
    ended = [o for o in results.outcomes if o.run and len(o.run.eval["iter"]) and np.isfinite(o.run.eval[column]).any()]
    found = []
    for variant in results.design.variants:
        runs = [o.run for o in ended if o.variant == variant and o.status in TRAINED]
        if runs:
            found.append(_curve(variant, "finished", runs, column))
    return found + [
        _curve(o.variant, o.status, [o.run], column) for o in ended if o.status in ("diverged", "pruned") and o.run
    ]


def _curve(variant, status, runs, column):
    # Evaluations are averaged in their order. Runs of equal minutes have unequal numbers of them: the last ones, which
    # the verdict is about, are averaged in any case
    shared = min(len(run.eval["iter"]) for run in runs)
    chosen = [[*range(shared - 1), -1] for _ in runs]
    values = np.array([run.eval[column][n] for run, n in zip(runs, chosen)])
    x = {axis: np.mean([_position(run, axis)[n] for run, n in zip(runs, chosen)], axis=0) for axis in AXES}
    return Curve(variant, status, len(runs), x, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _position(run, axis):
    if axis == "tokens":
        return run.eval["iter"] * run.tokens_per_step  # NaN if run.json does not say
    return run.position(run.eval["iter"], axis)


def axes_of(found: list[Curve]) -> list[str]:
    """Those of AXES on which all curves are known, and not all at 0."""
    ends = {axis: [curve.x[axis][-1] for curve in found] for axis in AXES}
    return [axis for axis in AXES if np.isfinite(ends[axis]).all() and any(ends[axis])]


def runs_in(results: Results) -> list[Run]:
    """All runs that have a curve."""
    return [o.run for o in results.outcomes if o.run and o.status in (*TRAINED, "diverged", "pruned")]


def curves_show(results: Results) -> str:
    """What the curves of a study are of."""
    return WHAT["bits_per_byte" if results.design.metric == "bits_per_byte" else "val_loss"]


def curves_title(results: Results, found: list[Curve]) -> str:
    """What the curves show, in a sentence."""
    ended = [each for each in found if each.status == "finished" and math.isfinite(each.mean[-1])]
    if not ended:
        return "No run has finished"
    places = decimals(summaries(results)) if results.design.metric in ("val_loss", "bits_per_byte") else 4
    names, lowest = _lowest({each.variant: float(each.mean[-1]) for each in ended}, places)
    return f"{_and(names)} end{'s' * (len(names) == 1)} lowest, at {lowest}"


def settings_title(results: Results) -> str:
    """What the parallel coordinates show, in a sentence."""
    found = [each for each in summaries(results) if not math.isnan(each.mean)]
    names, lowest = _lowest({each.variant: each.mean for each in found}, decimals(found))
    return f"The lowest mean, {lowest}, is that of {_and(names)}"


def _lowest(means, places):
    """The variants whose mean is the lowest as far as it is shown, and how it is shown."""
    lowest = shown(min(means.values()), places)
    return [name for name, mean in means.items() if shown(mean, places) == lowest], lowest


def _and(names):
    return " and ".join(names) if len(names) < 3 else f"{len(names)} variants"


def importance_title(found: dict[str, float]) -> str:
    """What the importance of settings shows, in a sentence."""
    first = next(iter(found))
    return f"{first} explains {100 * found[first]:.0f} % of the variance between the variants"


def importance_subject(results: Results, found: dict[str, float]) -> str:
    """What the importance of settings is."""
    worst, left_out = sum(each.stand_ins > 0 for each in summaries(results)), ""
    if worst:
        left_out = f"; left out: {worst} variant{'s' * (worst > 1)} with a run that {without_value(results.design)}"
    rest = "the rest is what settings do together, and noise"
    overlap = "settings that vary together share what they explain"
    return (
        f"share of the variance of the mean {what(results.design)} that the means over a setting's values explain; "
        + (rest if sum(found.values()) < 1 else overlap)
        + left_out
    )


def thin(curve: Curve, limit: int) -> Curve:
    """The curve with at most about `limit` points."""
    kept = thinned(curve.mean, limit)
    cut = {name: getattr(curve, name)[kept] for name in ("mean", "low", "high")}
    return dataclasses.replace(curve, x={axis: at[kept] for axis, at in curve.x.items()}, **cut)


def loss_view(found: list[Curve]) -> tuple[float, float]:
    """The part of the y-axis that shows what finished, up to the loss of untrained weights; if nothing did, all.

    A learning rate that is far too large, as sweeps have them, may bring the loss to millions and back.
    """
    chosen = [curve for curve in found if curve.status == "finished"] or found
    untrained = max((float(curve.high[0]) for curve in chosen if math.isfinite(curve.high[0])), default=math.inf)
    sides = [(curve.x["iterations"], side) for curve in chosen for side in (curve.low, curve.high)]
    return view([Line("", iters, np.minimum(side, untrained)) for iters, side in sides], "loss")


def cut_off(found: list[Curve]) -> str:
    """What `loss_view` does not show of the curves, as the end of a subject; empty if it shows all."""
    largest = max((float(v) for curve in found for v in curve.high if abs(v) < LARGEST), default=-math.inf)
    return f"; values up to {largest:.3g} lie above" if largest > loss_view(found)[1] else ""


def coloured(results: Results) -> dict[str, int]:
    """{variant: number of its colour} of the variants that have their own: all, or the baseline and the best.

    More than seven curves in colours of their own could not be told apart.
    """
    names, means = list(results.design.variants), {each.variant: each.mean for each in summaries(results)}
    if len(names) > len(COLOURS):
        ranked = sorted((name for name in names if not math.isnan(means[name])), key=means.__getitem__)
        chosen = {results.design.baseline, *[n for n in ranked if n != results.design.baseline][: len(COLOURS) - 1]}
        names = [name for name in names if name in chosen]
    return {name: n for n, name in enumerate(names)}


def extent(comparisons: list[Comparison]) -> tuple[float, float]:
    """The part of the axis of differences that shows 0 and all intervals, but not stand-ins that are too far away.

    A variant that diverged may differ a hundred times as much as the others, whose intervals would be points then.
    """
    measured = [end for c in comparisons if not c.stand_ins for end in (c.mean, c.low, c.high) if not math.isnan(end)]
    most = FAR * max(map(abs, measured), default=0.0) or math.inf
    every = [0.0, *measured, *(max(-most, min(most, c.mean)) for c in comparisons if c.stand_ins)]
    low, high = min(every), max(every)
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


def settings_of(results: Results) -> dict[str, dict[str, Any]]:
    """{variant: {name of a varied setting: its value}}. A value that the variant does not set is its runs'."""
    found = {}
    for variant, changes in results.design.variants.items():
        records = [section(o.run.record, "settings") for o in results.outcomes if o.run and o.variant == variant]
        ran = records[0] if records else {}
        found[variant] = {name: changes.get(name, ran.get(name)) for name in results.design.varied}
    return found


def importance(results: Results) -> dict[str, float]:
    """`shares` of the settings that vary. Variants with stand-ins are left out, as the subject says.

    The value that they got is so far from the others that their distance alone would be explained.
    """
    means = {each.variant: each.mean for each in summaries(results) if not each.stand_ins}
    return shares(settings_of(results), means)


def shares(settings: dict[str, dict[str, Any]], means: dict[str, float]) -> dict[str, float]:
    """{setting: share of the variance between variants that its main effect explains}, the largest first.

    The main effect of a setting are the means over all variants that share a value of it; of a number with many
    values, over ranges of it. In a full grid the shares add up to at most 1; the rest is what combinations do, and
    noise. Settings that vary together share what they explain. A setting that has another value in each variant, or
    the same in all, is left out. means: {variant: its value}; variants without one are left out.
    """
    variants = [name for name, mean in means.items() if not math.isnan(mean)]
    values = np.array([means[name] for name in variants])
    if not variants or not np.ptp(values):
        return {}
    total, found = float(((values - values.mean()) ** 2).sum()), {}
    for setting in dict.fromkeys(name for changes in settings.values() for name in changes):
        groups = _groups([settings[name].get(setting) for name in variants])
        if 1 < len(set(groups)) < len(variants):
            effect = np.array([values[[g == group for g in groups]].mean() for group in groups])
            found[setting] = float(((effect - values.mean()) ** 2).sum()) / total
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _groups(values):
    """The values, as far as they tell groups apart: ranges with equal numbers of values, if there are many numbers."""
    if len(set(map(repr, values))) > LEVELS and _are_numbers(values):
        return np.digitize(values, np.quantile(values, np.arange(1, BINS) / BINS)).tolist()
    return list(map(repr, values))


def _are_numbers(values):
    return all(type(value) in (int, float) and not math.isnan(number(value)) for value in values)


@dataclasses.dataclass
class Axis:
    """An axis of parallel coordinates; its places go from 0, the bottom, to 1."""

    name: str
    at: dict[str, float]  # {variant: its place}
    ticks: list[tuple[float, str]]


def coordinates(results: Results) -> list[Axis]:
    """An axis for each varied setting, and the last for the value: 0 is the best, 1 the worst.

    Variants with stand-ins, or that are much worse than the usual one, lie at 1 too, so that the others do not
    lie in one point.
    """
    found = [each for each in summaries(results) if not math.isnan(each.mean)]
    if not found:
        return []
    settings = settings_of(results)
    axes = [
        _axis(name, {each.variant: settings[each.variant].get(name) for each in found})
        for name in results.design.varied
    ]
    means = sorted(each.mean for each in found)
    low, usual = means[0], means[(len(means) - 1) // 2]
    high = max((each.mean for each in found if not each.stand_ins), default=low)
    if usual > low:
        high = min(high, low + 2 * FAR * (usual - low))
    span = high - low or 1.0
    at = {each.variant: min(1.0, (each.mean - low) / span) for each in found}
    places = decimals(found)
    beyond = "≥ " if means[-1] > high > low else ""
    ticks = [(share, shown(low + share * span, places)) for share in (0.0, 0.5)]
    ticks.append((1.0, beyond + shown(low + span, places)))
    return [*axes, Axis(what(results.design), at, ticks)]


def _axis(name, values):
    """The axis of a setting: its values at equal distances; many numbers on a scale, logarithmic if it spans much."""
    levels = list({repr(value): value for value in values.values()}.values())
    if not _are_numbers(levels):
        return _equal(name, values, levels)
    if len(levels) <= LEVELS:
        return _equal(name, values, sorted(levels))
    low, high = min(levels), max(levels)
    scale = math.log if low > 0 and high / low >= 10 else float
    start, span = scale(low), scale(high) - scale(low)
    middle = math.sqrt(low * high) if scale is math.log else (low + high) / 2
    at = {variant: (scale(value) - start) / span for variant, value in values.items()}
    return Axis(name, at, [(share, f"{value:.3g}") for share, value in ((0.0, low), (0.5, middle), (1.0, high))])


def _equal(name, values, levels: Sequence):
    places = {repr(level): n / (len(levels) - 1) if len(levels) > 1 else 0.5 for n, level in enumerate(levels)}
    at = {variant: places[repr(value)] for variant, value in values.items()}
    return Axis(name, at, [(place, str(level)) for place, level in zip(places.values(), levels)])
