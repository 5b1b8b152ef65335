"""What certainly does not fit is refused before it is built."""

import dataclasses

import pytest
import torch

from fusedgpt.errors import UserError
from fusedgpt.estimates.fits import check_run, in_words
from fusedgpt.estimates.training_memory import Memory
from fusedgpt.machine import memory
from fusedgpt.settings import Settings
from model import GPTConfig

CPU, GIB = torch.device("cpu"), 1 << 30


def check(config, batch_size, device, shards=1, **settings):
    s = Settings(batch_size=batch_size, parallel="fsdp" if shards > 1 else "ddp", **settings)
    check_run(s, shards, print, device, config)


def test_only_what_certainly_cannot_fit_is_refused(monkeypatch):
    whole = GPTConfig(block_size=1024, vocab_size=50304, n_layer=1, n_head=1, n_embd=64)
    weights, logits = whole.num_params, 3 * 1024 * 50304
    for config, options, needed in (
        (whole, dict(dtype="float32"), 12 * weights + 4 * logits),
        (whole, dict(dtype="bfloat16"), 12 * weights + 2 * logits),
        (whole, dict(dtype="float32", eval_only=True), 4 * weights + 4 * logits),
        (whole, dict(dtype="float32", optimizer="muon"), 12 * weights - 4 * 12 * 64 * 64 + 4 * logits),
        (whole, dict(dtype="float32", shards=2), 6 * weights + 4 * logits),  # they were refused
        (dataclasses.replace(whole, loss="chunked"), dict(dtype="float32"), 12 * weights + 4 * logits // 8),
    ):
        monkeypatch.setattr(memory, "total_memory", lambda device, n=needed: n)
        check(config, 3, CPU, **options)
        monkeypatch.setattr(memory, "total_memory", lambda device, n=needed: n - 1)
        with pytest.raises(UserError, match=r"the logits of 3 x 1024 tokens .*lower --batch_size"):
            check(config, 3, CPU, **options)


def test_a_gpus_memory_is_its_own(monkeypatch):
    gpu, config = torch.device("cuda", 0), GPTConfig()
    there = {"cpu": 10 * GIB, "cuda": GIB}
    monkeypatch.setattr(memory, "total_memory", lambda device: there[device.type])
    with pytest.raises(UserError, match=r"cuda:0 has 1.0 GiB"):
        check(config, 1, gpu, dtype="bfloat16")


def test_an_estimate_in_words():
    found = Memory(2**30, 2**10, 2 * 2**30, 2**29, 0, 0)  # what rounds to nothing is not named
    line = "memory: about 3,584 MiB of tensors in each of 8 processes: weights 1,024, optimizer 2,048, activations 512"
    assert in_words(found, 8) == line
