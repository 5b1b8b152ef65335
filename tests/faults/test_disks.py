"""Disks fill up, turn read-only or vanish, and folders are used twice. Nothing is lost, and the run says so."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch

from fusedgpt.runs.run_folder import load_latest
from tests.conftest import checkpoint_of, flags, rows, small, wait_for
from tests.faults.processes import rng, start
from tests.launch import ROOT, fails, script, sentence

pytestmark = pytest.mark.slow

LONG = dict(max_iters=1_000_000, lr_decay_iters=1_000_000, learning_rate=1e-3, eval_interval=20, eval_iters=1)
MOVES = 4


class Run(subprocess.Popen):
    """A run in the background; its output is read from a file, because a full pipe would hold it up."""

    def __init__(self, out_dir, data, prefix=(), **settings):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the run)
        command = [*prefix, sys.executable, "train.py", *flags(small(out_dir, data, **{**LONG, **settings}))]
        super().__init__(command, cwd=ROOT, stdout=self.log.fileno(), stderr=subprocess.STDOUT)
        self.read = 0

    def unread(self):
        """What the run has said since this was asked last."""
        said = os.pread(self.log.fileno(), 1 << 24, self.read)
        self.read += len(said)
        return said.decode()

    def until(self, condition, seconds=90):
        """Wait until a condition holds, while the run goes on."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.poll() is None, self.unread()[-2000:]
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.01)

    def says(self, words, seconds=90):
        """Wait until the run says `words`, in what was not read before; the line that has them."""
        found = ""

        def said():
            nonlocal found
            found += self.unread()
            return words in found

        self.until(said, seconds)
        return next(line for line in found.splitlines() if words in line)

    def sentence(self):
        """The one sentence with which the run ends, soon."""
        assert self.wait(timeout=30) == 1
        return sentence(self.unread())

    def stop(self):
        """End the run as a scheduler does; the rest of what it says, and its status."""
        self.send_signal(signal.SIGTERM)
        self.wait(timeout=120)
        return self.unread(), self.returncode


def has_saved(out_dir):
    """Whether a run has a checkpoint and one before it."""
    return lambda: (out_dir / "ckpt.pt").exists() and list(out_dir.glob("ckpt-*.pt"))


def succeeds_or_skips(command):
    """Run a command that not every system lets a test run."""
    if not shutil.which(command[0]):
        pytest.skip(f"this system has no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system does not let tests mount a disk of their own: {done.stderr.strip()}")


@contextlib.contextmanager
def on_a_disk(mount, folder, data, **settings):
    """A run in `folder` on a disk of its own, which the command `mount` mounts; and its out_dir as seen from here."""
    folder.mkdir()
    inside = ("unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh")
    succeeds_or_skips([*inside, "true"])
    child = Run(folder / "out", data, inside, **settings)
    try:
        yield child, pathlib.Path(f"/proc/{child.pid}/root{folder}/out")
    finally:
        child.kill()
        child.wait()


def fill(child, folder):
    """Leave no room on the disk of `folder`. Not during a save, which would free its part when it fails."""
    while True:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)  # all its threads stand still
        if not list(folder.glob(".*.tmp")):
            break
        child.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    child.send_signal(signal.SIGCONT)


def test_a_disk_that_fills_up_and_empties(tmp_path, data):
    with on_a_disk(f"mount -t tmpfs -o size=3m none {tmp_path}/disk", tmp_path / "disk", data) as (child, out_dir):
        child.until(has_saved(out_dir))
        fill(child, out_dir)
        assert "No space left on device" in child.says("line(s) wait in memory")
        assert "No space left on device" in child.says("NOT SAVED")
        whole = checkpoint_of(out_dir)["iter_num"]
        child.says("NOT SAVED")  # at each interval
        (out_dir / "filler").unlink()
        child.says("metrics.jsonl can be written again: nothing is missing")
        child.until(lambda: checkpoint_of(out_dir)["iter_num"] > whole + 40)
        child.send_signal(signal.SIGSTOP)  # not killed, because its disk would vanish too
        train_rows = rows(out_dir)
        assert [row["iter"] for row in train_rows] == list(range(len(train_rows)))
        assert len(train_rows) > whole + 40
        child.send_signal(signal.SIGCONT)
        out, status = child.stop()
        assert status == 128 + signal.SIGTERM and "saved: go on with" in out


def test_a_disk_that_stays_full_ends_with_an_error(tmp_path, data):
    with on_a_disk(f"mount -t tmpfs -o size=3m none {tmp_path}/disk", tmp_path / "disk", data) as (child, out_dir):
        child.until(has_saved(out_dir))
        fill(child, out_dir)
        child.says("NOT SAVED")
        saved = checkpoint_of(out_dir)["iter_num"]
        held = os.open(out_dir, os.O_RDONLY)  # keeps the disk when the run has ended
        out, status = child.stop()
        assert status == 1
        assert "No space left on device; what it held before is kept. Make room" in sentence(out)
        whole = pathlib.Path(f"/proc/self/fd/{held}/ckpt.pt")
        assert torch.load(whole, weights_only=True)["iter_num"] == saved
        os.close(held)


