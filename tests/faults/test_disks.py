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
from tests.faults.processes import start
from tests.launch import ROOT, fails, script, sentence

LONG = dict(max_iters=1_000_000, lr_decay_iters=1_000_000, learning_rate=1e-3, eval_interval=20, eval_iters=1)


class Run(subprocess.Popen):
    """A run in the background; its output is read from a file, because a full pipe would hold it up."""

    def __init__(self, out_dir, data, prefix=()):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the run)
        command = [*prefix, sys.executable, "train.py", *flags(small(out_dir, data, **LONG))]
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

    def says(self, words):
        """Wait until the run says `words`, in what was not read before; the line that has them."""
        found = ""

        def said():
            nonlocal found
            found += self.unread()
            return words in found

        self.until(said)
        return next(line for line in found.splitlines() if words in line)

    def ends_with(self, words):
        """End the run as a scheduler does. It cannot save, and says `words` in its one sentence."""
        self.send_signal(signal.SIGTERM)
        assert self.wait(timeout=120) == 1 and words in sentence(self.unread())


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


@pytest.mark.slow
def test_a_disk_that_fills_up_loses_nothing_once_it_has_room_and_else_ends_with_an_error(tmp_path, data):
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=3m none {disk} && exec "$@"', "sh")
    succeeds_or_skips([*inside, "true"])
    child = Run(disk / "out", data, inside)
    out_dir = pathlib.Path(f"/proc/{child.pid}/root{disk}/out")  # as seen from here
    try:
        child.until(has_saved(out_dir))
        fill(child, out_dir)
        assert "No space left on device" in child.says("line(s) wait in memory")
        assert "No space left on device" in child.says("NOT SAVED")
        whole = checkpoint_of(out_dir)["iter_num"]
        child.says("NOT SAVED")  # at each interval
        (out_dir / "filler").unlink()
        child.says("metrics.jsonl can be written again: nothing is missing")
        child.until(lambda: checkpoint_of(out_dir)["iter_num"] > whole + 40)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        train_rows = rows(out_dir)
        child.send_signal(signal.SIGCONT)
        assert [row["iter"] for row in train_rows] == list(range(len(train_rows))) and len(train_rows) > whole + 40

        fill(child, out_dir)
        child.says("NOT SAVED")
        saved = checkpoint_of(out_dir)["iter_num"]
        held = os.open(out_dir, os.O_RDONLY)  # keeps the disk when the run has ended
        child.ends_with("No space left on device; what it held before is kept. Make room")
        latest = pathlib.Path(f"/proc/self/fd/{held}/ckpt.pt")
        assert torch.load(latest, weights_only=True)["iter_num"] == saved
        os.close(held)
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_a_disk_that_turns_read_only_ends_a_run_only_when_it_is_told_to_stop(tmp_path, data):
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
        child.ends_with("Make the folder writable")
        assert checkpoint_of(disk / "out")["iter_num"] >= 20
    finally:
        if child:
            child.kill()
            child.wait()
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_ranks_do_not_bring_a_folder_back(tmp_path, data):
    # each fsdp rank makes the folder of its shards, but only one has the lock
    out_dir, log = tmp_path / "out", tmp_path / "log"
    settings = small(out_dir, data, **LONG, parallel="fsdp", gradient_accumulation_steps=2, timeout=20)
    processes = start(settings, log, world=2)
    wait_for(out_dir / "best.pt", 60)
    out_dir.rename(tmp_path / "moved")
    for process in processes:
        process.join(60)
    said = log.read_text()
    assert [process.exitcode for process in processes] == [1, 1] and "Traceback" not in said, said[-3000:]
    assert f"{out_dir} was moved to {tmp_path / 'moved'}" in said and "another process has ended" in said
    assert not out_dir.exists()
    assert load_latest(tmp_path / "moved")[1].name == "ckpt.pt"


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
