"""Verdicts against scipy's tests, a Holm by hand, and the power of simulated studies."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fusedgpt.studies import verdict
from fusedgpt.studies.verdict import Summary, compare, holm, seeds_needed, sentence, smallest, summarise

repeatable = settings(deadline=None, derandomize=True, max_examples=40)
WORDS = {"better": "worse", "worse": "better", "no difference found": "no difference found"}
# a seed's value in thousandths, as losses are often written; sums of them are not exact in binary
THOUSANDTHS = st.integers(-5_000, 5_000).map(lambda n: n / 1000)


def study(*samples):
    """{"0": {seed: value}, "1": ...} of the samples, with the seeds 1, 2, ..."""
    return {str(i): dict(enumerate(map(float, each), 1)) for i, each in enumerate(samples)}


def normal_study(n, *shifts, noise=0.01, seed=0):
    """Variants whose values are a common effect of the seed, plus a shift, plus noise of their own."""
    rng = np.random.default_rng(seed)
    common = rng.normal(3, 0.1, n)
    return study(*(common + shift + rng.normal(0, noise, n) for shift in (0, *shifts)))


@st.composite
def studies(draw, most_pairs=6):
    """Two to four variants, each with a value for each seed."""
    n = draw(st.integers(2, most_pairs))
    samples = draw(st.lists(st.lists(THOUSANDTHS, min_size=n, max_size=n), min_size=2, max_size=4))
    return study(*samples)


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_student_is_scipys_paired_test(n):
    values = normal_study(n, 0.01, -0.02, 0)
    for each in compare(values, "0"):
        a, b = ([*values[name].values()] for name in (each.variant, "0"))
        expected = stats.ttest_rel(a, b)
        assert each.p == pytest.approx(expected.pvalue, rel=1e-9)
        assert (each.low, each.high) == pytest.approx((*expected.confidence_interval(0.95),), rel=1e-9)
        assert each.mean == pytest.approx(np.subtract(a, b).mean(), rel=1e-12) and each.n == n


def test_pairs_are_the_seeds_that_both_have():
    values = {"a": {1: 1.0, 2: 2.0, 3: 4.0, 9: 100.0}, "b": {3: 4.5, 7: -100.0, 2: 2.25, 1: 1.5}}
    (c,) = compare(values, "a")
    assert (c.variant, c.n) == ("b", 3) and c.mean == pytest.approx((0.5 + 0.25 + 0.5) / 3)
    assert c.p == pytest.approx(stats.ttest_1samp([0.5, 0.25, 0.5], 0).pvalue)


def test_a_verdict_takes_two_pairs():
    values = study([1, 2, 3], [-99, -98, -97]) | {"2": {1: -1000.0}, "3": {7: -1000.0}}
    _, one, none = compare(values, "0")
    assert (one.n, one.mean, none.n) == (1, -1001.0, 0) and math.isnan(none.mean)
    for c in (one, none):
        assert c.word == "no difference found" and c.smallest == math.inf and c.seeds_needed is None
        assert all(map(math.isnan, (c.low, c.high, c.p, c.p_holm)))
    assert sentence(one, "0", "val_loss") == "no verdict on 2: it shares 1 seed with 0, and a verdict takes 2"
    assert sentence(none, "0", "val_loss") == "no verdict on 3: it shares 0 seeds with 0, and a verdict takes 2"


def test_comparisons_that_cannot_be_tested_count():
    # otherwise a failed run of one variant would make the verdict on another more lenient
    values = normal_study(4, 0.1, 0.3)
    few = values | {"2": {1: values["2"][1]}}
    assert compare(few, "0")[0].smallest == compare(values, "0")[0].smallest
    assert compare(few, "0")[0].p_holm == pytest.approx(2 * compare(few, "0")[0].p)


def test_equal_values():
    (c,) = compare(study([1.1, 2.2, 3.3, 4.4], [1.1, 2.2, 3.3, 4.4]), "0")
    assert (c.mean, c.low, c.high, c.p, c.p_holm) == (0, 0, 0, 1, 1)
    assert (c.word, c.smallest, c.seeds_needed) == ("no difference found", 0, None)
    assert sentence(c, "0", "ms") == "no difference found between 1 and 0: ms is the same with each of 4 seeds"


def test_the_same_difference_in_all_pairs():
    # p used to be 0: with 2 seeds, 45 % of studies of five equal variants found a difference in tokens_to_loss
    (three,) = compare(study([1, 2, 3], [0.5, 1.5, 2.5]), "0")
    assert (three.mean, three.low, three.high, three.p) == (-0.5, -0.5, -0.5, 1 / 16)
    assert (three.word, three.smallest, three.seeds_needed) == ("no difference found", math.inf, 4)
    assert sentence(three, "0", "ms") == (
        "no difference found between 1 and 0: 3 seeds may agree by chance on ms 0.5 lower; 4 would be needed"
    )
    (four,) = compare(study([1, 2, 3, 4], [0.5, 1.5, 2.5, 3.5]), "0")
    assert (four.p, four.word, four.smallest, four.seeds_needed) == (1 / 64, "better", 0, 4)
    assert sentence(four, "0", "ms") == (
        "1 is better than 0: ms 0.5 lower (95 % interval 0.5 to 0.5, 4 seeds, p = 0.0156 after Holm)"
    )
    # with five comparisons, four seeds may agree too
    assert [smallest(0.0, n, 5) for n in (4, 5)] == [math.inf, 0] and seeds_needed(-0.5, 0.0, 5) == 5
    # three times 0.1: np.mean and np.std would leave 1e-17
    tenths = study([0.0] * 3, [0.1] * 3)
    assert compare(tenths, "0")[0].p == 1 / 16 and summarise(tenths, {})[1].sd == 0


def by_hand(p):
    """Holm's p from his procedure: the smallest level of a grid at which it rejects each hypothesis."""
    found = [1.0] * len(p)
    for level in np.arange(1000, 0, -1) / 1000:
        for rank, i in enumerate(np.argsort(p, kind="stable")):
            if p[i] > level / (len(p) - rank):
                break
            found[i] = level
    return found


