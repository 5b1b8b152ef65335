"""A disk fills up. Nothing is lost, and the run says so."""

import contextlib
import os
import pathlib
import signal
import sys
import time

import pytest
import torch

from tests.conftest import checkpoint_of, flags, rows, small
from tests.faults.processes import Background, succeeds_or_skips
from tests.launch import sentence

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
        assert "No space left on device" in child.says("lines wait in memory")
        assert "No space left on device" in child.says("NOT SAVED")
        whole = checkpoint_of(out_dir)["iter_num"]
        child.says("NOT SAVED")  # at each interval
        (out_dir / "filler").unlink()
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
        assert "No space left on device: make room" in sentence(child.output())
        latest = pathlib.Path(f"/proc/self/fd/{held}/ckpt.pt")
        assert torch.load(latest, weights_only=True)["iter_num"] == saved
        os.close(held)
    finally:
        child.kill()
        child.wait()
