"""A study in a sentence."""

import pytest

from fusedgpt.studies import outcomes, words
from tests.fusedgpt.studies.by_hand import study

ENDS = {"a": 0.0, "b": -0.1, "c": -0.3}  # of each variant, beside the baseline's


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        ("a", "2 of 2 variants are better than a, most of all c by 0.3000 (validation loss)"),
        ("b", "1 of 2 variants is better than b: c by 0.2000 (validation loss)"),
        ("c", "No variant is better than c, and 2 of 2 are worse"),
    ],
)
def test_a_headline_names_the_best_of_several(tmp_path, baseline, said):
    variants = {name: {"n_layer": n} for n, name in enumerate(ENDS, start=1)}
    near = {name: end * 1.001 for name, end in ENDS.items()}, ENDS, {name: end * 0.999 for name, end in ENDS.items()}
    losses = {name: {s: [4.0, 2 + s / 10 + ends[name]] for s, ends in enumerate(near)} for name in ENDS}
    assert words.headline(outcomes.read(study(tmp_path, variants, losses, baseline=baseline))) == said