@given(st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=1, max_size=6))
@repeatable
def test_holm_is_the_procedure_by_hand(p):
    assert holm(p) == pytest.approx(by_hand(p), abs=0.00101)  # the grid's step
    assert all(mine >= each for mine, each in zip(holm(p), p))
    assert holm(p) == [holm(p[::-1])[len(p) - 1 - i] for i in range(len(p))]


def test_holm_of_an_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.02]) == [0.5, 0.04] and holm([]) == []
    corrected = holm([math.nan, 0.01])
    assert math.isnan(corrected[0]) and corrected[1] == 0.02


def share_found(size, sd, n, comparisons, trials=40_000):
    """The share of simulated samples that a t test at the level 0.05 / comparisons finds, on the right side."""
    drawn = np.random.default_rng(n).normal(size, sd, (trials, n))
    t = stats.ttest_1samp(drawn, 0, axis=1)
    return ((t.pvalue < 0.05 / comparisons) & (t.statistic > 0)).mean()


@pytest.mark.parametrize("n, comparisons", [(2, 1), (3, 7), (5, 1), (5, 5), (20, 3), (100, 1)])
def test_the_smallest_difference_is_found_in_80_percent(n, comparisons):
    size = smallest(0.3, n, comparisons)
    assert share_found(size, 0.3, n, comparisons) == pytest.approx(0.8, abs=0.008)  # four standard errors


@pytest.mark.parametrize("effect, comparisons", [(0.3, 1), (1.0, 1), (1.0, 10), (4.0, 2)])
def test_fewer_seeds_than_needed_do_not_do(effect, comparisons):
    n = seeds_needed(effect, 1.0, comparisons)
    assert share_found(effect, 1.0, n, comparisons) >= 0.792
    assert share_found(effect, 1.0, n - 1, comparisons) <= 0.808


