"""Files that are whole or not there."""

import contextlib
import errno
import json
import os

import pytest

from fusedgpt.errors import UserError
from fusedgpt.machine.files import Lines, atomic, json_line, link, read_jsonl


def test_a_file_appears_whole_with_ordinary_rights(tmp_path):
    with atomic(tmp_path / "new" / "a", "w") as file:
        file.write("hello")
        assert not (tmp_path / "new" / "a").exists()
    (tmp_path / "new" / ".a.tmp").write_text("half of a write that was killed")
    with atomic(tmp_path / "new" / "a", "w") as file:
        assert (tmp_path / "new" / "a").read_text() == "hello"
        file.write(os.fsdecode(b"ok \xff"))  # no UTF-8: it was a traceback in the report of a benchmark
    assert (tmp_path / "new" / "a").read_bytes() == rb"ok \udcff"
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


def test_a_link_is_not_touched_by_the_next_write(tmp_path, monkeypatch):
    for link_fails in (False, True):
        if link_fails:  # a disk without hard links
            monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
        for content in ("old", "new"):
            with atomic(tmp_path / "a", "w") as file:
                file.write(content)
            if content == "old":
                link(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "a").read_text() == "new" and (tmp_path / "b").read_text() == "old"
        link(tmp_path / "a", tmp_path / "b")
        link(tmp_path / "a", tmp_path / "b")  # of one file already: POSIX renames nothing
        assert (tmp_path / "b").read_text() == "new" and sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_json_stays_strict():
    # rows after a divergence held a bare NaN, which no other language reads
    line = json_line({"loss": float("nan"), "more": [float("inf"), {"x": -float("inf")}, 1.5, "é"]})
    assert json.loads(line, parse_constant=pytest.fail) == {"loss": None, "more": [None, {"x": None}, 1.5, "é"]}
    assert line.endswith("\n") and line.count("\n") == 1


def test_damaged_lines_are_left_out(tmp_path):
    (tmp_path / "a").write_bytes(b'{"a": 1}\n[1]\n\xff\n' + b"[" * 10_000 + b'\n3\n{"a": 2}\n{"a"')
    assert read_jsonl(tmp_path / "a") == [{"a": 1}, {"a": 2}]


class Small:
    """A file on a disk that has room for a few bytes more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written


def test_lines_wait_for_room_and_none_is_torn(tmp_path):
    lines = Lines(tmp_path / "a")
    lines.add("one\n")
    lines.file = Small(lines.file, room=5)
    for line in ("two\n", "three\n", "four\n"):
        with contextlib.suppress(OSError):
            lines.add(line)
    assert (tmp_path / "a").read_text() == "one\ntwo\nt" and lines.pending == b"hree\nfour\n"
    lines.file.room = 100
    lines.add("five\n")
    assert (tmp_path / "a").read_text() == "one\ntwo\nthree\nfour\nfive\n" and not lines.pending


def test_a_torn_last_line_takes_no_other_with_it(tmp_path):
    # a study on a full disk left half a line; the outcome noted next was glued to it, and its run counted as missing
    (tmp_path / "a").write_bytes(b'{"a": 1}\n{"a": 2, "st')
    lines = Lines(tmp_path / "a")
    lines.add('{"a": 3}\n')
    assert read_jsonl(tmp_path / "a") == [{"a": 1}, {"a": 3}]
    again = Lines(tmp_path / "a")
    again.add('{"a": 4}\n')
    assert (tmp_path / "a").read_bytes() == b'{"a": 1}\n{"a": 2, "st\n{"a": 3}\n{"a": 4}\n'


def test_no_line_is_written_through_a_link(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "what somebody else keeps")
    with pytest.raises(OSError, match="symbolic links"):
        Lines(tmp_path / "a")


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(UserError, match=r"cannot write .*a: No space .*: make room"), atomic(tmp_path / "a") as file:
        Small(file, room=0).write(b"x")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]
