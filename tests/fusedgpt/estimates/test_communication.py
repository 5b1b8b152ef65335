"""What GPUs send each other in a step, against computations by hand."""

import dataclasses
import math

import pytest

from fusedgpt.estimates.communication import BUCKET
from fusedgpt.estimates.run import Run
from fusedgpt.estimates.step import Step
from fusedgpt.parallel import distributed
from model import GPTConfig
from tests import plan_errors

GPT2 = GPTConfig(**plan_errors.GPT2)
H100 = plan_errors.MACHINES["H100"]


def test_a_bucket_is_that_of_ddp():
    assert BUCKET == distributed.BUCKET_MB * 2**20


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ddp_sends_what_a_ring_does(ranks):
    # gradients have a part for each rank: all parts but one are sent to be added up, and again to be gathered
    found = Step.of(GPT2, Run(1, ranks, gpus=ranks), H100)
    assert found.sent == pytest.approx(2 * (ranks - 1) * 4 * GPT2.num_params / ranks)


def test_fsdp_gathers_twice_a_micro_batch_and_reduces_once():
    n, hidden = 8, 12 * 12 * 768**2
    for micro_steps in (1, 3):
        found = Step.of(GPT2, Run(1, n * micro_steps, gpus=n, parallel="fsdp"), H100)
        gathered = micro_steps * (2 * 2 * hidden + 4 * (GPT2.num_params - hidden))  # root: once, in float32
        assert found.sent == pytest.approx((n - 1) / n * (gathered + 4 * GPT2.num_params))


def test_groups_leave_the_network_to_the_gradients():
    far = Run(1, 4 * 256, gpus=256, parallel="fsdp")
    near = dataclasses.replace(far, shard_size=8)
    slow = dataclasses.replace(H100, network=H100.network / 10)
    free = dataclasses.replace(H100, network=math.inf, network_hop=0.0)

    def seconds(run, machine):
        return Step.of(GPT2, run, machine).communication

    assert seconds(near, slow) - seconds(near, H100) < (seconds(far, slow) - seconds(far, H100)) / 2
    assert seconds(near, free) < seconds(far, free)  # fewer hops


def test_a_ring_over_nodes_is_as_fast_as_their_network():
    # eight GPUs with a network card each leave a node together; one of a node alone
    at_once = dataclasses.replace(H100, hop=0.0, network_hop=0.0)
    sixteen = Step.of(GPT2, Run(1, 16, gpus=16), at_once)
    bytes_each = 15 / 16 * 8 * GPT2.num_params
    assert sixteen.communication == pytest.approx(bytes_each / min(H100.link, 8 * H100.network))
    alone = Step.of(GPT2, Run(1, 16, gpus=16), dataclasses.replace(at_once, per_node=1))
    assert alone.communication == pytest.approx(bytes_each / H100.network)


def test_muon_sends_rows_to_owners_and_gets_rows_back():
    # by hand, GPT-2 on 4 GPUs: of each of 12 layers' four matrices, a GPU has a quarter of the rows and owns 3 of 12.
    # It sends three quarters of what it has to the others, 2 bytes a weight, and three quarters of the updates it owns
    adamw, muon = (
        Step.of(GPT2, Run(1, 4, gpus=4, parallel="fsdp", optimizer=name), H100) for name in ("adamw", "muon")
    )
    held = 12 * 12 * 768**2 // 4
    assert muon.sent - adamw.sent == 2 * (3 / 4 * held * 2) == 63_700_992
    # nothing hides it: three quarters of 12 C² weights in 3 layers, each way, and hops of 12 messages each way
    waits = 2 * (3 / 4 * held * 2 / H100.link + 12 * H100.hop)
    assert muon.exposed - adamw.exposed == pytest.approx(waits)
    assert muon.communication - adamw.communication == pytest.approx(waits)


def test_muon_waits_for_the_gpu_that_owns_the_most():
    # 12 matrices of a shape on 8 GPUs: one each, and four GPUs have a second. On ddp nothing is sent
    run = Run(1, 8, gpus=8, parallel="fsdp", optimizer="muon")
    eight, free = H100.per_node, dataclasses.replace(H100, hop=0.0, network_hop=0.0)
    assert eight == 8
    adamw, muon = (Step.of(GPT2, dataclasses.replace(run, optimizer=name), free) for name in ("adamw", "muon"))
    assert muon.exposed - adamw.exposed == pytest.approx(2 * 7 / 8 * 2 * 12 * 768**2 * 2 / free.link)
    # alone on its node, a GPU sends over the network what it sends
    far = dataclasses.replace(free, per_node=1)
    adamw, muon = (Step.of(GPT2, dataclasses.replace(run, optimizer=name), far) for name in ("adamw", "muon"))
    assert muon.exposed - adamw.exposed == pytest.approx(2 * 7 / 8 * 2 * 12 * 768**2 * 2 / far.network)
    ddp = [Step.of(GPT2, Run(1, 8, gpus=8, optimizer=name), H100) for name in ("adamw", "muon")]
    assert ddp[0].sent == ddp[1].sent and ddp[0].communication == ddp[1].communication


def test_groups_of_muon_exchange_within_a_copy():
    # the copies compute the same, each for itself
    near = Run(1, 16, gpus=16, parallel="fsdp", shard_size=4)
    adamw, muon = (Step.of(GPT2, dataclasses.replace(near, optimizer=name), H100) for name in ("adamw", "muon"))
    assert muon.sent - adamw.sent == 63_700_992