def test_the_power_of_100_comparisons_of_10_000_seeds_can_be_computed():
    for n, comparisons in itertools.product((2, 3, 10_000), (1, 100)):
        size = smallest(1.0, n, comparisons)
        assert stats.nct.sf(stats.t.isf(0.025 / comparisons, n - 1), n - 1, size * math.sqrt(n)) == pytest.approx(0.8)


def test_seeds_needed_is_none_if_nobody_could_tell():
    assert seeds_needed(0.0, 1.0) is None and seeds_needed(1.0, math.nan) is None
    assert seeds_needed(0.03, 1.0) == 8723 and seeds_needed(0.028, 1.0) is None  # 10,011
    assert seeds_needed(-0.03, 1.0) == 8723 and seeds_needed(1e9, 1.0) == 2


def test_the_correction_decides():
    values = normal_study(5, 0.03, 0, 0, 0, 0)
    alone, among = compare({name: values[name] for name in "01"}, "0")[0], compare(values, "0")[0]
    assert alone.p == among.p == alone.p_holm < 0.05 < among.p_holm
    assert (alone.word, among.word) == ("worse", "no difference found")
    assert (alone.low, alone.high) == (among.low, among.high) and alone.smallest < among.smallest


@given(studies())
@repeatable
def test_what_is_found_agrees_with_the_power(values):
    for c in compare(values, "0"):
        found_with_power = c.seeds_needed is not None and c.seeds_needed <= c.n
        assert found_with_power == (abs(c.mean) >= c.smallest and c.mean != 0)
        if found_with_power:  # so large a difference is always found
            assert c.word != "no difference found"
        assert c.word == "no difference found" or (c.word == "better") == (c.mean < 0)
        assert c.low <= c.mean <= c.high and (c.p_holm >= c.p)
        if c.p < 0.049:
            assert c.low > 0 or c.high < 0
        if c.p > 0.051 and c.low < c.high:
            assert c.low <= 0 <= c.high


@given(studies(), st.randoms(use_true_random=False))
@repeatable
def test_the_order_of_variants_and_seeds_does_not_matter(values, random):
    names = [*values]
    random.shuffle(names)
    # multiples of 64 collide in a set of Python, so its order depends on how it grew
    values = {name: {64 * seed: value for seed, value in each.items()} for name, each in values.items()}
    other = {name: dict(random.sample([*values[name].items()], len(values[name]))) for name in names}
    assert {c.variant: c for c in compare(values, "0")} == {c.variant: c for c in compare(other, "0")}
    assert [c.variant for c in compare(other, "0")] == [name for name in names if name != "0"]


@given(studies(), st.integers(-100, 100))
@repeatable
def test_a_constant_added_to_all_changes_nothing(values, constant):
    eighths = {name: {s: round(8 * v) / 8 for s, v in each.items()} for name, each in values.items()}  # exact sums
    shifted = {name: {s: v + constant for s, v in each.items()} for name, each in eighths.items()}
    assert compare(shifted, "0") == compare(eighths, "0")


@given(studies())
@repeatable
def test_swapping_the_two_flips_the_sign(values):
    (c,), (swapped,) = compare({n: values[n] for n in "01"}, "0"), compare({n: values[n] for n in "01"}, "1")
    assert (swapped.mean, swapped.low, swapped.high) == pytest.approx((-c.mean, -c.high, -c.low), abs=1e-12)
    assert (swapped.p, swapped.word, swapped.smallest) == (c.p, WORDS[c.word], c.smallest)


def test_the_bootstrap_agrees_with_scipys_for_many_pairs():
    # scipy has other intervals, which approach the same with many pairs; these differences are skewed
    differences = np.random.default_rng(3).exponential(1, 400) - 0.9
    (c,) = compare(study(np.zeros(400), differences), "0", "bootstrap")
    theirs = stats.bootstrap((differences,), np.mean, method="BCa", rng=np.random.default_rng(1)).confidence_interval
    width = theirs.high - theirs.low
    assert (c.low, c.high) == pytest.approx((theirs.low, theirs.high), abs=0.04 * width)


