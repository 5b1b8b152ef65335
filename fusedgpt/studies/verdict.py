"""Which variants of a study are better or worse than its baseline: paired differences, corrected for their number.

A variant and the baseline have a pair of runs for each seed that both have. The two share what follows from the seed,
such as batches and initial weights, so their difference varies less than that of two runs with different seeds. Lower
values are better. A run that has no value, such as one that diverged, counts with a stand-in, the worst value of all.

Intervals and p: Student's t on the differences ("The Probable Error of a Mean", Biometrika 6, 1908) or a bootstrap.
Correction: S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6,
1979. Power: the noncentral t distribution (J. Cohen, "Statistical Power Analysis for the Behavioral Sciences", 1988).
`tests/calibration.py` measures how often a verdict is wrong, and whether the power is as promised.
"""

import bisect
import dataclasses
import functools
import math

import numpy as np

LEVEL = 0.05  # share of studies of equal variants in which a verdict may find a difference
POWER = 0.8
MOST_SEEDS = 10_000  # a larger number of seeds is of no use to anybody
LEAST_RESAMPLED = 10  # fewer differences say too little about the distribution that they come from
RESAMPLES = 9_999


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A variant against the baseline. Differences are variant − baseline; lower is better."""

    variant: str
    n: int  # pairs
    mean: float  # of the differences; NaN without pairs
    low: float  # 95 % interval of the mean difference, for this comparison alone; NaN if there is none, as for n < 2
    high: float
    p: float  # two-sided, for this comparison alone; NaN for n < 2
    p_holm: float  # corrected for all comparisons of the study
    word: str  # better, worse or no difference found
    smallest: float  # smallest true difference that n pairs find with 80 % power; infinite for n < 2
    seeds_needed: int | None  # pairs that find the mean difference with 80 % power; None: see `seeds_needed`
    stand_ins: int = 0  # pairs with a stand-in; if there are any, low, high and smallest are NaN

    @property
    def tested(self) -> bool:
        """Whether there is a verdict, be it that no difference was found."""
        return not math.isnan(self.p)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The values of a variant over its seeds."""

    variant: str
    n: int
    mean: float  # NaN for n = 0
    sd: float  # over seeds, unpaired; NaN for n < 2
    stand_ins: int  # how many of the n values are stand-ins


def summarise(values: dict[str, dict[int, float]], stand_ins: dict[str, set[int]]) -> list[Summary]:
    """A summary for each variant of `values`, {variant: {seed: value}}; `stand_ins` as in `compare`."""
    samples = {name: np.array(list(by_seed.values()), float) for name, by_seed in values.items()}
    counts = {name: len(stand_ins.get(name, ())) for name in values}
    return [Summary(name, len(each), *_mean_and_sd(each), counts[name]) for name, each in samples.items()]


def compare(
    values: dict[str, dict[int, float]],
    baseline: str,
    interval: str = "t",
    stand_ins: dict[str, set[int]] | None = None,
) -> list[Comparison]:
    """Compare each variant of `values`, {variant: {seed: value}}, with the variant `baseline`.

    interval: t, or bootstrap for variants that have at least 10 pairs; runs that fail may leave fewer. stand_ins:
    {variant: seeds of those values that stand in for none}. The correction counts every other variant as a comparison,
    also one that has too few pairs to be tested, so that no verdict becomes more lenient because other runs failed.
    """
    stood = {name: (stand_ins or {}).get(name, set()) for name in values}
    others = [name for name in values if name != baseline]
    differences = {name: _paired(values[name], values[baseline]) for name in others}
    beside = {name: _stand_ins_of(values, stood, name, baseline) for name in others}
    estimates = [_without_an_interval(_estimate(differences[name], interval), *beside[name]) for name in others]
    corrected = holm([p for *_, p in estimates])
    return [
        _comparison(name, differences[name], estimate, p_holm, len(others), beside[name][1])
        for name, estimate, p_holm in zip(others, estimates, corrected)
    ]


def _paired(values, baseline):
    # sorted: a sum of floats depends on its order, which must not depend on the order in which runs ended
    return np.array([values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())], float)


def _stand_ins_of(values, stand_ins, variant, baseline):
    """(pairs, pairs with a stand-in, pairs of two stand-ins)."""
    pairs = values[variant].keys() & values[baseline].keys()
    mine, theirs = stand_ins[variant] & pairs, stand_ins[baseline] & pairs
    return len(pairs), len(mine | theirs), len(mine & theirs)


