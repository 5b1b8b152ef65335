"""The lists among the settings of benchmarks."""

import pytest

from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.options import admitted, heads, lengths
from fusedgpt.errors import UserError


def test_lengths_are_ranges_or_single():
    assert lengths("256-512-64,1024") == [256, 320, 384, 448, 512, 1024]
    for wrong in ("", "0", "a", "1-2", "5-9-0"):
        with pytest.raises(UserError, match="must be like 256,512"):
            lengths(wrong)


def test_heads_are_numbers_of_heads_and_their_size():
    assert heads("32x128,12x64") == [(32, 128), (12, 64)]
    for wrong in ("12", "2x", "0x16", "2x16x2"):
        with pytest.raises(UserError, match="must be like 32x128,12x64"):
            heads(wrong)


NAMES = ("manual", "manual, eager", "flash", "flash + padded vocabulary", "flash3")
LADDER = [Comparison({}, NAMES, "manual")]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("", NAMES),
        ("flash,manual", ("manual", "flash")),  # they were words, which five of these have
        ("manual, eager", ("manual", "manual, eager")),  # the baseline is always there
        ("flash*", ("manual", "flash", "flash + padded vocabulary", "flash3")),
    ],
)
def test_only_names_whole_values_or_patterns(only, names):
    assert admitted(LADDER, only) == [Comparison({}, names, "manual")]


def test_a_name_without_a_contender_is_refused_although_others_have_one():
    plan = [Comparison({"T": T}, ("manual", "flash"), "manual") for T in (256, 1024)]
    assert admitted(plan, "1024") == plan[1:]
    assert admitted(plan, "1024&man*,256&flash") == [plan[0], Comparison({"T": 1024}, ("manual",), "manual")]
    with pytest.raises(UserError, match="only='1024&fly' names no contender"):
        admitted(plan, "1024&fly")
    with pytest.raises(UserError, match=r"only='fly' names no contender: .* or manual \| flash \| 256 \| 1024"):
        admitted(plan, "flash,fly")
