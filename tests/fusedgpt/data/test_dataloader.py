"""The text of a sample is a pure function of (seed, iteration, sample)."""

import gc
import os
import pathlib

import numpy as np
import pytest
import torch

from fusedgpt.data import dataset, prepare
from fusedgpt.data.dataloader import DataLoader

CPU = torch.device("cpu")


def loader(data, **options):
    options = {"block_size": 8, "batch_size": 4, "seed": 1, "device": CPU, **options}
    return DataLoader(data, dataset.read_meta(data), **options)


def test_a_batch_is_windows_of_the_text_and_their_next_tokens(data):
    x, y = loader(data).train(0, 0)
    assert x.shape == y.shape == (4, 8) and x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    for row, last in zip(x, y[:, -1]):
        assert np.append(row.numpy(), last).astype("<u2").tobytes() in (data / "train.bin").read_bytes()


def test_every_sample_has_its_own_place_however_the_step_is_split(data):
    # T1, T2, T13: draws used to depend on earlier draws, and on the number of GPUs
    whole = torch.cat([loader(data, batch_size=8).train(3, m)[0] for m in range(1)])
    halves = torch.cat([loader(data, batch_size=4).train(3, m)[0] for m in range(2)])
    quarters = torch.cat([loader(data, batch_size=2).train(3, m)[0] for m in range(4)])
    assert torch.equal(whole, halves) and torch.equal(whole, quarters)
    assert torch.equal(*[loader(data, rank=rank, world=2).train(3, 1)[0] for rank in range(2)])
    b = loader(data)
    later = b.train(7, 1)
    for _ in b.evaluation("val", 100):
        b.train(5, 0)
    assert torch.equal(b.train(7, 1)[0], later[0])


def test_seeds_iterations_and_micro_steps_differ(data):
    seen = {loader(data, seed=s).train(i, m)[0].numpy().tobytes() for s in (1, 2) for i in (0, 1) for m in (0, 1)}
    assert len(seen) == 8
    stream = loader(data).batches(5, range(1, 4, 2))  # rank 1 of 2, four micro-steps
    for iteration, micro_step in ((5, 1), (5, 3), (6, 1), (6, 3)):
        assert torch.equal(next(stream)[0], loader(data).train(iteration, micro_step)[0])


def test_evaluation_is_fixed_windows_shared_by_the_ranks(data):
    # T12: validation windows used to be random, to overlap, and to be read by rank 0 alone
    def windows(**options):
        found = []
        for x, y in loader(data, **options).evaluation("val", 50):
            assert x.shape == (options.get("batch_size", 4), 8)
            found += [tuple(row.tolist()) for row, target in zip(x, y) if target[0] >= 0]
            assert all((t == -1).all() for row, t in zip(x, y) if t[0] < 0)
        return found

    alone = windows()
    assert len(alone) == len(set(alone)) == 50
    assert alone == windows() == windows(seed=9) == windows(batch_size=7)
    assert sorted(alone) == sorted(windows(rank=0, world=3) + windows(rank=1, world=3) + windows(rank=2, world=3))
    ids = np.fromfile(data / "val.bin", "<u2").tolist()
    starts = [next(i for i in range(0, len(ids), 8) if tuple(ids[i : i + 8]) == window) for window in alone]
    assert starts == sorted(starts) and starts[-1] > 0.95 * len(ids)  # spread over all of it, none overlapping


@pytest.mark.parametrize("world", [1, 3])
def test_an_evaluation_of_all_takes_each_token_once(tmp_path, world):
    # the tokens after the last whole window count too
    ids = np.random.default_rng(0).integers(0, 200, 77)
    prepare.write(tmp_path, {"train": [ids], "val": [ids]}, "short", tokenizer="byte", vocab_size=256)
    loaders = [loader(tmp_path, rank=rank, world=world) for rank in range(world)]
    batches = [list(each.evaluation("val", 0)) for each in loaders]
    assert [2 * len(found) for found in batches] == [each.evaluation_batches(0) for each in loaders]
    pairs = [(a, b) for found in batches for x, y in found for a, b in zip(x[y >= 0].tolist(), y[y >= 0].tolist())]
    assert sorted(pairs) == sorted(zip(ids[:-1].tolist(), ids[1:].tolist()))


STATM = pathlib.Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="needs Linux's /proc")
def test_memory_stays_flat_over_a_large_bin(tmp_path):
    # T20: a memory map holds every page that was touched (nanoGPT#287); an earlier test may have raised the peak
    def resident():
        gc.collect()
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for split, size in (("train", 200 << 20), ("val", 2 << 20)):  # 200 MiB and 2 MiB of zeros
        with open(tmp_path / f"{split}.bin", "wb") as file:
            file.truncate(size)
    b = DataLoader(tmp_path, {"vocab_size": 1}, block_size=1 << 16, batch_size=8, seed=0, device=CPU)
    b.train(0, 0)
    before = resident()
    for iteration in range(100):  # reads 100 MiB, spread over the whole file
        b.train(iteration, 0)
    assert resident() - before < 40 << 20
