"""What is written beside a figure."""

import torch

from fusedgpt.environment import environment


def test_environment_names_what_a_figure_depends_on():
    found = environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__ and found["device"] and found["threads"] >= 1