def _without_an_interval(estimate, n, stand_ins, both):
    """An estimate as it is, unless there are stand-ins: they know who is worse, but not by how much.

    All stand-ins are the same value. If each pair has one, on the same side, the differences have almost no spread, and
    the t test is sure, however few they are. So p is not below `_chance_to_agree`, which holds here too: one of two
    equal variants has a stand-in and the other has not with s (1 − s) ≤ 1/4. Pairs of two stand-ins alone say nothing.
    """
    if not stand_ins:
        return estimate
    p = estimate[2]
    return math.nan, math.nan, math.nan if n < 2 or both == n else max(p, _chance_to_agree(n))


def _comparison(variant, differences, estimate, p_holm, comparisons, stand_ins):
    n, (mean, sd) = len(differences), _mean_and_sd(differences)
    word = "no difference found"
    if p_holm < LEVEL:
        word = "better" if mean < 0 else "worse"
    power = smallest(sd, n, comparisons), seeds_needed(mean, sd, comparisons)
    if stand_ins and n > 1:
        power = math.nan, None
    return Comparison(variant, n, mean, *estimate, p_holm, word, *power, stand_ins)


def _mean_and_sd(values):
    """Mean and standard deviation of a sample; NaN where it is too small for them."""
    n = len(values)
    if n and (values == values[0]).all():  # exact, where sums would leave a rounding error for a spread
        return float(values[0]), 0.0 if n > 1 else math.nan
    return (float(values.mean()), float(values.std(ddof=1))) if n else (math.nan, math.nan)


def _estimate(differences, interval):
    """(low, high, p) of the mean difference, by Student's t or the bootstrap unless all differences are equal.

    Without spread, the interval has no width. If no pair shows a difference, p is 1. If all show the same one, p is
    `_chance_to_agree`. It is not 0, because values may be coarse, and those of equal variants then agree by chance.
    """
    n, (mean, sd) = len(differences), _mean_and_sd(differences)
    if n < 2:
        return math.nan, math.nan, math.nan
    if not sd:
        return mean, mean, _chance_to_agree(n) if mean else 1.0
    method = _bootstrap if interval == "bootstrap" and n >= LEAST_RESAMPLED else _student
    return method(differences, mean, sd / math.sqrt(n))


def _chance_to_agree(n):
    """An upper bound for the probability that n pairs of equal variants all show the same difference, which is not 0.

    Take a difference d, and sort all numbers into two halves so that x and x + d are never in the same half. Two runs
    that are equally distributed differ by d only if each is in the half that it should be in: s (1 − s) ≤ 1/4, where s
    is the probability of a half. So whatever the first pair shows, each other pair agrees with it by at most 1/4.
    """
    return 0.25 ** (n - 1)


def _student(differences, mean, error):
    """The paired t test: mean / standard error has n − 1 degrees of freedom."""
    from scipy import stats

    freedom = len(differences) - 1
    margin = float(stats.t.isf(LEVEL / 2, freedom)) * error
    return mean - margin, mean + margin, float(2 * stats.t.sf(abs(mean) / error, freedom))


def _bootstrap(differences, mean, error):
    """The symmetric bootstrap-t, for differences that are far from normal, such as skewed ones.

    Student's table is for normal differences. In its place, this takes |mean − true mean| / standard error of samples
    that are drawn from the differences, whose true mean is then known. p is the level at which the interval ends at 0.
    Source: P. Hall, "On Symmetric Bootstrap Confidence Intervals", Journal of the Royal Statistical Society B 50, 1988.
    The percentile and BCa intervals of scipy.stats.bootstrap are too narrow for few seeds: with 10, they find a
    difference between equal variants about twice as often as they should. The generator is the same each time, so that
    a verdict can be made again.
    """
    n = len(differences)
    drawn = differences[np.random.default_rng(0).integers(n, size=(RESAMPLES, n))]  # (RESAMPLES, n)
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(n)
    errors[drawn.min(axis=1) == drawn.max(axis=1)] = 0  # exactly, for an infinite ratio
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = abs(drawn.mean(axis=1) - mean) / errors
    ratios = np.sort(np.where(np.isnan(ratios), 0, ratios))  # NaN is 0 / 0: all that was drawn is equal to the mean
    margin = float(ratios[-round(LEVEL * (RESAMPLES + 1))]) * error  # 5 % of the ratios are as large or larger
    margin = margin if math.isfinite(margin) else math.nan  # most differences are equal: any mean would be possible
    beyond = int((ratios >= abs(mean) / error).sum())
    return mean - margin, mean + margin, min(1.0, (1 + beyond) / (RESAMPLES + 1))


def holm(p: list[float]) -> list[float]:
    """Correct the p of several comparisons, so that a study of equal variants finds a difference in at most 5 %.

    The smallest is multiplied by their number, the next by one less, and so on; none becomes smaller than the one
    before. NaN, of a comparison that cannot be tested, stays NaN but counts.
    """
    corrected, largest = [math.nan] * len(p), 0.0
    order = sorted((i for i, each in enumerate(p) if not math.isnan(each)), key=p.__getitem__)
    for rank, i in enumerate(order):
        largest = corrected[i] = max(largest, min(1.0, (len(p) - rank) * p[i]))
    return corrected


