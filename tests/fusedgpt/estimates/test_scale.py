"""Memory and time of a run: estimates against what was measured, and against computations by hand."""

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fusedgpt.estimates import fits, scale
from fusedgpt.estimates.scale import Machine, Run
from fusedgpt.machine.gpus import GPUS, NETWORKS
from fusedgpt.parallel import distributed
from fusedgpt.training.optimizer import orthogonalised
from model import GPT, GPTConfig
from tests import plan_errors
from tests.conftest import ROOT, script

H100 = Machine.of(GPUS["H100"], NETWORKS["ndr"])
GPT2 = GPTConfig(vocab_size=50257, vocab_multiple=64, bias=False)
SMALL = GPTConfig(**plan_errors.SMALL)


def of_case(case):
    return "-".join(str(value) for part in case for value in part.values())


@pytest.mark.parametrize("case", plan_errors.ALONE + plan_errors.FAMILIES + plan_errors.COMPILED, ids=of_case)
def test_memory_is_what_a_step_really_holds(case):
    # without weights and moments: they are easy to count, and would hide an error in the rest
    shape, how = case
    found = plan_errors.memory_error(*case)
    assert found["estimate"] == pytest.approx(found["measured"], rel=0.15)
    # train.py refuses by least_memory: it has to stay below what a run holds
    config, run = GPTConfig(**shape), Run(**how)
    held = found["measured"] + 12 * config.num_params
    assert scale.least_memory(config, run.batch_size, run.itemsize, backward=True, muon=False) <= held


def test_memory_of_a_shared_model_is_what_a_step_really_holds():
    for (_, how), found in zip(plan_errors.SHARED, plan_errors.shared_errors()):
        assert found["estimate"] == pytest.approx(found["measured"], rel=0.15), how


def test_every_measured_step_lies_in_the_range():
    # each step is estimated with REST fitted to all others: a range around its own fit would hold anything
    (low, high), found = scale.TIME_RANGE, plan_errors.left_out()
    outside = {case.what: ratio for case, ratio in found if not low <= ratio <= high}
    assert len(found) == 29 and not outside
    ratios = [ratio for _, ratio in found]
    assert low > min(ratios) - 0.05 and high < max(ratios) + 0.05  # and the range is no wider than needed


def test_times_are_neither_optimistic_nor_pessimistic():
    # 15 of 18 estimates used to be below what was measured, the median one by 17 %
    cases = list(plan_errors.times())
    below = [case for case in cases if case.estimate() < case.measured]
    assert len(cases) / 3 < len(below) < 2 * len(cases) / 3
    assert plan_errors.fitted(cases) == pytest.approx(scale.REST, abs=0.01)


def test_memory_that_was_reserved_on_gpus_lies_in_the_range():
    for gpus, measured, found in plan_errors.reserved():
        low, high = found.range
        assert low <= measured <= high, gpus
        assert found.total == pytest.approx(measured, rel=0.15)


def test_weights_and_moments_are_no_matter_of_doubt():
    found = scale.Memory(weights=4, gradients=4, optimizer=8, activations=3, logits=2, copies=1)
    assert found.range == pytest.approx((12 + 0.8 * 10, 12 + 1.2 * 10))


def test_no_product_is_planned_faster_than_the_fastest_that_was_measured():
    # 65 % of an MI300X's peak was assumed, but its best large products reach 60 %
    products = {name: Machine.of(gpu, NETWORKS["ndr"]).products for name, gpu in GPUS.items()}
    assert products["MI300X"] < 781.9e12 and products["A100"] == products["A100 40GB"] < 267.9e12
    assert products["H200"] == pytest.approx(640e12, rel=0.01)  # as measured over 768 channels


def test_the_page_has_the_errors_of_today():
    page = (ROOT / "results" / "plan" / "README.md").read_text()
    for line in (*plan_errors.time_table(), *plan_errors.reserved_table(), *plan_errors.process_table()):
        assert line in page, line


