"""How readers of a study read it: names for its values and variants, numbers, and what it found in sentences."""

import math
import re
import statistics
from typing import Any

import numpy as np

from fusedgpt.studies.design import Design
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.verdict import METHOD, MOST_SEEDS, Comparison

WHAT = {
    "val_loss": "validation loss",
    "bits_per_byte": "validation bits per byte",
    "tokens_to_loss": "tokens to a loss of {loss:g}",
}


def what(plan: Design) -> str:
    """What the values of a study are."""
    return WHAT[plan.metric].format(loss=plan.target_loss)


def labels(plan: Design) -> dict[str, str]:
    """A short name for each variant, for figures: if several settings vary, their values ('0.004, adamw')."""
    if len(plan.varied) > 1:
        names = "|".join(map(re.escape, plan.varied))
        bare = {name: re.sub(rf"(^|[,+])(?:{names})=", r",", name).strip(",") for name in plan.variants}
        if len(set(bare.values())) == len(bare):
            return {name: re.sub(r",(?=\S)", ", ", label) for name, label in bare.items()}
    return {name: name for name in plan.variants}


def means(results: Results) -> dict[str, tuple[int, float, float]]:
    """{variant: (n, mean, standard deviation over seeds) of its values}; NaN where there are too few."""
    found = {}
    for name, by_seed in results.values().items():
        each = np.array(list(by_seed.values()))
        n = len(each)
        found[name] = n, float(each.mean()) if n else math.nan, float(each.std(ddof=1)) if n > 1 else math.nan
    return found


def decimals(results: Results) -> int:
    """Decimals that show five digits of the means, and two of their standard deviations."""
    _, mean, sd = zip(*means(results).values())
    kinds = [(4, [abs(v) for v in mean if v and math.isfinite(v)]), (1, [v for v in sd if v and math.isfinite(v)])]
    digits = [n - math.floor(math.log10(statistics.median(some))) for n, some in kinds if some]
    return min(9, max(0, *digits)) if digits else 4


def shown(value: float, places: int, sign: str = "-") -> str:
    """`value` with that many decimals; empty for NaN. sign: '-', or '+' for a difference, which then has its sign."""
    if math.isnan(value):
        return ""
    text = f"{value:{sign},.{places}f}"
    return text.lstrip("+-") if not text.strip("+-0.,") else text  # no -0.0000


def word(c: Comparison) -> str:
    """The verdict on a variant, in a few words."""
    said = ", ".join(each for each in (c.word, c.size) if each)
    return said if c.planned or not c.tested else f"exploratory: {said}"


def times_as_long(results: Results, variant: str) -> str:
    """How many times the baseline's time of a step a variant's is, with its interval; empty if it was not measured."""
    found, of_base = (results.design.times.get(name, {}) for name in (variant, results.design.baseline))
    if "times" not in found or "times" in of_base:  # the turns had another baseline
        return ""
    around = f" ({found['low']:.3g} to {found['high']:.3g})" if found["low"] else ""
    return f"{found['times']:.3g} times{around}"


def method(results: Results) -> str:
    """How the verdict was made, in three sentences."""
    looks = results.design.looks
    said = f" and for planned looks after {', '.join(map(str, looks))} seeds (Pocock)" if len(looks) > 1 else ""
    return METHOD.format(baseline=results.design.baseline, looks=said)


def sentences(results: Results) -> list[str]:
    """The verdict on each variant, in words."""
    return [_sentence(results, each) for each in results.comparisons]


