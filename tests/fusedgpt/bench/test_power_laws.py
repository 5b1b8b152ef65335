"""Power laws: which points are fitted, from which rounds, and what theory says beside them."""

import math

import pytest

from fusedgpt.bench.power_laws import curves, fit, laws, straight


def row(n, ms, number=1, part="depth", name="sdpa", memory=2**20, **more):
    """A row of growth whose FLOPs are n² and whose estimate of memory is n."""
    of = {"over": name} if part in ("generation", "prepare") else {"attention": name}
    times = {"median_ms": ms, "p10_ms": ms, "p90_ms": ms, "samples_ms": [ms] * 3}
    found = {"part": part, **of, "n": n, "round": number, "status": "measured", **times, "work": n * n, "tokens": n}
    return found | {"peak_memory": memory, "estimated_memory": n, "megabytes": n} | more


def test_a_power_law_is_found_again():
    b, a = fit({n: 3 * n**1.5 for n in (1, 2, 4, 8)})
    assert (b, a) == (pytest.approx(1.5), pytest.approx(3))
    b, a = fit({256: 8.0, 512: 2.0})
    assert b == pytest.approx(-2) and a * 256**b == pytest.approx(8)


def test_a_straight_curve_is_fitted_whole_and_of_a_bent_one_the_last_half():
    noisy = {n: n * factor for n, factor in zip((1, 2, 4, 8, 16), (1, 1.05, 0.96, 1, 1.04))}
    assert straight(noisy) == noisy
    bent = {2**k: 2**k + (2**k) ** 2 / 64 for k in range(8)}  # the second term leads from 64 on
    assert list(straight(bent)) == [16, 32, 64, 128]
    assert 1.4 < fit(straight(bent))[0] < 2 and fit(bent)[0] < 1.4
    assert list(straight({1: 1, 2: 1, 4: 1, 8: 3})) == [2, 4, 8]  # not two, which any line would hit
    assert list(straight({1: 1, 2: 1.0, 4: 9.0})) == [1, 2, 4]


def test_each_round_has_its_exponent_and_all_rounds_together_have_one():
    rows = [row(n, n**b, number) for number, b in ((1, 1.0), (2, 2.0)) for n in (1, 2, 4)]
    time, memory = laws(rows)
    assert time["exponents"] == {1: pytest.approx(1), 2: pytest.approx(2)}
    assert time["exponent"] == pytest.approx(math.log2((4 + 16) / 2) / 2, rel=0.05)  # of the medians of all samples
    assert time["doubling"] == pytest.approx(2 ** time["exponent"]) and time["n"] == [1, 2, 4]
    assert (time["counted"], time["limit"]) == (pytest.approx(2), 1)
    assert (memory["exponent"], memory["counted"]) == (pytest.approx(0, abs=1e-9), pytest.approx(1))


def test_a_round_with_a_disturbed_point_counts_for_no_point_of_its_curve():
    # the calm points of a busy round would bend the curve
    rows = [row(n, n, number) for number in (1, 2) for n in (1, 2, 4)]
    rows[4] |= {"median_ms": 50.0, "disturbed": True, "reason": "it was slow"}
    time, _ = laws(rows)
    assert time["exponent"] == pytest.approx(1) and [*time["exponents"]] == [1]
    rows[0] |= {"disturbed": True, "reason": "it was slow"}
    (memory,) = laws(rows)  # a disturbance does not change how much memory a step takes
    assert memory["law"] == "memory"


def test_a_curve_ends_where_memory_does():
    full = {"part": "length", "attention": "manual", "n": 8, "round": 1, "status": "out of memory", "reason": "full"}
    rows = [row(n, n * n, part="length", name="manual", memory=n**2) for n in (1, 2, 4)]
    time, memory = laws([*rows, full])
    assert time["n"] == [1, 2, 4] and memory["exponent"] == pytest.approx(2)
    assert curves([*rows, full])["length", "manual"][8]["status"] == "out of memory"
    assert laws([rows[0], full]) == []  # one point has no slope


@pytest.mark.parametrize(
    ("part", "name", "time", "memory"),
    [
        ("length", "manual", 2, 2),
        ("length", "blocked", 2, 2),  # its backward needs the softmax of every block
        ("length", "flash", 2, 1),
        ("depth", "sdpa", 1, 1),
        ("width", "sdpa", 2, 2),
        ("batch", "sdpa", 1, 1),
        ("generation", "tokens", 2, None),
        ("generation", "samples", 1, None),
        ("prepare", "text", 1, None),
        ("prepare", "cores", -1, None),
    ],
)
def test_what_theory_says_of_each_curve(part, name, time, memory):
    found = {law["law"]: law["limit"] for law in laws([row(n, n, part=part, name=name) for n in (1, 2)])}
    assert found == {"time": time} | ({} if memory is None else {"memory": memory})
