"""Times of data/text/prepare.py: on how many cores, on which text, and that its ids are that text."""

import os
import subprocess
import sys

import pytest

from fusedgpt.bench import prepare_time
from fusedgpt.bench.proof import ParityError


def test_the_whole_command_is_timed_and_its_files_are_removed(tmp_path):
    row = prepare_time.run(0.2, None, "byte", tmp_path)
    assert row["median_ms"] == row["samples_ms"][0] > 100  # it starts Python
    assert row["megabytes"] >= 0.2 and row["parity"] == "passed: its first 1000 ids are the beginning of the text"
    assert not list(tmp_path.iterdir())
    with pytest.raises(ChildProcessError, match="train:1"):
        prepare_time.run(0.01, None, "train:1", tmp_path)


def test_ids_of_another_text_get_no_time(tmp_path, monkeypatch):
    write = prepare_time.write_library

    def changed(path, megabytes):
        size = write(path, megabytes)
        same = prepare_time.same_text
        monkeypatch.setattr(prepare_time, "same_text", lambda text, out: (text.write_bytes(b"other"), same(text, out)))
        return size

    monkeypatch.setattr(prepare_time, "write_library", changed)
    with pytest.raises(ParityError, match="its first 1000 ids are not the beginning of the text"):
        prepare_time.run(0.01, None, "byte", tmp_path)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot keep a process to some cores")
def test_a_process_is_kept_to_so_many_cores():
    every = len(os.sched_getaffinity(0))
    counts = prepare_time.counts_of_cores()
    assert counts[0] == 1 and counts[-1] == every and counts == sorted(set(counts))
    for cores in counts:
        said = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
        done = subprocess.run(said, preexec_fn=prepare_time._kept_to(cores), capture_output=True, text=True, check=True)
        assert int(done.stdout) == cores
    assert len(os.sched_getaffinity(0)) == every


def test_the_text_has_the_size_that_was_asked_for(tmp_path):
    for megabytes in (0.05, 6.0):  # the larger one is longer than the modules
        size = prepare_time.write_library(tmp_path / "text", megabytes)
        assert 1e6 * megabytes <= size == (tmp_path / "text").stat().st_size < 1e6 * megabytes + 5e5
    (tmp_path / "text").read_text(encoding="utf-8")
