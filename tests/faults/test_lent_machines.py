"""make gpu on machines that are lent and vanish."""

import json
import math
import shutil

import pytest

from fusedgpt.bench import campaign
from tests.launch import ROOT


@pytest.mark.slow
def test_a_file_of_tests_that_is_killed_keeps_what_passed(tmp_path, monkeypatch):
    # the report came at the end, so that a file that was cut off kept nothing
    tests = tmp_path / "tests"
    tests.mkdir()
    for plugin in ("outcomes.py", "__init__.py"):
        shutil.copy(ROOT / "tests" / plugin, tests)
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
    found = json.loads((tmp_path / "tests.json").read_text())
    named = {which: [test.partition("::")[2] for test in found[which]] for which in ("failed", "began")}
    assert (found["status"], found["passed"]) == (-9, 1)
    assert named == {"failed": ["test_fails"], "began": ["test_is_killed"]}
