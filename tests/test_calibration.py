"""How far verdicts can be trusted: how often a simulated study of equal variants finds a difference, or misses one.

There are 200 studies of each kind; CALIBRATION_STUDIES in the environment changes that. results/study_calibration has
2,000 of each. Values are noise alone: what the seed adds to both of a pair is not in their difference.
"""

import math
import os

import numpy as np
import pytest
from scipy import stats

from fusedgpt.studies import verdict

pytestmark = pytest.mark.slow  # test_verdict.py has the numbers of single studies

STUDIES = int(os.environ.get("CALIBRATION_STUDIES", "200"))
NOISE = 0.01  # its standard deviation
SPREAD = math.sqrt(2) * NOISE  # of a difference
SEEDS = 5  # of a study, unless a test is about their number
NOISES = {
    "normal": lambda rng, n: rng.normal(0, NOISE, n),
    "heavy tails": lambda rng, n: NOISE * rng.standard_t(2, n),  # of infinite variance: some runs end far from the rest
    "counts": lambda rng, n: rng.integers(2, size=n),  # such as the evaluation at which a loss is reached, this or next
}
# (seeds, comparisons, noise)
EQUAL = [(SEEDS, 1, "normal"), (SEEDS, 5, "normal"), (2, 1, "normal"), (2, 5, "normal"), (10, 1, "normal")]
EQUAL += [(SEEDS, 1, "heavy tails"), (SEEDS, 5, "heavy tails")]
EQUAL += [(seeds, comparisons, "counts") for seeds in (2, 3, SEEDS) for comparisons in (1, 5)]


def simulated(rng, seeds, comparisons, noise="normal", gain=0.0):
    """{variant: its values} of a baseline "0" and others, of which variant "1" is better by `gain`."""
    return {str(i): NOISES[noise](rng, seeds) - gain * (i == 1) for i in range(1 + comparisons)}


def compared(values, **how):
    """The verdict on each variant but the baseline."""
    differences = {name: each - values["0"] for name, each in values.items() if name != "0"}
    return verdict.compare(differences, largest=10.0, **how)


def differ(values, **how):
    """Whether any verdict is better or worse."""
    return any(c.word in ("better", "worse") for c in compared(values, **how))


def likely(share):
    """The least and the largest share of the studies here that a true share makes likely: 1 in 10,000 is outside."""
    return stats.binom.ppf([0.00005, 0.99995], STUDIES, share) / STUDIES


@pytest.mark.parametrize(("seeds", "comparisons", "noise"), EQUAL)
def test_at_most_5_percent_of_studies_of_equal_variants_find_a_difference(seeds, comparisons, noise):
    rng = np.random.default_rng((seeds, comparisons))
    found = [differ(simulated(rng, seeds, comparisons, noise)) for _ in range(STUDIES)]
    assert np.mean(found) <= likely(0.05)[1]


@pytest.mark.parametrize(("looks", "comparisons"), [((5, 10), 1), ((5, 10), 5), ((5, 10, 15, 20), 1)])
def test_so_do_at_most_5_percent_with_a_verdict_at_each_planned_look(looks, comparisons):
    rng = np.random.default_rng((*looks, comparisons))
    drawn = [simulated(rng, looks[-1], comparisons) for _ in range(STUDIES)]
    found = [any(differ({v: x[:n] for v, x in each.items()}, looks=looks) for n in looks) for each in drawn]
    assert np.mean(found) <= likely(0.05)[1]


@pytest.mark.parametrize("comparisons", [1, 4])
def test_all_intervals_of_a_study_hold_the_true_differences_in_95_percent(comparisons):
    rng, gain, held = np.random.default_rng(comparisons), 3 * SPREAD / math.sqrt(SEEDS), []
    for _ in range(STUDIES):
        values = simulated(rng, SEEDS, comparisons)
        for name in list(values)[1::2]:  # half of the variants differ
            values[name] -= gain
        held.append(all(c.low <= -gain * (int(c.variant) % 2) <= c.high for c in compared(values)))
    least, most = likely(0.95)
    assert least <= np.mean(held) and (np.mean(held) <= most or comparisons > 1)


@pytest.mark.parametrize("comparisons", [1, 5])
def test_the_smallest_difference_that_is_printed_is_found_in_80_percent(comparisons):
    rng, gain = np.random.default_rng(comparisons), verdict.smallest(SPREAD, SEEDS, verdict.LEVEL / comparisons)
    found = [compared(simulated(rng, SEEDS, comparisons, gain=gain))[0].word == "better" for _ in range(STUDIES)]
    least, most = likely(0.8)
    assert least <= np.mean(found) and (np.mean(found) <= most or comparisons > 1)
