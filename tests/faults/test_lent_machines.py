"""make gpu on machines that are lent and vanish."""

import math
import re

import pytest

from fusedgpt.bench import campaign


@pytest.mark.slow
def test_a_file_of_tests_that_is_killed_keeps_what_passed(tmp_path, monkeypatch):
    # the report came at the end, so that a file that was cut off kept nothing
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_ends.py").write_text(
        "import os, pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "def test_is_killed(): os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    monkeypatch.setattr(campaign, "WORKERS", 0)
    monkeypatch.setattr(campaign, "COMPILED", [campaign.Step("numerics", 1)])
    campaign._tests(tmp_path, "this code", campaign.Settings(), math.inf)
    text = (tmp_path / "tests.txt").read_text()
    assert re.search("test_passes.*PASSED", text) and re.search("test_fails.*FAILED", text) and "test_is_killed" in text