def test_weights_gradients_and_moments_are_sixteen_bytes_over_the_shards():
    # one token: next to nothing else
    tiny = dataclasses.replace(GPT2, block_size=1)
    N = GPT(tiny).get_num_params(non_embedding=False)
    for run, divided in ((Run(1), 1), (Run(1, 8, gpus=8), 1), (Run(1, 8, gpus=8, parallel="fsdp"), 8)):
        found = scale.memory(tiny, run)
        assert (found.weights, found.optimizer) == (4 * N / divided, 8 * N / divided)
    assert scale.memory(tiny, Run(1)).gradients >= 4 * N
    groups = scale.memory(tiny, Run(1, 8, gpus=8, parallel="fsdp", shard_size=2))
    assert groups.weights == 2 * N


def test_earlier_micro_batches_leave_a_whole_gradient():
    # until it synchronises, FSDP2 keeps gradients whole: otherwise a plan would promise eight times too much room
    once, twice = (scale.memory(GPT2, Run(12, 8 * n, gpus=8, parallel="fsdp")) for n in (1, 2))
    assert twice.total - once.total == pytest.approx(4 * GPT2.num_params, rel=0.01)
    ddp = scale.memory(GPT2, Run(12, 8, gpus=8))
    assert ddp.total - scale.memory(GPT2, Run(12)).total == 4 * GPT2.num_params  # its buckets stay


@pytest.mark.parametrize("attention", ["manual", "blocked", "flash", "masked"])
def test_masks_of_documents_are_counted(attention):
    added = {}
    for start in (None, 0):
        shape = dict(block_size=512, vocab_size=65, n_layer=1, n_head=4, n_embd=64, attention=attention)
        config, kept = GPTConfig(**shape, document_start=start), {}
        ids = torch.zeros(3, 512, dtype=torch.long)

        def keep(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x  # kept, so that its address is not given again
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            GPT(config)(ids, ids, logits=False)
        estimate = scale.memory(config, Run(3, attention=attention, dtype="float32", cpu=True, compile=False))
        added[start] = sum(x.untyped_storage().nbytes() for x in kept.values()), estimate.activations
    measured, estimated = (with_masks - without for with_masks, without in zip(added[0], added[None]))
    assert estimated == pytest.approx(measured, rel=0.01 if attention != "masked" else 0.5)  # it has a causal one too


@pytest.mark.parametrize("attention", ["flash", "manual", "blocked"])
def test_less_is_kept_if_more_is_computed_again(attention):
    run = Run(8, attention=attention)
    runs = [dataclasses.replace(run, recompute=what) for what in ("none", "attention", "block")]
    kept = [scale.memory(GPT2, each).activations for each in runs]
    assert kept[0] >= kept[1] > kept[2]
    seconds = [scale.step(GPT2, each, H100).total for each in runs]
    assert seconds[0] < seconds[1] < seconds[2]


GPT2_XL = dict(vocab_size=50257, vocab_multiple=64, bias=False, n_layer=48, n_head=25, n_embd=1600)
BABY = dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384)
CPU = dict(compile=False, cpu=True)
# (GPT-2, run, bytes, seconds of a step): the estimates when GPT-2 was the only family, computed at commit 99bee97
BEFORE = [
    ({}, dict(batch_size=12), 7193723904, 0.029765759086942543),
    (
        {},
        dict(batch_size=4, attention="blocked", optimizer="muon", gradient_accumulation_steps=16, gpus=8),
        6037352448,
        0.031843692435861486,
    ),
    (
        dict(vocab_multiple=1, bias=True),
        dict(batch_size=12, attention="manual", dtype="float32", **CPU),
        23487568896,
        0.044579753442157366,
    ),
    (
        dict(BABY, vocab_multiple=1, bias=True, dropout=0.2, document_start=0, loss="chunked"),
        dict(batch_size=64, attention="masked", **CPU),
        3648682752,
        0.005525168022276176,
    ),
    (
        dict(BABY, vocab_multiple=1, bias=True),
        dict(batch_size=2, gpus=16, gradient_accumulation_steps=16, parallel="fsdp", attention="manual")
        | dict(recompute="attention"),
        67105312,
        0.001492800439283582,
    ),
    (
        GPT2_XL,
        dict(batch_size=2, gpus=16, gradient_accumulation_steps=32, parallel="fsdp", shard_size=8, recompute="block"),
        10297282400,
        0.14170824119798603,
    ),
]


