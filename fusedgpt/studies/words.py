"""How readers of a study read it: numbers, names of its variants, and what it found in sentences."""

import dataclasses
import math
from typing import Any

from fusedgpt.studies.design import Design
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.verdict import METHOD

WHAT = {
    "val_loss": "validation loss",
    "bits_per_byte": "validation bits per byte",
    "tokens_to_loss": "tokens to a loss of {loss:g}",
}
SIZES = {
    "equivalent": "; surely less than --matters={:g}",
    "no worse": "; surely not worse by --matters={:g}",
    "matters": "; surely more than --matters={:g}",
    "": "",
}


def what(plan: Design) -> str:
    """What the values of a study are."""
    return WHAT[plan.metric].format(loss=plan.target_loss)


def number(value: float, digits: int = 3, sign: str = "-") -> str:
    """A number with so many digits, or all of its whole part; empty for NaN. sign: '+' for a difference."""
    if math.isnan(value):
        return ""
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.{digits}g}"


def interval(low: float, high: float) -> str:
    """'-0.06 to -0.04'; empty for NaN."""
    return "" if math.isnan(low) else f"{number(low, 3, '+')} to {number(high, 3, '+')}"


def word(c: Any) -> str:
    """The verdict of a Comparison, in a few words."""
    said = f"{c.word}, {c.size}".removesuffix(", ")
    return said if c.planned or not c.tested else f"exploratory: {said}"


def times_as_long(results: Results, variant: str) -> str:
    """How many times the baseline's time of a step a variant's is, with its interval; empty if it was not measured."""
    found, of_base = (results.design.times.get(name, {}) for name in (variant, results.design.baseline))
    if "times" not in found or "times" in of_base:  # the turns had another baseline
        return ""
    return f"{found['times']:.3g} times ({found['low']:.3g} to {found['high']:.3g})"


def method(results: Results) -> str:
    """How the verdict was made, in three sentences."""
    looks = ", ".join(map(str, results.design.looks))
    return METHOD.format(baseline=results.design.baseline, looks=looks)


def sentences(results: Results) -> list[str]:
    """The verdict on each variant, in words."""
    return [_sentence(results, each) if each.tested else _untested(results, each) for each in results.comparisons]


def _untested(results, c):
    plan = results.design
    until = next((look for look in plan.looks if look > results.counted), plan.looks[-1])
    why = f"runs of the first {until} seeds are missing"
    if len(plan.seeds) == 1:
        why = "one seed decides nothing"
    for name in (c.variant, plan.baseline):
        for how, n in results.without(name).items():
            why = f"{name} {how} with {n} of {len(plan.seeds)} seeds"
    return f"no verdict on {c.variant}: {why}"


def _sentence(results, c):
    plan = results.design
    text = f"{c.variant} is {c.word} than {plan.baseline}"
    if c.word == "no difference found":
        text = f"no difference found between {c.variant} and {plan.baseline}"
    spread = interval(c.low, c.high) or "unknown, all pairs are alike"
    text += f": {plan.metric} {number(c.mean, 3, '+')} (95 % interval {spread}, {c.n} seeds, p {probability(c.p)})"
    text += SIZES[c.size].format(plan.matters)
    if longer := times_as_long(results, c.variant):
        text += f"; a step takes {longer} as long"
    if c.found and c.word == "no difference found":
        text += f"; {c.n} seeds find {number(c.found[0])} to {number(c.found[1])} in 80 % of studies"
    if c.needed:
        text += f"; to find half of this difference takes {c.needed[0]:,} to {c.needed[1]:,} seeds"
    return text if c.planned else f"exploratory, because it was not planned: {text}"


def probability(p: float) -> str:
    """'= 0.031' or '< 0.0001'; empty for NaN."""
    if math.isnan(p):
        return ""
    return f"= {p:.3g}" if p >= 1e-4 else "< 0.0001"


def headline(results: Results) -> str:
    """What the study found, in a sentence without a full stop."""
    plan, planned = results.design, [c for c in results.comparisons if c.planned]
    better = sorted((c for c in planned if c.word == "better"), key=lambda c: c.mean)
    worse = [c for c in planned if c.word == "worse"]
    if plan.kind == "search":
        return f"A search of {len(plan.variants)} variants"
    if len(plan.variants) == 1:
        return f"{plan.baseline} alone was trained"
    if better:
        by = f"by {number(-better[0].mean)} ({what(plan)})"
        also = f"; {len(better)} of {len(planned)} variants are better" * (len(planned) > 1)
        return f"{better[0].variant} is better than {plan.baseline} {by}{also}"
    if worse:
        return f"No variant is better than {plan.baseline}; {len(worse)} of {len(planned)} are worse"
    if any(c.tested for c in planned):
        return f"No difference from {plan.baseline} was found"
    return "No verdict on what was planned"


def facts(results: Results) -> dict[str, Any]:
    """How the study was made: {what: value}, for verdict.json and the page."""
    ran = {}
    for each in results.outcomes:
        for name, value in each.row.get("ran", {}).items():
            if value not in ran.setdefault(name, []):
                ran[name].append(value)
    made = {"method": method(results), "level": "5 %", "seeds that count": results.counted}
    return dataclasses.asdict(results.design) | made | ran
