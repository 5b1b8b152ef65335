"""Kill runs at any instant. Nothing is lost."""

import itertools
import os
import time

import pytest
import torch

from fusedgpt.runs import checkpoint
from tests.conftest import assert_same_bytes, rows, small, tensors
from tests.faults.processes import finish, rng, start

TIMES = ("ms", "tokens_per_s", "mfu", "peak_memory")  # metrics that differ between equal runs
# a checkpoint is being written most of the time
SETTINGS = dict(max_iters=40, eval_interval=3, eval_iters=1, dropout=0.1, init_from="auto", keep_checkpoints=2)
SHARED = SETTINGS | dict(gradient_accumulation_steps=2)
TIMEOUT = 10  # seconds that a rank waits for another, which may have been killed before the two had met


def what_is_left(out_dir):
    """The names of a run's files, its checkpoints, and its metrics without TIMES."""
    checkpoints = {}
    for path in sorted(out_dir.glob("*.pt")):
        saved = checkpoint.load(path)
        numbers = {key: torch.tensor(saved[key]) for key in ("iter_num", "best_iter", "best_val_loss")}
        checkpoints[path.name] = tensors(saved) | numbers
    metrics = [*rows(out_dir, "train"), *rows(out_dir, "eval")]
    kept = [{name: value for name, value in row.items() if name not in TIMES} for row in metrics]
    return {"files": sorted(os.listdir(out_dir)), "checkpoints": checkpoints, "metrics": kept}


@pytest.mark.parametrize(
    ("world", "victims", "kills", "parallel"),
    [
        pytest.param(1, 1, 3, "ddp", id="one process"),
        pytest.param(1, 1, 20, "ddp", id="one process, many times", marks=pytest.mark.slow),
        pytest.param(2, 2, 3, "fsdp", id="two that share", marks=pytest.mark.slow),
        pytest.param(2, 1, 1, "fsdp", id="one of two that share", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_ends_with_the_same_bytes(tmp_path, data, world, victims, kills, parallel):
    # 3 of 28 places for a kill used to leave a stale best.pt, and a kill between two renames lost checkpoints. A
    # checkpoint may name shards only when the files of all ranks are there
    chance, log, done = rng(f"kills {world} {victims} {parallel}"), tmp_path / "log", 0
    settings = dict(SETTINGS if world == 1 else SHARED, parallel=parallel, timeout=TIMEOUT if victims < world else 300)
    began = time.monotonic()
    finish(start(small(tmp_path / "whole", data, **settings), log, world), log)
    seconds = time.monotonic() - began
    whole = what_is_left(tmp_path / "whole")
    assert len(whole["checkpoints"]) == 3 and [m["iter"] for m in whole["metrics"][:40]] == list(range(40))
    for run in itertools.count(1):
        out_dir = tmp_path / f"run-{run}"
        for _ in range(min(10, kills - done)):
            processes = start(small(out_dir, data, **settings), log, world)
            wait(processes, out_dir, chance, seconds)
            killed = chance.sample(processes, victims)
            for process in killed:
                process.kill()
            for process in processes:
                process.join(TIMEOUT + 60)  # a busy machine takes its time
            if any(process.exitcode == 0 for process in processes):
                break  # it was done before the kill
            assert {process.exitcode for process in processes} in ({-9}, {-9, 1})
            for path in out_dir.glob("*.pt"):
                checkpoint.load(path)  # whole at every instant
            done += 1
        finish(start(small(out_dir, data, **settings), log, world), log)
        assert "Traceback" not in log.read_text()  # the other ranks ended with a sentence
        found = what_is_left(out_dir)
        assert found["files"] == whole["files"] and found["metrics"] == whole["metrics"]
        for name in whole["checkpoints"]:
            assert_same_bytes(found["checkpoints"][name], whole["checkpoints"][name])
        if done >= kills:
            break


def wait(processes, out_dir, chance, seconds):
    """Wait for a random instant, half of the time for one at which a file is being written."""
    until = time.monotonic() + chance.uniform(0, seconds / 3)
    aim = chance.random() < 0.5
    while time.monotonic() < until + 5 * aim and all(process.is_alive() for process in processes):
        if time.monotonic() >= until and is_writing(out_dir):
            break
        time.sleep(1e-4)


def is_writing(out_dir):
    """Whether a file is being written, or a folder of shards, whose metadata comes last."""
    temporary = [out_dir / name for name in (".ckpt.pt.tmp", ".link.tmp", ".metrics.jsonl.tmp")]
    unfinished = [folder for folder in out_dir.glob("shards-*") if not (folder / ".metadata").exists()]
    return bool(unfinished) or any(os.path.exists(path) for path in temporary)
