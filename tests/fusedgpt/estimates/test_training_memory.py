"""Memory of a run: estimates against what a step really holds, and against computations by hand."""

import dataclasses

import pytest
import torch

from fusedgpt.estimates.training_memory import Load, Memory, least_memory
from fusedgpt.machine.files import read_jsonl
from model import GPT, GPTConfig
from tests.fusedgpt.estimates import measured
from tests.launch import ROOT, together

GPT2 = GPTConfig(vocab_size=50257, vocab_multiple=64, bias=False)

SMALL = measured.SMALL | dict(n_layer=2)
MANY_IDS = SMALL | dict(n_layer=1, vocab_size=8000)
FLASH, MANUAL = (dict(each, batch_size=4) for each in (measured.FLASH, measured.MANUAL))
# one of each kind; all of `measured` take minutes
QUICK = [(SMALL, MANUAL), (SMALL, MANUAL | dict(recompute="attention")), (SMALL, FLASH | dict(recompute="block"))]
QUICK += [(MANY_IDS, FLASH), (measured.MANY_IDS | dict(loss="chunked"), FLASH)]
QUICK += [(SMALL, dict(batch_size=1, attention="flash"))]
QUICK += [(SMALL | dict(dropout=0.1), dict(batch_size=1, attention="manual"))]
QUICK += [(SMALL | measured.PARTS | dict(n_inner=352), FLASH)]
QUICK += [(SMALL | dict(block_size=512, window=64), dict(measured.BLOCKED, batch_size=2))]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in measured.ALONE]


@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_memory_is_what_a_step_really_holds(case):
    # without weights and moments: they are easy to count, and would hide an error in the rest
    shape, how = case
    found = measured.memory_error(0, 1, *case)
    assert found["estimate"] == pytest.approx(found["measured"], rel=0.15)
    # train.py refuses by least_memory: it has to stay below what a run holds
    config, run = GPTConfig(**shape), Load(**how)
    held = found["measured"] + 12 * config.num_params
    assert least_memory(config, run.batch_size, run.itemsize, backward=True, muon=False) <= held


@pytest.mark.slow  # two processes that share a model
@pytest.mark.parametrize("case", measured.SHARED)
def test_memory_of_a_shared_model_is_what_a_step_really_holds(case):
    found = together(2, measured.memory_error, *case)[0]
    assert found["estimate"] == pytest.approx(found["measured"], rel=0.15)


def test_memory_of_an_h200_is_at_most_two_per_cent_off():
    # what PyTorch held at the peak of each rung of the ladder there
    lines = read_jsonl(ROOT / "results" / "h200" / "ladder" / "rows.jsonl")
    rows = [line for line in lines if line["kind"] == "contender" and line["status"] == "measured"]
    assert len(rows) >= 6
    for row in rows:
        ran = row["ran"]
        config = dataclasses.replace(GPT2, vocab_size=ran["padded_vocab_size"], vocab_multiple=1)
        found = Memory.of(config, Load(12, attention=ran["attention"]))
        assert row["peak_memory"] == pytest.approx(found.total, rel=0.02), row["name"]


def test_weights_gradients_and_moments_are_sixteen_bytes_over_the_shards():
    # one token: next to nothing else
    tiny = dataclasses.replace(GPT2, block_size=1)
    with torch.device("meta"):
        N = GPT(tiny).get_num_params(non_embedding=False)
    for run, divided in ((Load(1), 1), (Load(1, 8, gpus=8), 1), (Load(1, 8, gpus=8, parallel="fsdp"), 8)):
        found = Memory.of(tiny, run)
        assert (found.weights, found.optimizer) == (4 * N / divided, 8 * N / divided)
    assert Memory.of(tiny, Load(1)).gradients >= 4 * N
    assert Memory.of(tiny, Load(1, ema_decay=0.999)).optimizer == 12 * N
    groups = Memory.of(tiny, Load(1, 8, gpus=8, parallel="fsdp", shard_size=2))
    assert groups.weights == 2 * N
    muon = Memory.of(tiny, Load(1, 8, gpus=8, parallel="fsdp", optimizer="muon"))  # one mean for 12 L C² weights
    assert muon.optimizer == (8 * N - 4 * 12 * 12 * 768**2) / 8


def test_earlier_micro_batches_leave_a_whole_gradient():
    # until it synchronises, FSDP2 keeps gradients whole: otherwise a plan would promise eight times too much room
    once, twice = (Memory.of(GPT2, Load(12, 8 * n, gpus=8, parallel="fsdp")) for n in (1, 2))
    assert twice.total - once.total == pytest.approx(4 * GPT2.num_params, rel=0.01)
    ddp = Memory.of(GPT2, Load(12, 8, gpus=8))
    assert ddp.total - Memory.of(GPT2, Load(12)).total == 4 * GPT2.num_params  # its buckets stay


@pytest.mark.parametrize(
    ("attention", "kv_heads"), [("manual", 4), ("blocked", 4), ("flash", 4), ("masked", 4), ("flash", 2), ("manual", 2)]
)
def test_masks_of_documents_are_counted(attention, kv_heads):
    # with shared keys a fused kernel has the mask once for each head that shares them, which was not counted
    added = {}
    for start in (None, 0):
        shape = dict(block_size=512, vocab_size=65, n_layer=1, n_head=4, n_embd=64, attention=attention)
        shape |= dict(n_kv_head=kv_heads)
        config, kept = GPTConfig(**shape, document_start=start), {}
        ids = torch.zeros(3, 512, dtype=torch.long)

        def keep(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x  # kept, so that its address is not given again
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            GPT(config)(ids, ids, logits=False)
        estimate = Memory.of(config, Load(3, attention=attention, dtype="float32", cpu=True, compile=False))
        added[start] = sum(x.untyped_storage().nbytes() for x in kept.values()), estimate.activations
    measured, estimated = (with_masks - without for with_masks, without in zip(added[0], added[None]))
    assert estimated == pytest.approx(measured, rel=0.01 if attention != "masked" else 0.5)  # it has a causal one too


def test_one_process_holds_all_of_the_model():
    # train.py without torchrun, with the settings of a run on many GPUs
    alone = Load(4, parallel="fsdp", shard_size=8)
    assert alone.shards == 1
    assert Memory.of(GPT2, alone) == Memory.of(GPT2, Load(4))