@pytest.mark.parametrize("shift", np.linspace(-0.02, 0.02, 9))
def test_the_bootstraps_p_is_where_its_interval_ends_at_zero(shift):
    (c,) = compare(normal_study(12, float(shift), seed=4), "0", "bootstrap")
    outside = c.low > 0 or c.high < 0
    assert c.p <= 0.05 if outside else c.p > 0.05
    assert c == compare(normal_study(12, float(shift), seed=4), "0", "bootstrap")[0]  # to the bit


def test_the_bootstrap_of_differences_with_ties():
    # a third of the resamples lack the one that differs, and have no spread: they say that anything is possible
    (c,) = compare(study(np.zeros(10), [0.3] * 9 + [0.4]), "0", "bootstrap")
    assert math.isnan(c.low) and math.isnan(c.high) and c.word == "no difference found" and c.p > 0.3
    assert "10 seeds could have found" in sentence(c, "0", "ms")
    # a tenth have no spread either, but the right mean
    (c,) = compare(study(np.zeros(10), [0.0] * 8 + [1, -1]), "0", "bootstrap")
    assert 0.1 < c.high < 1 and c.low == -c.high and c.p == 1
    (same,) = compare(study(np.ones(10), np.ones(10)), "0", "bootstrap")
    assert (same.p, same.low, same.high) == (1, 0, 0)


def test_the_bootstrap_by_hand():
    differences = np.random.default_rng(5).exponential(1, 10)
    (c,) = compare(study(np.zeros(10), differences), "0", "bootstrap")
    samples = differences[np.random.default_rng(0).integers(10, size=(9_999, 10))]
    ratios = np.sort(abs(samples.mean(axis=1) - differences.mean()) / stats.sem(samples, axis=1))
    margin = ratios[9_999 - 500] * stats.sem(differences)
    assert (c.low, c.high) == pytest.approx((differences.mean() - margin, differences.mean() + margin))
    larger = (ratios >= differences.mean() / stats.sem(differences)).sum()
    assert c.p == pytest.approx((larger + 1) / 10_000)


def test_fewer_than_ten_pairs_are_compared_by_student():
    # after 30 runs, of which one failed, the study ended in a UserError
    values = normal_study(10, 0.01, 0.02)
    whole = compare(values, "0", "bootstrap")
    del values["2"][4]
    resampled, few = compare(values, "0", "bootstrap")
    assert (resampled.low, resampled.p) == (whole[0].low, whole[0].p) != (compare(values, "0")[0].low, whole[0].p)
    assert few.n == 9 and (few.low, few.p) == (compare(values, "0")[1].low, compare(values, "0")[1].p)


def with_stand_ins(values, worst=7.0):
    """The stand-ins of a study: the values that are `worst`."""
    return {name: {seed for seed, value in each.items() if value == worst} for name, each in values.items()}


def test_stand_ins_know_who_is_worse_but_not_by_how_much():
    # two seeds whose differences were equal to ten digits had p < 0.0001
    values = study([1.0, 1.0001], [7.0, 7.0])
    (two,) = compare(values, "0", stand_ins=with_stand_ins(values))
    assert (two.p, two.word, two.stand_ins, two.seeds_needed) == (1 / 4, "no difference found", 2, None)
    assert all(map(math.isnan, (two.low, two.high, two.smallest)))
    assert sentence(two, "0", "val_loss") == (
        "no difference found between 1 and 0: a run counts as the worst with 2 of 2 seeds, p = 0.25 after Holm"
    )
    values = study([1.0, 1.01, 1.02, 1.03], [7.0] * 4)
    (four,) = compare(values, "0", stand_ins=with_stand_ins(values))
    assert (four.p, four.word) == (1 / 64, "worse")
    assert sentence(four, "0", "ms") == (
        "1 is worse than 0: a run counts as the worst with 4 of 4 seeds, p = 0.0156 after Holm"
    )
    # one stand-in among others: the t test has the spread that it needs
    values = study([1.0, 1.0, 1.0, 1.0], [1.1, 1.2, 0.9, 7.0])
    (one,) = compare(values, "0", stand_ins=with_stand_ins(values))
    assert one.p == compare(values, "0")[0].p and one.stand_ins == 1 and math.isnan(one.low)


