"""What GPUs are assumed to reach, against what was measured."""

import pytest

from fusedgpt.estimates.rates import Machine
from fusedgpt.machine.gpus import GPUS, NETWORKS


def test_no_product_is_planned_faster_than_the_fastest_that_was_measured():
    # 65 % of an MI300X's peak was assumed, but its best large products reach 60 %
    products = {name: Machine.of(gpu, NETWORKS["ndr"]).products for name, gpu in GPUS.items()}
    assert products["MI300X"] < 781.9e12 and products["A100"] == products["A100 40GB"] < 267.9e12
    assert products["H200"] == pytest.approx(640e12, rel=0.01)  # as measured over 768 channels