def smallest(sd: float, n: int, comparisons: int = 1) -> float:
    """The smallest true difference that `n` pairs find with 80 % power, in the right direction; infinite for n < 2.

    sd: the standard deviation of the differences. The smallest p of a study needs the level 0.05 / comparisons; Holm's
    correction asks less of the others, so a study finds a difference of this size in 80 % of all cases, or more.
    With few pairs, the standard deviation of the sample is a rough guess, and so is this.
    """
    if not sd:
        return 0.0 if _chance_to_agree(n) * comparisons < LEVEL else math.inf
    return _in_standard_errors(n, LEVEL / comparisons) * sd / math.sqrt(n) if n > 1 else math.inf


def seeds_needed(mean: float, sd: float, comparisons: int = 1) -> int | None:
    """How many pairs find a true difference `mean` with 80 % power, if the differences have standard deviation `sd`.

    None if mean is 0, if more than 10,000 are needed, or if fewer than 2 pairs are there to tell.
    """
    if not mean or math.isnan(sd):
        return None
    numbers = range(2, MOST_SEEDS + 1)
    at = bisect.bisect_left(numbers, True, key=lambda n: abs(mean) >= smallest(sd, n, comparisons))
    return numbers[at] if at < len(numbers) else None


@functools.cache
def _in_standard_errors(n, level):
    """How many standard errors of the mean a true difference must be for n pairs to find it with 80 % power.

    To find it means that the ratio of mean and standard error is beyond the two-sided quantile of Student's t, on the
    right side. The ratio has the noncentral t distribution.
    """
    from scipy import optimize, stats

    beyond = stats.t.isf(level / 2, n - 1)
    # Here the power is at least 0.9²: the standard error is below its own 90 % quantile, and independently of that the
    # mean is above its 10 % quantile
    most = beyond * math.sqrt(stats.chi2.ppf(0.9, n - 1) / (n - 1)) + stats.norm.ppf(0.9)
    return float(optimize.brentq(lambda size: stats.nct.sf(beyond, n - 1, size) - POWER, 0, most))


def sentence(c: Comparison, baseline: str, what: str) -> str:
    """The verdict on a comparison, in one sentence. what: the name of the values, such as val_loss."""
    if c.n < 2:
        return f"no verdict on {c.variant}: it shares {_seeds(c.n)} with {baseline}, and a verdict takes 2"
    if not c.tested:
        return f"no verdict on {c.variant}: with each of {_seeds(c.n)}, it and {baseline} both count as the worst"
    side, sign = ("lower", -1) if c.mean < 0 else ("higher", 1)
    if c.stand_ins:
        worst = f"a run counts as the worst with {c.stand_ins} of {_seeds(c.n)}, {_p(c.p_holm)} after Holm"
        if c.word != "no difference found":
            return f"{c.variant} is {c.word} than {baseline}: {worst}"
        return f"no difference found between {c.variant} and {baseline}: {worst}"
    if c.word != "no difference found":
        low, high = sorted((sign * c.low, sign * c.high))
        return (
            f"{c.variant} is {c.word} than {baseline}: {what} {_shown(abs(c.mean), 3)} {side} (95 % interval"
            f" {_shown(low, 2)} to {_shown(high, 2)}, {_seeds(c.n)}, {_p(c.p_holm)} after Holm)"
        )
    found = f"no difference found between {c.variant} and {baseline}: "
    if c.low == c.high and not c.mean:
        return f"{found}{what} is the same with each of {_seeds(c.n)}"
    if c.low == c.high:
        agree = f"{_seeds(c.n)} may agree by chance on {what} {_shown(abs(c.mean), 3)} {side}"
        return f"{found}{agree}; {c.seeds_needed} would be needed"
    found += f"{_seeds(c.n)} could have found a difference of {_shown(c.smallest, 2)} in {what}"
    if not c.mean or (c.seeds_needed or math.inf) <= c.n:  # the bootstrap may find less than Student's t would
        return found
    needed = "more than 10,000" if c.seeds_needed is None else f"about {c.seeds_needed:,}"
    return f"{found}; for the {_shown(abs(c.mean), 2)} seen, {needed} would be needed"


def _seeds(n):
    return f"{n} seed{'s' * (n != 1)}"


def _p(p):
    return f"p = {p:.3g}" if p >= 0.0001 else "p < 0.0001"


def _shown(value, digits):
    """A number with `digits` significant digits, or all of its whole part if that has more."""
    return f"{float(f'{value:.{digits}g}'):g}" if abs(value) < 10**digits else f"{value:,.0f}"
