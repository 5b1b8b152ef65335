"""Killed at any instant and resumed, a run ends with the bytes of an unbroken one: 200 times."""

import os
import time

import pytest
import torch

from tests.conftest import assert_same_bytes, rows, small
from tests.faults.processes import SEED, SETTINGS, finish, rng, start

pytestmark = pytest.mark.faults

TIMES = ("ms", "tokens_per_s", "mfu", "peak_memory")  # what two runs of the same do not share


def what_is_left(out_dir):
    """Checkpoints, and metrics without what is a matter of time, of a run that has ended."""
    found = {}
    for path in sorted(out_dir.glob("*.pt")):
        saved = torch.load(path, weights_only=True)
        found[path.name] = saved["model"]
        for n, state in saved["optimizer"]["state"].items():
            found[path.name] |= {f"optimizer {n} {key}": value for key, value in state.items()}
        found[path.name] |= {key: torch.tensor(saved[key]) for key in ("iter_num", "best_iter", "best_val_loss")}
    metrics = [
        {name: m[name] for name in m if name not in TIMES} for kind in ("train", "eval") for m in rows(out_dir, kind)
    ]
    return found, metrics


@pytest.mark.parametrize(("world", "runs", "kills"), [(1, 10, 15), (2, 5, 10)], ids=["one process", "two ranks"])
def test_kills(tmp_path, data, world, runs, kills):
    # 3 of 28 places for a kill used to leave a stale best.pt; a kill between two renames lost checkpoints
    chance, in_writes, done = rng(f"kills {world}"), 0, 0
    settings = dict(SETTINGS, gradient_accumulation_steps=2)
    log = tmp_path / "log"
    began = time.monotonic()
    finish(start(small(tmp_path / "whole", data, **settings), log, world), log)
    seconds = time.monotonic() - began
    checkpoints, metrics = what_is_left(tmp_path / "whole")
    assert len(checkpoints) == 3 and [m["iter"] for m in metrics[:300]] == list(range(300))
    for number in range(runs):
        broken = tmp_path / f"broken-{number}"
        here = 0
        while here < kills:
            processes = start(small(broken, data, **settings), log, world)
            in_write = wait(processes, broken, chance, seconds)
            for process in chance.sample(processes, world):  # whichever first: the others then wait for it, or fail
                process.kill()
            for process in processes:
                process.join()
            if any(process.exitcode == 0 for process in processes):
                break  # it was done before the kill
            here += 1
            in_writes += in_write
        done += here
        finish(start(small(broken, data, **settings), log, world), log)
        found, found_metrics = what_is_left(broken)
        assert found.keys() == checkpoints.keys(), f"run {number} after {here} kills"
        for name in found:
            assert_same_bytes(found[name], checkpoints[name])
        assert found_metrics == metrics
        leftovers = {path.name for path in broken.iterdir()} - {path.name for path in (tmp_path / "whole").iterdir()}
        assert not leftovers, leftovers
    print(f"\n{done} kills of {world} process(es), {in_writes} in a checkpoint's write, FAULTS_SEED={SEED}")
    assert done >= 0.9 * runs * kills


def wait(processes, out_dir, chance, seconds):
    """Wait for a random instant, half of the time for one at which a checkpoint is being written; whether it is."""
    until = time.monotonic() + chance.uniform(0, seconds / 4)
    aim = chance.random() < 0.5
    temporary = [out_dir / name for name in (".ckpt.pt.tmp", ".best.pt.tmp", ".metrics.jsonl.tmp")]
    while time.monotonic() < until + 5 * aim and all(process.is_alive() for process in processes):
        if time.monotonic() >= until and any(os.path.exists(path) for path in temporary):
            break
    return any(os.path.exists(path) for path in temporary)
