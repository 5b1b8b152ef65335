"""The lists among the settings of benchmarks."""

import pytest

from fusedgpt.bench.settings import heads, lengths
from fusedgpt.errors import UserError


def test_lengths_are_ranges_or_single():
    assert lengths("256-512-64,1024") == [256, 320, 384, 448, 512, 1024]
    for wrong in ("", "0", "a", "1-2", "5-1-1"):
        with pytest.raises(UserError, match="must be like 256,512"):
            lengths(wrong)


def test_heads_are_numbers_of_heads_and_their_size():
    assert heads("32x128,12x64") == [(32, 128), (12, 64)]