@pytest.mark.parametrize(("shape", "how", "size", "seconds"), BEFORE)
def test_estimates_of_gpt2_are_those_of_before(shape, how, size, seconds):
    config, run = dataclasses.replace(GPT2, **shape), Run(**how)
    assert scale.memory(config, run).total == size
    assert scale.step(config, run, H100).total == pytest.approx(seconds, rel=1e-14)


# Llama's parts, with heads that are wider than n_embd / n_head and a window in every second layer
LLAMA = dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_inner=352, n_kv_head=2, head_size=48, qk_norm=True)
LLAMA |= dict(tie_embeddings=False, window=100, window_pattern="SL")


def test_a_window_computes_what_it_shows():
    # fused kernels do the scores in the window: about all of them, where causal attention does half
    whole = dataclasses.replace(GPT2, block_size=8192)
    narrow = dataclasses.replace(whole, window=512)
    seconds = [scale.step(config, Run(1), H100).attention for config in (whole, narrow)]
    assert seconds[1] / seconds[0] == pytest.approx(2 * 512 * (1 - 512 / 16384) / 8192)
    counted = [scale.step(config, Run(1, attention="blocked"), H100).attention for config in (whole, narrow)]
    assert 512 / 4096 < counted[1] / counted[0] < (512 + scale.BLOCK) / 4096 * 1.01


# FLOP/s of 1 and memory without end: times are FLOPs
COUNTER = Machine(peak=1, products=1, flash=math.inf, traffic=math.inf)


@pytest.mark.parametrize("loss", ["whole", "chunked"])
@pytest.mark.parametrize(
    ("attention", "recompute"),
    [("manual", "none"), ("blocked", "none"), ("manual", "attention"), ("manual", "block")],
    ids=str,
)
@pytest.mark.parametrize("family", [{}, LLAMA, dict(parallel_block=True)], ids=["GPT-2", "Llama", "side by side"])
def test_products_are_those_that_pytorch_counts(attention, loss, recompute, family):
    # a chunked loss used to cost nothing, and recomputed attention cost a product that PyTorch leaves out
    config = dataclasses.replace(SMALL, block_size=512, attention=attention, loss=loss, recompute=recompute, **family)
    x = torch.randint(config.vocab_size, (2, 512))
    with FlopCounterMode(display=False) as counted:
        GPT(config)(x, x, logits=False)[1].backward()
    found = scale.step(config, Run(2, attention=attention, recompute=recompute), COUNTER)
    assert found.products + found.attention == pytest.approx(counted.get_total_flops(), rel=0.002)


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["GPT-2", "Llama"])
def test_muons_products_are_those_that_pytorch_counts(family):
    config = dataclasses.replace(SMALL, **family)
    with FlopCounterMode(display=False) as counted:
        for block in GPT(config).transformer.h:
            for matrix in (p for p in block.parameters() if p.dim() == 2):
                orthogonalised([matrix.detach()], torch.float32)
    found = scale.step(config, Run(2, optimizer="muon"), COUNTER)
    assert found.optimizer == pytest.approx(counted.get_total_flops())
    assert family or counted.get_total_flops() == SMALL.n_layer * 280 * SMALL.n_embd**3
    adamw, muon = (scale.step(GPT2, Run(12, optimizer=name), H100).optimizer for name in ("adamw", "muon"))
    assert muon > 2 * adamw


def test_one_process_holds_all_of_the_model():
    # train.py without torchrun, with the settings of a run on many GPUs
    alone = Run(4, parallel="fsdp", shard_size=8)
    assert alone.shards == 1
    assert scale.memory(GPT2, alone) == scale.memory(GPT2, Run(4))


