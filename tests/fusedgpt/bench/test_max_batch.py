"""The largest micro-batch: the search, the estimate, and the limit of memory."""

import pytest
import torch

from fusedgpt.bench import max_batch, training
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.small import settings

CPU = torch.device("cpu")


@pytest.mark.parametrize("guess", [0, 1, 10, 39, 100])
@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 24, 39])
def test_the_largest_is_found_by_doubling_and_bisection(most, guess):
    tried = []

    def fits(n):
        tried.append(n)
        return n <= most

    assert max_batch.largest(fits, guess) == most
    assert len(tried) == len(set(tried)) <= 2 * max(most, guess).bit_length() + 1


def test_the_estimate_is_near_a_hand_count(tmp_path, data):
    # what the hand-written attention alone keeps for backward in float32: the softmax of its scores, in every layer
    s = settings("max_batch", tmp_path, data, block_size=128, n_embd=32, dtype="float32")
    each = {}
    for name in ("manual", "flash"):
        s.attention = name
        fixed, each[name] = max_batch.estimate(s, CPU, torch.float32)
        weights = 4 * 4 * (12 * 2 * 32**2 + (128 + 128) * 32)  # float32, gradient, AdamW's two; LayerNorms aside
        assert 0.75 * weights < fixed < 1.5 * weights
    kept = 2 * 2 * 128 * 128 * 4
    assert 0.9 * kept < each["manual"] - each["flash"] < 2.5 * kept


def test_a_budget_ends_an_allocation_on_a_cpu(tmp_path, data):
    s = settings("max_batch", tmp_path, data, batch_size=4096, block_size=64)
    held, resident = training.held_by_pytorch()
    assert resident > 0
    asked = training.settings(s, max_batch.Settings)
    with pytest.raises(MemoryError):
        training.run(asked, tmp_path / "run", held + 2**28)
    with pytest.raises(UserError, match="cannot be split over"):
        training.run({**asked, "n_head": 3}, tmp_path / "run")


def test_max_batch_searches_then_trains_for_its_time(tmp_path, data, monkeypatch):
    sizes, done = [], {}

    def run(settings, out_dir, memory=None, trace=None):
        sizes.append(settings["batch_size"])
        if settings["batch_size"] > 5 or (settings["batch_size"] == 5 and settings["max_seconds"]):
            raise MemoryError("full")
        done.update(settings)
        step = {"kind": "train", "ms": 100.0, "peak_memory": 7, "loss": 1.0, "mfu": 0.5, "tokens_per_s": 10.0}
        ran = dict.fromkeys(("attention", "dtype", "compile", "padded_vocab_size", "device"))
        record = {"tokens_per_step": 64, "mfu": {"peak_flops": 1.0, "peak_source": ""}, "receipt": {}, **ran}
        return record, [*[step] * 6, {"kind": "eval", "val_loss": 2.5}]

    monkeypatch.setattr(training, "run", run)
    monkeypatch.setattr(training, "held_by_pytorch", lambda: (100, 50))
    s = settings("max_batch", tmp_path, data, max_seconds=60, eval_iters=10)
    monkeypatch.setattr(max_batch, "estimate", lambda *_: (2**28, 2**28 // 6))
    row = max_batch.measure({"attention": "manual"}, s, CPU, tmp_path)
    assert sizes == [6, 3, 4, 5, 5, 4]  # from the estimate; and the longer run had no room at 5
    assert row["largest"] == 4 and row["curve"] == [[pytest.approx(0.6), 2.5]]
    assert done["max_seconds"] == 60 and done["eval_interval"] == 50 and done["eval_iters"] == 10
    assert row["estimate"]["largest"] == 6 and [t["fits"] for t in row["trials"]] == [False, True, True, True]


@pytest.mark.gpu
def test_max_batch_on_a_gpu_stops_at_real_memory(tmp_path, data):
    changes = dict(device="cuda", dtype="bfloat16", n_embd=256, block_size=1024, batch_size=10**5)
    s = settings("max_batch", tmp_path, data, **changes)
    with pytest.raises(MemoryError):
        training.run(training.settings(s, max_batch.Settings), tmp_path / "run")
