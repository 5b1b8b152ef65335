"""How readers of a study read it: names for its values and variants, numbers, and what it found in a sentence."""

import math
import re
import statistics

from fusedgpt.studies.design import Design
from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.verdict import Comparison, Summary, summarise

WHAT = {
    "val_loss": "validation loss",
    "bits_per_byte": "validation bits per byte",
    "ms": "milliseconds a step",
    "seconds_to_loss": "seconds of training to a loss of {loss:g}",
    "tokens_to_loss": "tokens to a loss of {loss:g}",
}


def what(plan: Design) -> str:
    """What the values of a study are."""
    return WHAT[plan.metric].format(loss=plan.target_loss)


def without_value(plan: Design) -> str:
    """What happened to the runs that count as the worst."""
    return "diverged or did not reach the loss" if plan.metric.endswith("_to_loss") else "diverged"


def labels(plan: Design) -> dict[str, str]:
    """A short name for each variant, for figures: if several settings vary, their values ('0.004, adamw')."""
    if len(plan.varied) > 1:
        names = "|".join(map(re.escape, plan.varied))
        bare = {name: re.sub(rf"(^|[,+])(?:{names})=", r",", name).strip(",") for name in plan.variants}
        if len(set(bare.values())) == len(bare):
            return {name: re.sub(r",(?=\S)", ", ", label) for name, label in bare.items()}
    return {name: name for name in plan.variants}


def head(plan: Design) -> str:
    """What `labels` are values of: 'learning_rate, optimizer'; empty if they say so themselves."""
    return ", ".join(plan.varied) if any(name != label for name, label in labels(plan).items()) else ""


def summaries(results: Results) -> list[Summary]:
    """A summary for each variant, in the order of the design."""
    return summarise(results.values(), results.stand_ins())


def decimals(found: list[Summary]) -> int:
    """Decimals that show five digits of the means, and two of their standard deviations."""
    means = [abs(each.mean) for each in found if math.isfinite(each.mean) and each.mean]
    sds = [each.sd for each in found if math.isfinite(each.sd) and each.sd]
    digits = [n - math.floor(math.log10(statistics.median(some))) for n, some in ((4, means), (1, sds)) if some]
    return min(9, max(0, *digits)) if digits else 4


def shown(value: float, places: int, sign: str = "-") -> str:
    """`value` with that many decimals; empty for NaN. sign: '-', or '+' for a difference, which then has its sign."""
    if math.isnan(value):
        return ""
    text = f"{value:{sign},.{places}f}"
    return text.lstrip("+-") if not text.strip("+-0.,") else text  # no -0.0000


def shown_p(p: float) -> str:
    """A probability; empty for NaN."""
    if math.isnan(p):
        return ""
    return f"{p:.3g}" if p >= 1e-4 else "<0.0001"


def word(comparison: Comparison) -> str:
    """The verdict on a variant, in a word or three."""
    return comparison.word if comparison.tested else "no verdict"


def headline(results: Results) -> str:
    """What the study found, in a sentence without a full stop."""
    comparisons, baseline = results.comparisons(), results.design.baseline
    if not comparisons:
        return f"{baseline} alone was trained"
    if not any(each.tested for each in comparisons):
        if any(each.n > 1 for each in comparisons):
            return "No verdict: no run of a pair has a value of its own"
        return "No verdict yet: it takes 2 seeds that a variant shares with the baseline"
    better, worse = ([each for each in comparisons if each.word == word] for word in ("better", "worse"))
    if better:
        best = min(better, key=lambda each: each.mean)
        places = decimals(summaries(results))
        by = f"by {shown(-best.mean, places)} ({what(results.design)})"
        if len(comparisons) == 1:
            return f"{best.variant} is better than {baseline} {by}"
        if len(better) == 1:
            return f"1 of {len(comparisons)} variants is better than {baseline}: {best.variant} {by}"
        found = f"{len(better)} of {len(comparisons)} variants are better than {baseline}"
        return f"{found}, most of all {best.variant} {by}"
    if worse:
        lost = f"{len(worse)} of {len(comparisons)}" if len(comparisons) > 1 else worse[0].variant
        return f"No variant is better than {baseline}, and {lost} {'is' if len(worse) == 1 else 'are'} worse"
    return f"No difference from {baseline} was found"
