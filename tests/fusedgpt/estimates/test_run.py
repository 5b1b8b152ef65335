"""A run's settings, and how memory and time depend on them together."""

import dataclasses

import pytest

from fusedgpt.estimates.memory import Memory
from fusedgpt.estimates.run import Run
from fusedgpt.estimates.step import Step
from model import GPTConfig
from tests import plan_errors
from tests.launch import ROOT

GPT2 = GPTConfig(**plan_errors.GPT2)
H100 = plan_errors.MACHINES["H100"]


def test_the_page_has_the_errors_of_today():
    page = (ROOT / "results" / "plan" / "README.md").read_text()
    for line in (*plan_errors.time_table(), *plan_errors.reserved_table(), *plan_errors.process_table()):
        assert line in page, line


def test_one_process_holds_all_of_the_model():
    # train.py without torchrun, with the settings of a run on many GPUs
    alone = Run(4, parallel="fsdp", shard_size=8)
    assert alone.shards == 1
    assert Memory.of(GPT2, alone) == Memory.of(GPT2, Run(4))


@pytest.mark.parametrize("attention", ["flash", "manual", "blocked"])
def test_less_is_kept_if_more_is_computed_again(attention):
    run = Run(8, attention=attention)
    runs = [dataclasses.replace(run, recompute=what) for what in ("none", "attention", "block")]
    kept = [Memory.of(GPT2, each).activations for each in runs]
    assert kept[0] >= kept[1] > kept[2]
    seconds = [Step.of(GPT2, each, H100).total for each in runs]
    assert seconds[0] < seconds[1] < seconds[2]


GPT2_XL = dict(vocab_size=50257, vocab_multiple=64, bias=False, n_layer=48, n_head=25, n_embd=1600)
BABY = dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384)
CPU = dict(compile=False, cpu=True)
# (GPT-2, run, bytes, seconds of a step): the estimates when GPT-2 was the only family, computed at commit 99bee97
BEFORE = [
    ({}, dict(batch_size=12), 7193723904, 0.029765759086942543),
    (
        dict(BABY, vocab_multiple=1, bias=True, dropout=0.2, document_start=0, loss="chunked"),
        dict(batch_size=64, attention="masked", **CPU),
        3648682752,
        0.005525168022276176,
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
    assert Memory.of(config, run).total == size
    assert Step.of(config, run, H100).total == pytest.approx(seconds, rel=1e-14)
