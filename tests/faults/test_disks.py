"""A disk fills up, and a folder is used twice. Nothing is lost, and the run says so."""

import contextlib
import os
import pathlib
import signal
import sys
import time

import pytest
import torch

from tests.conftest import checkpoint_of, flags, rows, small, wait_for
from tests.faults.processes import Background, start, succeeds_or_skips
from tests.launch import fails, script, sentence

LONG = dict(max_iters=1_000_000, lr_decay_iters=1_000_000, learning_rate=1e-3, eval_interval=20, eval_iters=1)


@contextlib.contextmanager
def stopped(child):
    """The process and all its threads stand still."""
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    yield
    child.send_signal(signal.SIGCONT)


def fill(child, folder):
    """Leave no room on the disk of `folder`. Not during a save, which would free its part when it fails."""
    full = False
    while not full:
        with stopped(child):
            if not list(folder.glob(".*.tmp")):
                full = True
                with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
                    while file.write(b"x" * 4096):
                        pass
        time.sleep(0.001)


@pytest.mark.slow
def test_a_disk_that_fills_up_loses_nothing_once_it_has_room_and_else_ends_with_an_error(tmp_path, data):
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=3m none {disk} && exec "$@"', "sh"]
    succeeds_or_skips([*inside, "true"])
    child = Background(*inside, sys.executable, "train.py", *flags(small(disk / "out", data, **LONG)))
    out_dir = pathlib.Path(f"/proc/{child.pid}/root{disk}/out")  # as seen from here
    try:
        child.until(lambda: (out_dir / "ckpt.pt").exists() and list(out_dir.glob("ckpt-*.pt")))
        fill(child, out_dir)
        assert "No space left on device" in child.says("line(s) wait in memory")
        assert "No space left on device" in child.says("NOT SAVED")
        whole = checkpoint_of(out_dir)["iter_num"]
        child.says("NOT SAVED")  # at each interval
        (out_dir / "filler").unlink()
        child.says("metrics.jsonl can be written again: nothing is missing")
        child.until(lambda: checkpoint_of(out_dir)["iter_num"] > whole + 40)
        with stopped(child):
            steps = [row["iter"] for row in rows(out_dir)]
        assert steps == list(range(len(steps))) and len(steps) > whole + 40

        fill(child, out_dir)
        child.says("NOT SAVED")
        saved = checkpoint_of(out_dir)["iter_num"]
        held = os.open(out_dir, os.O_RDONLY)  # keeps the disk when the run has ended
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=120) == 1
        assert "No space left on device; what it held before is kept. Make room" in sentence(child.output())
        latest = pathlib.Path(f"/proc/self/fd/{held}/ckpt.pt")
        assert torch.load(latest, weights_only=True)["iter_num"] == saved
        os.close(held)
    finally:
        child.kill()
        child.wait()


def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(tmp_path, data):
    # the second used to move the first one's files from under it
    out_dir = tmp_path / "out"
    (first,) = start(small(out_dir, data, **LONG), tmp_path / "log")
    wait_for(out_dir / "best.pt", 60)
    error = fails("train.py", *flags(small(out_dir, data, init_from="scratch")))
    assert f"{out_dir} is in use by another run: process {first.pid} on " in error
    evaluated = script("train.py", *flags(small(out_dir, data, init_from="resume", eval_only=True)))
    assert "val loss" in evaluated.stdout  # an evaluation writes nothing, so it needs no lock
    first.kill()  # the lock of a dead run is no obstacle
    first.join()
    steps = checkpoint_of(out_dir)["iter_num"] + 20
    script("train.py", f"--out_dir={out_dir}", f"--dataset={data}", "--init_from=auto", f"--max_iters={steps}")
    assert checkpoint_of(out_dir)["iter_num"] == steps and not list(out_dir.glob("previous*"))
