"""Results of steps: by name, as means over the ranks, with the flags of any rank."""

import pytest
import torch

from fusedgpt.errors import UserError
from fusedgpt.parallel.distributed import Ranks
from fusedgpt.training.step_results import StepResults


class Two(Ranks):
    """Rank 0 of two; the other has ten times its numbers, and raises every flag."""

    def all_reduce(self, values):
        return values.double() + torch.where(values == 0, 1.0, 10 * values)


def test_results_are_means_over_the_ranks_and_a_flag_of_any_rank_counts():
    results = StepResults(Two(world=2))
    results.add({"loss": torch.tensor(2.0), "grad_norm": torch.tensor([4.0])}, {"stopped": False}, lr=0.1)
    results.add({"loss": torch.tensor(6.0)}, {"stopped": False}, lr=0.2)  # a step may return others
    assert results.read() == ([{"lr": 0.1, "loss": 11.0, "grad_norm": 22.0}, {"lr": 0.2, "loss": 33.0}], {"stopped"})
    assert results.read() == ([], set())


def test_a_flag_that_no_rank_raises_is_not_read_as_one():
    results = StepResults(Ranks())
    results.add({"loss": torch.tensor(float("nan"))}, {"time is up": False, "stopped": True}, lr=0.1)
    steps, raised = results.read()
    assert raised == {"stopped"} and steps[0]["loss"] != steps[0]["loss"]


def test_a_plain_number_counts_too_and_what_no_line_can_have_is_named():
    results = StepResults(Ranks())
    results.add({"loss": torch.tensor(2.0), "tokens": 7}, {}, lr=0.1)
    assert results.read() == ([{"lr": 0.1, "loss": 2.0, "tokens": 7.0}], set())
    with pytest.raises(UserError, match=r"returned 'norms' of shape \(3,\), not a single number"):
        results.add({"norms": torch.ones(3)}, {}, lr=0.1)
    with pytest.raises(UserError, match=r"returned 'iter', but metrics\.jsonl has that name"):
        results.add({"loss": torch.tensor(2.0), "iter": torch.tensor(1.0)}, {}, lr=0.1)