def test_pairs_of_two_stand_ins_alone_have_no_verdict():
    values = study([7.0] * 3, [7.0] * 3, [7.0, 7.0, 1.0])
    both, other = compare(values, "0", stand_ins=with_stand_ins(values))
    assert not both.tested and both.word == "no difference found" and other.tested
    assert sentence(both, "0", "ms") == "no verdict on 1: with each of 3 seeds, it and 0 both count as the worst"


DIVERGENT = list(itertools.product((2, 3, 5), (1, 5), (7.0, 3.04)))  # the worst value far away, and among the others
QUICK = [(2, 1, 7.0), (3, 1, 3.04)]


@pytest.mark.parametrize(
    ("n", "comparisons", "worst"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in DIVERGENT],
)
def test_equal_variants_that_diverge_half_the_time_differ_in_5_percent_at_most(n, comparisons, worst):
    # 2 seeds: 11 % had a verdict, and of studies of five variants 35 %
    rng, found, studies = np.random.default_rng((n, comparisons)), 0, 400
    for _ in range(studies):
        common = rng.normal(3, 0.03, n)
        drawn = np.minimum(common + rng.normal(0, 0.01, (1 + comparisons, n)), worst - 1e-6)
        values = study(*np.where(rng.random(drawn.shape) < 0.5, worst, drawn))
        compared = compare(values, "0", stand_ins=with_stand_ins(values, worst))
        found += any(each.word != "no difference found" for each in compared)
    assert found <= stats.binom.ppf(0.9995, studies, 0.05)


def test_summaries():
    values = {"a": {1: 1.0, 2: 2.0, 5: 4.5}, "b": {1: 3.0}, "c": {}}
    a, b, c = summarise(values, {"a": {5}})
    assert a == Summary("a", 3, 2.5, pytest.approx(math.sqrt(3.25)), 1)
    assert (b.n, b.mean, c.n, c.stand_ins) == (1, 3.0, 0, 0)
    assert math.isnan(b.sd) and math.isnan(c.mean) and math.isnan(c.sd)


def test_sentences():
    worse = verdict.Comparison("rate=2", 5, 0.01234, 0.00399, 0.0203, 0.001, 0.00412, "worse", 0.011, 5)
    assert sentence(worse, "rate=1", "val_loss") == (
        "rate=2 is worse than rate=1: val_loss 0.0123 higher (95 % interval 0.004 to 0.02, 5 seeds,"
        " p = 0.00412 after Holm)"
    )
    better = verdict.Comparison("b", 12, -4096.0, -7000.4, -99.6, 0.01, 0.01, "better", 10.0, 4)
    assert sentence(better, "a", "tokens_to_loss") == (
        "b is better than a: tokens_to_loss 4,096 lower (95 % interval 100 to 7,000, 12 seeds, p = 0.01 after Holm)"
    )
    unclear = verdict.Comparison("b", 5, -0.003, -0.02, 0.014, 0.4, 0.4, "no difference found", 0.0204, 40)
    assert sentence(unclear, "a", "val_loss") == (
        "no difference found between b and a: 5 seeds could have found a difference of 0.02 in val_loss;"
        " for the 0.003 seen, about 40 would be needed"
    )
    tiny = verdict.Comparison("b", 2, 1e-5, -1.0, 1.0, 0.9, 1.0, "no difference found", 2.0, None)
    assert sentence(tiny, "a", "ms").endswith("; for the 1e-05 seen, more than 10,000 would be needed")
    # by Student's t, 8 seeds would do, but the bootstrap found nothing with 10
    wide = verdict.Comparison("b", 10, -0.003, -0.02, 0.014, 0.1, 0.1, "no difference found", 0.002, 8)
    assert sentence(wide, "a", "ms") == (
        "no difference found between b and a: 10 seeds could have found a difference of 0.002 in ms"
    )
    none = verdict.Comparison("b", 4, 0.0, -1.0, 1.0, 1.0, 1.0, "no difference found", 2.0, None)
    assert sentence(none, "a", "ms").endswith("4 seeds could have found a difference of 2 in ms")