def test_a_bucket_is_that_of_ddp():
    assert scale.BUCKET == distributed.BUCKET_MB * 2**20


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ddp_sends_what_a_ring_does(ranks):
    # gradients have a part for each rank: all parts but one are sent to be added up, and again to be gathered
    found = scale.step(GPT2, Run(1, ranks, gpus=ranks), H100)
    assert found.sent == pytest.approx(2 * (ranks - 1) * 4 * GPT2.num_params / ranks)


def test_fsdp_gathers_twice_a_micro_batch_and_reduces_once():
    n, hidden = 8, 12 * 12 * 768**2
    for micro_steps in (1, 3):
        found = scale.step(GPT2, Run(1, n * micro_steps, gpus=n, parallel="fsdp"), H100)
        gathered = micro_steps * (2 * 2 * hidden + 4 * (GPT2.num_params - hidden))  # root: once, in float32
        assert found.sent == pytest.approx((n - 1) / n * (gathered + 4 * GPT2.num_params))


def test_groups_leave_the_network_to_the_gradients():
    far = Run(1, 4 * 256, gpus=256, parallel="fsdp")
    near = dataclasses.replace(far, shard_size=8)
    slow = dataclasses.replace(H100, network=H100.network / 10)
    free = dataclasses.replace(H100, network=math.inf, network_hop=0.0)

    def seconds(run, machine):
        return scale.step(GPT2, run, machine).communication

    assert seconds(near, slow) - seconds(near, H100) < (seconds(far, slow) - seconds(far, H100)) / 2
    assert seconds(near, free) < seconds(far, free)  # fewer hops


def test_a_ring_over_nodes_is_as_fast_as_their_network():
    # eight GPUs with a network card each leave a node together; one of a node alone
    at_once = dataclasses.replace(H100, hop=0.0, network_hop=0.0)
    sixteen = scale.step(GPT2, Run(1, 16, gpus=16), at_once)
    bytes_each = 15 / 16 * 8 * GPT2.num_params
    assert sixteen.communication == pytest.approx(bytes_each / min(H100.link, 8 * H100.network))
    alone = scale.step(GPT2, Run(1, 16, gpus=16), dataclasses.replace(at_once, per_node=1))
    assert alone.communication == pytest.approx(bytes_each / H100.network)


def test_communication_hides_behind_computation():
    # except for the last bucket, or a block and the root: no computation is left to hide them
    for run in (Run(64, 8, gpus=8), Run(64, 8, gpus=8, parallel="fsdp")):
        found = scale.step(GPT2, run, H100)
        assert 0 < found.exposed < found.communication
        assert found.total == pytest.approx(found.computation + found.exposed)
    one = scale.step(GPT2, Run(64), H100)
    assert one.communication == one.exposed == one.sent == 0
    slow = scale.step(GPT2, Run(1, 8, gpus=8), dataclasses.replace(H100, link=1e9))
    assert slow.bound == "communication" and slow.total > slow.communication


def test_no_number_of_gpus_makes_a_step_shorter_than_its_share():
    alone = scale.step(GPT2, Run(64, 8), H100).computation
    for gpus in (2, 4, 8):
        shared = scale.step(GPT2, Run(64, 8, gpus=gpus), H100)
        assert shared.computation >= alone / gpus and shared.total >= alone / gpus


def test_it_starts_without_pytorch():
    assert script("-c", "import sys, fusedgpt.estimates.scale; print('torch' in sys.modules)").stdout.strip() == "False"


def test_an_estimate_in_words():
    found = scale.Memory(2**30, 0, 2 * 2**30, 2**29, 0, 0)
    line = "memory: about 3.50 GiB of tensors in each of 8 processes: weights 1.00, optimizer 2.00, activations 0.50"
    assert fits.in_words(found, 8) == line
    # a small model's line said "gradients 0": what rounds to nothing is not named
    small = fits.in_words(scale.Memory(2**20, 2**10, 2**20, 0, 0, 0), 1)
    assert small == "memory: about 2 MiB of tensors: weights 1, optimizer 1"
    assert fits.in_words(scale.Memory(2**10, 0, 0, 0, 0, 0), 1) == "memory: about 0 MiB of tensors"
