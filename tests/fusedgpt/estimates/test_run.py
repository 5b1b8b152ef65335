"""A run's settings, and how memory depends on them together."""

import dataclasses

import pytest

from fusedgpt.estimates.memory import Memory
from fusedgpt.estimates.run import Run
from model import GPTConfig

GPT2 = GPTConfig(vocab_size=50257, vocab_multiple=64, bias=False)


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