def test_a_disk_that_turns_read_only(tmp_path, data):
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    succeeds_or_skips(["mkfs.ext4", "-q", "-F", image])
    succeeds_or_skips(["mount", "-o", "loop,errors=remount-ro", image, disk])
    child = None
    try:
        device = pathlib.Path(subprocess.check_output(["findmnt", "-n", "-o", "SOURCE", disk], text=True).strip()).name
        trigger = pathlib.Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
        if not os.access(trigger, os.W_OK):
            pytest.skip("this system does not let tests make an error on a disk")
        child = Run(disk / "out", data)
        child.until(has_saved(disk / "out"))
        trigger.write_text("a test")  # as a defect of the disk would
        assert "Read-only file system" in child.says("line(s) wait in memory")
        child.says("NOT SAVED")  # a write that was under way sees another error
        assert "Read-only file system" in child.says("NOT SAVED")
        out, status = child.stop()
        assert status == 1 and "Make the folder writable" in sentence(out)
        assert checkpoint_of(disk / "out")["iter_num"] >= 20
    finally:
        if child:
            child.kill()
            child.wait()
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_is_moved_while_another_run_takes_its_place(tmp_path, data, tell):
    chance = rng("moved")
    for n in range(MOVES):
        out_dir, moved = tmp_path / f"out-{n}", tmp_path / f"moved-{n}"
        first = Run(out_dir, data, seed=1)
        first.until(has_saved(out_dir))
        time.sleep(chance.uniform(0, 0.3))
        if n % 2:
            out_dir.rename(moved)
            assert f"{out_dir} was moved to {moved}" in first.sentence()
        else:
            (out_dir / ".lock").unlink()
        second = Run(out_dir, data, seed=2)
        if not n % 2:
            assert ".lock, which keeps other processes out" in first.sentence()
            second.until((out_dir / "previous-1").exists)
        second.until(has_saved(out_dir))
        out, status = second.stop()
        assert status == 128 + signal.SIGTERM, out
        for path in out_dir.glob("*.pt"):  # nothing of the first is among them
            assert torch.load(path, weights_only=True)["config"]["seed"] == 2
        steps = checkpoint_of(out_dir)["iter_num"]
        assert [row["iter"] for row in rows(out_dir)] == list(range(steps))
        left = moved if n % 2 else out_dir / "previous-1"
        assert checkpoint_of(left)["config"]["seed"] == 1
        script("train.py", f"--out_dir={left}", "--init_from=auto", f"--max_iters={len(rows(left)) + 20}")
    tell(f"{MOVES} runs lost their folder or its lock to another: each ended, and neither lost a checkpoint")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_do_not_bring_a_folder_back(tmp_path, data, parallel):
    # each fsdp rank makes the folder of its shards, but only one has the lock
    chance, out_dir, log = rng(f"moved {parallel}"), tmp_path / "out", tmp_path / "log"
    settings = small(out_dir, data, **LONG, parallel=parallel, gradient_accumulation_steps=2, timeout=20)
    processes = start(settings, log, world=2)
    wait_for(out_dir / "best.pt", 60)
    time.sleep(chance.uniform(0, 1))
    out_dir.rename(tmp_path / "moved")
    for process in processes:
        process.join(60)
    said = log.read_text()
    assert [process.exitcode for process in processes] == [1, 1] and "Traceback" not in said, said[-3000:]
    assert f"{out_dir} was moved to {tmp_path / 'moved'}" in said and "another process has ended" in said
    assert not out_dir.exists()
    assert load_latest(tmp_path / "moved")[1].name == "ckpt.pt"


def test_two_runs_at_once(tmp_path, data):
    # the second used to move the first one's files from under it
    out_dir = tmp_path / "out"
    child = Run(out_dir, data)
    child.until(has_saved(out_dir))
    for init_from in ("scratch", "resume", "auto"):
        error = fails("train.py", *flags(small(out_dir, data, init_from=init_from)))
        assert f"{out_dir} is in use by another run: process {child.pid} on " in error
        assert "started 20" in error
    evaluated = script("train.py", *flags(small(out_dir, data, init_from="resume", eval_only=True)))
    assert "val loss" in evaluated.stdout  # an evaluation writes nothing, so it needs no lock
    child.kill()  # the lock of a dead run is no obstacle
    child.wait()
    script("train.py", f"--out_dir={out_dir}", "--init_from=auto", "--max_iters=100")
    assert checkpoint_of(out_dir)["iter_num"] >= 100
    assert not list(out_dir.glob("previous*"))
