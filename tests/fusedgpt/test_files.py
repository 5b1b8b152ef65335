"""Files that are whole or not there."""

import os
import resource
import signal

import pytest

from fusedgpt.errors import UserError
from fusedgpt.files import atomic


def test_a_file_appears_whole_with_ordinary_rights(tmp_path):
    with atomic(tmp_path / "new" / "a", "w") as file:
        file.write("hello")
        assert not (tmp_path / "new" / "a").exists()
    assert (tmp_path / "new" / "a").read_text() == "hello"
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "new" / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert os.listdir(tmp_path / "new") == ["a"]


def test_what_was_there_survives_a_failure(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError, match="oh"), atomic(tmp_path / "a", "w") as file:
        file.write("half")
        raise RuntimeError("oh")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_kill_left_behind_is_replaced(tmp_path):
    (tmp_path / ".a.tmp").write_text("half of an earlier write")
    with atomic(tmp_path / "a", "w") as file:
        file.write("new")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "new"


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path):
    (tmp_path / "a").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # no file may grow past this, as on a full disk
    try:
        with (
            pytest.raises(UserError, match=r"cannot write .*a: .*what it held before is kept"),
            atomic(tmp_path / "a") as f,
        ):
            f.write(b"x" * 100_000)
            f.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]
