"""Which variants of a study are better or worse than its baseline: paired differences, corrected for their number.

The two runs of a pair share what follows from the seed, such as batches and initial weights. Lower is better.

p: Student's paired t test, corrected for planned looks (S. Pocock, Biometrika 64, 1977) and for the number of
comparisons (S. Holm, Scandinavian Journal of Statistics 6, 1979). Intervals hold together (Bonferroni), so one may
reach beyond 0 where Holm finds a difference. Power: the noncentral t distribution.
`tests/test_calibration.py` measures whether all this holds.
"""

import dataclasses
import functools
import math

import numpy as np

LEVEL = 0.05  # share of studies of equal variants in which a verdict may find a difference
POWER = 0.8
SIMULATED = 100_000  # studies, to see how small the smallest p of several looks is
ROUNDING = 1e-9  # differences that vary by less than this share of the values are equal

METHOD = (
    "Paired differences to {baseline} over runs with the same seed, by Student's t test; p is corrected for all planned"
    " comparisons (Holm) and looks (Pocock; after {looks} seeds), and the 95 % intervals hold together. Both are about"
    " seeds, not about other texts. A"
    " test of means cannot tell a change that is better from one that has fewer of some rare bad runs."
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A variant against the baseline. Differences are variant − baseline; lower is better."""

    variant: str
    n: int  # pairs
    mean: float  # of the differences; NaN without pairs
    low: float  # the interval of the mean difference; NaN if there is no verdict, or if all differences are equal
    high: float
    p: float  # two-sided, corrected; NaN if there is no verdict
    word: str  # better, worse, no difference found or no verdict
    size: str  # beside --matters: equivalent, no worse, matters, or nothing that is known
    planned: bool  # otherwise the comparison is exploratory
    found: tuple[float, float] | None  # between these lies the smallest true difference that n pairs find in 80 %

    @property
    def tested(self) -> bool:
        """Whether there is a verdict, be it that no difference was found."""
        return not math.isnan(self.p)


def compare(
    differences: dict[str, np.ndarray],
    largest: float = 1.0,
    untested: frozenset[str] = frozenset(),
    planned: frozenset[str] | None = None,
    looks: tuple[int, ...] = (),
    matters: float | None = None,
) -> list[Finding]:
    """The verdict on each variant of `differences`, {variant: its differences to the baseline, by seed}.

    largest: of the values, which tells what is rounding. untested: variants that get no verdict, but count as
    comparisons, so that no verdict becomes more lenient because other runs failed. planned: variants that were planned;
    None: all. looks: the planned numbers of seeds at which a verdict is made. matters: the smallest difference that is
    of interest.
    """
    planned = frozenset(differences) if planned is None else planned
    p = {name: _p(each, largest) for name, each in differences.items() if name not in untested}
    p = {name: over_looks(p.get(name, math.nan), looks) for name in differences}
    in_plan = [name for name in differences if name in planned]
    others = [name for name in differences if name not in planned]
    found = {}
    for names, many in ((in_plan, len(in_plan)), (others, len(differences))):  # an exploratory one counts all
        level = nominal(LEVEL / max(1, many), looks)
        for name, each in zip(names, holm([p[name] for name in names], many)):
            found[name] = _comparison(name, differences[name], each, level, largest, name in planned, matters)
    return [found[name] for name in differences]


def _comparison(name, differences, p, level, largest, planned, matters):
    from scipy import stats

    n, low, high, found = len(differences), math.nan, math.nan, None
    mean, word = float(differences.mean()) if n else math.nan, "no verdict"
    if not math.isnan(p):
        word = "no difference found"
        if p < LEVEL:
            word = "better" if mean < 0 else "worse"
        if not _equal(differences, largest):
            sd = float(differences.std(ddof=1))
            margin = float(stats.t.isf(level / 2, n - 1)) * (sd / math.sqrt(n))
            low, high = mean - margin, mean + margin
            # from the 95 % interval of the spread, which few pairs know badly
            spreads = [sd * math.sqrt((n - 1) / float(stats.chi2.ppf(q, n - 1))) for q in (0.975, 0.025)]
            found = tuple(smallest(each, n, level) for each in spreads)
    return Finding(name, n, mean, low, high, p, word, _size(low, high, matters), planned, found)


def _size(low, high, matters):
    if matters is None or math.isnan(low):
        return ""
    if -matters < low and high < matters:
        return "equivalent"
    if high < -matters or low > matters:
        return "matters"
    return "no worse" if high < matters else ""


def _equal(differences, largest):
    return float(np.ptp(differences)) <= ROUNDING * largest


def _p(differences, largest):
    """p of the paired t test; 1 if all differences are equal, as those of a change without effect, which are 0."""
    from scipy import stats

    if len(differences) < 2:
        return math.nan
    return 1.0 if _equal(differences, largest) else float(stats.ttest_1samp(differences, 0).pvalue)


def over_looks(p: float, looks: tuple[int, ...]) -> float:
    """`p` of one look, corrected for all `looks`: how often equal variants show as small a p at any of them."""
    if len(looks) < 2 or math.isnan(p):
        return p
    smallest = _smallest_p(looks)
    share = (1 + np.searchsorted(smallest, p, side="right")) / (1 + len(smallest))
    return min(len(looks) * p, float(share))


def nominal(level: float, looks: tuple[int, ...]) -> float:
    """The level of each look at which all `looks` together have `level`."""
    if len(looks) < 2:
        return level
    return max(level / len(looks), float(np.quantile(_smallest_p(looks), level)))


@functools.cache
def _smallest_p(looks):
    """The smallest p over all looks of simulated studies of two equal variants, sorted."""
    from scipy import stats

    drawn = np.random.default_rng(0).standard_normal((SIMULATED, looks[-1]))
    sums, squares = drawn.cumsum(axis=1), (drawn**2).cumsum(axis=1)
    smallest = np.ones(SIMULATED)
    for n in looks:
        mean = sums[:, n - 1] / n
        error = np.sqrt((squares[:, n - 1] / n - mean**2) / (n - 1))
        smallest = np.minimum(smallest, 2 * stats.t.sf(abs(mean) / error, n - 1))
    return np.sort(smallest)


def holm(p: list[float], comparisons: int | None = None) -> list[float]:
    """Correct the p of several comparisons, so that a study of equal variants finds a difference in at most 5 %.

    The smallest is multiplied by their number, the next by one less, and so on; none becomes smaller than the one
    before. NaN, of a comparison that cannot be tested, stays NaN but counts.
    """
    corrected, largest, comparisons = [math.nan] * len(p), 0.0, comparisons or len(p)
    order = sorted((i for i, each in enumerate(p) if not math.isnan(each)), key=p.__getitem__)
    for rank, i in enumerate(order):
        largest = corrected[i] = max(largest, min(1.0, (comparisons - rank) * p[i]))
    return corrected


def smallest(sd: float, n: int, level: float = LEVEL) -> float:
    """The smallest true difference that `n` pairs find with 80 % power at `level`, in the right direction.

    sd: the true standard deviation of the differences.
    """
    return _in_standard_errors(n, level) * sd / math.sqrt(n)


@functools.cache
def _in_standard_errors(n, level):
    """How many standard errors of the mean a true difference must be for n pairs to find it with 80 % power."""
    from scipy import optimize, stats

    beyond = stats.t.isf(level / 2, n - 1)
    # Here the power is at least 0.9²: the standard error is below its own 90 % quantile, and independently of that the
    # mean is above its 10 % quantile
    most = beyond * math.sqrt(stats.chi2.ppf(0.9, n - 1) / (n - 1)) + stats.norm.ppf(0.9)
    return float(optimize.brentq(lambda size: stats.nct.sf(beyond, n - 1, size) - POWER, 0, most))
