"""The lists among the settings of benchmarks."""

import pytest

from fusedgpt.bench.options import admitted, family, heads, lengths
from fusedgpt.errors import UserError
from fusedgpt.settings import Settings


def test_a_row_names_what_makes_a_model_no_gpt2():
    assert family({"n_kv_head": None, "norm": "layernorm"}) == {}  # headers of earlier versions have none of them
    assert family(vars(Settings(n_kv_head=4, window=256))) == {"model": "n_kv_head=4, window=256"}


def test_lengths_are_ranges_or_single():
    assert lengths("256-512-64,1024") == [256, 320, 384, 448, 512, 1024]
    for wrong in ("", "0", "a", "1-2", "5-1-1"):
        with pytest.raises(UserError, match="must be like 256,512"):
            lengths(wrong)


def test_heads_are_numbers_of_heads_and_their_size():
    assert heads("32x128,12x64") == [(32, 128), (12, 64)]
    for wrong in ("12", "2x", "0x16", "2x16x2"):
        with pytest.raises(UserError, match="must be like 32x128,12x64"):
            heads(wrong)


PLAN = [{"rung": name} for name in ("manual", "manual, again", "flash", "flash + padded vocabulary", "flash3")]


@pytest.mark.parametrize(
    ("only", "rungs"),
    [
        ("", [spec["rung"] for spec in PLAN]),
        ("flash,manual", ["manual", "flash"]),  # they were words, which five of these have
        ("manual, again", ["manual, again"]),
        ("flash*", ["flash", "flash + padded vocabulary", "flash3"]),
        ("flash?, manual*", []),
    ],
)
def test_only_names_whole_values_or_patterns(only, rungs):
    if rungs:
        assert [spec["rung"] for spec in admitted(PLAN, only)] == rungs
        return
    with pytest.raises(UserError, match=r"names no row: .* rung: manual \| manual, again \| flash \|"):
        admitted(PLAN, only)


def test_a_name_without_a_row_is_refused_although_others_have_one():
    plan = [{"T": 256, "attention": "flash"}, {"T": 1024, "attention": "manual"}]
    assert admitted(plan, "1024") == plan[1:]
    assert admitted(plan, "1024&man*,256&flash") == plan
    with pytest.raises(UserError, match="only='1024&flash' names no row"):
        admitted(plan, "1024&flash")
    with pytest.raises(UserError, match=r"only='fly' names no row: .*T: 256 to 1024; attention: flash \| manual"):
        admitted(plan, "flash,fly")
