"""Kill runs at any instant. Resumed, each ends with the bytes of an unbroken run."""

import itertools
import os
import signal
import time

import pytest
import torch

from fusedgpt.runs import checkpoint
from tests.conftest import assert_same_bytes, rows, small, tensors, wait_for
from tests.faults.processes import finish, rng, start

TIMES = ("ms", "tokens_per_s", "mfu", "peak_memory")  # metrics that differ between equal runs
# a checkpoint is being written most of the time
SETTINGS = dict(max_iters=40, eval_interval=3, eval_iters=1, dropout=0.1, init_from="auto", keep_checkpoints=2)
SHARED = SETTINGS | dict(gradient_accumulation_steps=2)
TIMEOUT = 10  # seconds that a rank waits for another, which may have been killed before the two had met
# number of processes, how many of them are killed, number of kills, and --parallel
RUNS = {
    "one process": (1, 1, 3, "ddp"),
    "one process, many times": (1, 1, 20, "ddp"),
    "two that share": (2, 2, 3, "fsdp"),
    "one of two ranks": (2, 1, 1, "ddp"),
    "one of two that share": (2, 1, 1, "fsdp"),
}
FAST = "one process"
KILLS = [pytest.param(*each, id=name, marks=[pytest.mark.slow] * (name != FAST)) for name, each in RUNS.items()]


def what_is_left(out_dir):
    """The names of a run's files, its checkpoints, and its metrics without TIMES."""
    checkpoints = {}
    for path in sorted(out_dir.glob("*.pt")):
        saved = checkpoint.load(path)
        numbers = {key: torch.tensor(saved[key]) for key in ("iter_num", "best_iter", "best_val_loss")}
        checkpoints[path.name] = tensors(saved) | numbers
    metrics = [
        {name: m[name] for name in m if name not in TIMES} for kind in ("train", "eval") for m in rows(out_dir, kind)
    ]
    return {"files": sorted(os.listdir(out_dir)), "checkpoints": checkpoints, "metrics": metrics}


@pytest.mark.parametrize(("world", "victims", "kills", "parallel"), KILLS)
def test_a_run_that_is_killed_ends_with_the_same_bytes(tmp_path, data, tell, world, victims, kills, parallel):
    # 3 of 28 places for a kill used to leave a stale best.pt, and a kill between two renames lost checkpoints. A
    # checkpoint may name shards only when the files of all ranks are there
    chance, log, done, in_writes = rng(f"kills {world} {victims} {parallel}"), tmp_path / "log", 0, 0
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
            in_write = wait(processes, out_dir, chance, seconds)
            killed = chance.sample(processes, victims)
            for process in killed:
                process.kill()
            for process in processes:
                process.join(TIMEOUT + 60)  # a busy machine takes its time
            if any(process.exitcode == 0 for process in processes):
                break  # it was done before the kill
            assert all(process.exitcode == (-9 if process in killed else 1) for process in processes)
            for path in out_dir.glob("*.pt"):
                checkpoint.load(path)  # whole at every instant
            done, in_writes = done + 1, in_writes + in_write
        finish(start(small(out_dir, data, **settings), log, world), log)
        assert "Traceback" not in log.read_text()  # the other ranks ended with a sentence
        assert_same(what_is_left(out_dir), whole)
        if done >= kills:
            break
    tell(f"{done} kills of {victims} of {world} process(es) in {run} runs, {in_writes} while a file was being written")


def assert_same(found, whole):
    """Two runs left the same files, with the same bytes in their checkpoints, and the same metrics."""
    assert found["files"] == whole["files"]
    for name in whole["checkpoints"]:
        assert_same_bytes(found["checkpoints"][name], whole["checkpoints"][name])
    assert found["metrics"] == whole["metrics"]


def wait(processes, out_dir, chance, seconds):
    """Wait for a random instant, half of the time for one in a write. Returns whether a file is being written."""
    until = time.monotonic() + chance.uniform(0, seconds / 3)
    aim = chance.random() < 0.5
    while time.monotonic() < until + 5 * aim and all(process.is_alive() for process in processes):
        if time.monotonic() >= until and is_writing(out_dir):
            break
        time.sleep(1e-4)
    return is_writing(out_dir)


def is_writing(out_dir):
    """Whether a file is being written, or a folder of shards, whose metadata comes last."""
    temporary = [out_dir / name for name in (".ckpt.pt.tmp", ".link.tmp", ".metrics.jsonl.tmp")]
    unfinished = [folder for folder in out_dir.glob("shards-*") if not (folder / ".metadata").exists()]
    return bool(unfinished) or any(os.path.exists(path) for path in temporary)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stopped", "parallel", "steps"), [(0, "fsdp", 100), (1, "ddp", 300)])
def test_a_rank_that_is_stopped_and_wakes_up(tmp_path, data, tell, stopped, parallel, steps):
    # after SIGSTOP, as on a suspended machine, no connection closes, and only --timeout tells the other rank
    chance, log, out_dir = rng(f"stopped {stopped} {parallel}"), tmp_path / "log", tmp_path / "out"
    settings = dict(SHARED, max_iters=steps, eval_interval=10, parallel=parallel, timeout=TIMEOUT)
    finish(start(small(tmp_path / "whole", data, **settings), log, 2), log)
    log.unlink()
    processes = start(small(out_dir, data, **settings), log, 2)
    wait_for(out_dir / "best.pt", 60)
    wait(processes, out_dir, chance, 1)
    sleeper, other = processes[stopped], processes[1 - stopped]
    os.kill(sleeper.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        other.join(TIMEOUT + 60)
        noticed = time.monotonic() - began
        again = start(small(out_dir, data, **settings), tmp_path / "again", 2)
        if stopped == 0:  # rank 0 has the lock, and could still write
            for process in again:
                process.join(TIMEOUT + 60)
            assert [process.exitcode for process in again] == [1, 1]
            assert f"{out_dir} is in use by another run: process {sleeper.pid} on" in (tmp_path / "again").read_text()
        else:  # rank 1 wakes up while new processes go on with its run
            wait_for_line(tmp_path / "again", "tokens per iteration", again)
            time.sleep(chance.uniform(0, 1))
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)
    sleeper.join(TIMEOUT + 60)
    said = log.read_text()
    assert [process.exitcode for process in processes] == [1, 1] and "Traceback" not in said, said[-3000:]
    assert [line.startswith(("error: rank 0", "error: rank 1")) for line in said.splitlines()].count(True) == 2
    if stopped == 0:
        again = start(small(out_dir, data, **settings), log, 2)
    finish(again, log)
    assert_same(what_is_left(out_dir), what_is_left(tmp_path / "whole"))
    tell(f"rank {stopped} of 2 ({parallel}) stopped: the other ended after {noticed:.1f} s, of which timeout={TIMEOUT}")


def wait_for_line(log, words, processes):
    """Wait until one of `processes` has written a line with `words` to its log."""
    while not (log.exists() and words in log.read_text()):
        assert all(process.is_alive() for process in processes), log.read_text()[-2000:]
        time.sleep(0.01)