def _sentence(results, c):
    plan, n = results.design, f"{c.n} seed{'s' * (c.n != 1)}"
    lacks = {"it": results.without(c.variant), plan.baseline: results.without(plan.baseline)}
    if not c.tested:
        said = [f"{name} {_without(each, len(plan.seeds))}" for name, each in lacks.items() if each]
        if said:
            return f"no verdict on {c.variant}: {'; '.join(said)}"
        if len(plan.seeds) == 1:
            return f"no verdict on {c.variant}: one seed decides nothing"
        until = next((look for look in plan.looks if look > results.counted), plan.looks[-1])
        return f"no verdict on {c.variant} before {until} seeds of all variants are in"
    side, sign = ("lower", -1) if c.mean < 0 else ("higher", 1)
    interval = "all pairs alike"
    if not math.isnan(c.low):
        low, high = sorted((sign * c.low, sign * c.high))
        interval = f"95 % interval {number(low)} to {number(high)}"
    found = f"{plan.metric} {number(abs(c.mean))} {side} ({interval}, {n}, {probability(c.p)})"
    if not c.mean and math.isnan(c.low):
        found = f"{plan.metric} is the same with each of {n}"
    if c.word == "no difference found":
        text = f"no difference found between {c.variant} and {plan.baseline}: {found}"
    else:
        text = f"{c.variant} is {c.word} than {plan.baseline}: {found}"
    sizes = {"equivalent": "surely less than", "no worse": "surely not worse by", "matters": "surely more than"}
    if c.size and not (c.size == "no worse" and c.word == "better"):
        text += f", {sizes[c.size]} --matters={plan.matters:g}"
    if longer := times_as_long(results, c.variant):
        text += f"; a step takes {longer} as long"
    if c.found and c.word == "no difference found":
        text += f"; what {n} find in 80 % of studies is a difference of {_between(*c.found)}"
    if c.needed:
        text += f"; to find half of this difference takes {_between(*c.needed)} seeds"
    return text if c.planned else f"exploratory, because it was not planned: {text}"


def _without(ended, seeds):
    return " and ".join(f"{how} with {count} of {seeds} seeds" for how, count in ended.items())


def _between(low, high):
    if low == high:
        return f"{MOST_SEEDS:,} or more" if low >= MOST_SEEDS else number(low)
    return f"{number(low)} to {f'{MOST_SEEDS:,} or more' if high >= MOST_SEEDS else number(high)}"


def number(value: float) -> str:
    """A number with three digits, or all of its whole part."""
    return f"{float(f'{value:.3g}'):g}" if abs(value) < 1000 else f"{value:,.0f}"


def probability(p: float) -> str:
    """'p = 0.031'."""
    return f"p = {p:.3g}" if p >= 1e-4 else "p < 0.0001"


def headline(results: Results) -> str:
    """What the study found, in a sentence without a full stop."""
    plan, planned = results.design, [c for c in results.comparisons if c.planned]
    if plan.kind == "search":
        return f"A search of {len(plan.variants)} variants"
    if len(plan.variants) == 1:
        return f"{plan.baseline} alone was trained"
    if not any(c.tested for c in planned):
        missing = any(o.status == "missing" for o in results.outcomes)
        return "No verdict yet" if missing else "No verdict on what was planned"
    better, worse = ([c for c in planned if c.word == each] for each in ("better", "worse"))
    if better:
        best = min(better, key=lambda c: c.mean)
        by = f"by {number(-best.mean)} ({what(plan)})"
        if len(better) == 1:
            of_all = f", the only one of {len(planned)} variants" * (len(planned) > 1)
            return f"{best.variant} is better than {plan.baseline} {by}{of_all}"
        found = f"{len(better)} of {len(planned)} variants are better than {plan.baseline}"
        return f"{found}, most of all {best.variant} {by}"
    if worse:
        lost = f"{len(worse)} of {len(planned)}" if len(planned) > 1 else worse[0].variant
        return f"No variant is better than {plan.baseline}, and {lost} {'is' if len(worse) == 1 else 'are'} worse"
    return f"No difference from {plan.baseline} was found"


def facts(results: Results) -> dict[str, Any]:
    """How the study was made: {what: value}, for verdict.json and the page."""
    plan = results.design
    ran = {}
    for each in results.outcomes:
        for name, value in each.row.get("ran", {}).items():
            ran.setdefault(name, {})[str(value)] = None
    made = {"command": plan.command, "method": method(results), "metric": what(plan), "baseline": plan.baseline}
    made |= {"seeds": plan.seeds, "looks": plan.looks, "seeds that count": results.counted, "level": "5 %"}
    made |= {"changed after the first run": plan.changes, "threads of a run": plan.threads}
    made |= {"minutes of steps": plan.minutes, "the other version": plan.against, "what auto became": plan.settled}
    made |= {name: list(values) for name, values in ran.items()}
    made |= {f"SHA-256 of the code of {name}": each for name, each in plan.code.items()}
    made["SHA-256 of working-tree.diff, the changes to the commit"] = plan.diff
    return made | {f"SHA-256 of {name}": each for name, each in plan.data.items()}
