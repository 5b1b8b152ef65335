"""make gpu on machines that are lent: packages are missing, and a machine vanishes between two calls or within one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from fusedgpt.bench import campaign
from tests.launch import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")]
HIDES = """
import sys
from importlib import machinery

class PathFinder(machinery.PathFinder):  # typeguard looks for a finder of this name
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(machinery.PathFinder)] = PathFinder
"""


@pytest.fixture
def hide(tmp_path):
    """A function that makes an environment in which packages cannot be imported."""

    def hide(*names):
        folder = tmp_path / "-".join(("hidden", *names))
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HIDES.format(hidden=names))
        alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        return alone | {"PYTHONPATH": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "graphs")}

    return hide


def machine(tmp_path, name):
    """A checkout of the project without its git folder, as it is copied to a machine."""
    folder = tmp_path / name
    left_behind = shutil.ignore_patterns(".git*", ".venv", ".*cache", "out-*", "results")
    shutil.copytree(ROOT, folder, ignore=left_behind)
    return folder


def rehearsal(folder, keep, env):
    """make gpu in a process group of its own, as a test would end it with all that it started."""
    arguments = f"ARGS=--rehearse=True --results={folder / 'results'} --keep={keep}"
    command = ["make", "gpu", f"PYTHON={sys.executable}", arguments]
    env = env | {"FUSEDGPT_COMMIT": "of the sender"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    return subprocess.Popen(command, cwd=folder, env=env, **pipes)


@pytest.mark.timeout(1500)  # it rehearses make gpu twice; a busy machine takes ten minutes
def test_another_machine_goes_on_where_one_vanished(tmp_path, hide):
    # results were lost with the machine, and each test file died at once where a package was missing
    env, keep = hide("wandb", "datasets", "zstandard", "shtab"), tmp_path / "keep"
    first = rehearsal(machine(tmp_path, "one"), keep, env)
    before = []
    for line in first.stdout:
        before.append(line)
        if line.startswith("== test_"):  # the benchmarks before the tests are kept by now
            break
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    shutil.rmtree(tmp_path / "one")
    steps = [line.split(",")[0] for line in before if line.startswith("== ")]
    assert steps[:4] == ["== ladder", "== numerics", "== sweep", "== prefill"], before

    second = rehearsal(machine(tmp_path, "two"), keep, env)
    said, _ = second.communicate(timeout=900)
    last = said.splitlines()[-1]
    steps = [line.partition(",")[0] for line in said.splitlines() if line.startswith("== ")]
    assert not {"== ladder", "== numerics", "== sweep", "== prefill"} & set(steps), said[-3000:]
    found = json.loads((tmp_path / "two" / "results" / "tests.json").read_text())["files"]
    assert sorted(found) == sorted(campaign.TESTS)
    assert all(each["status"] == 0 and not each["failed"] for each in found.values()), last
    skipped = sum(len(each["skipped"]) for each in found.values())
    assert skipped and f": 0 tests ran ({skipped} skipped); rows: " in last  # there is no GPU here
    assert last.endswith("; nothing is missing"), said[-3000:]
    header = json.loads((tmp_path / "two" / "results" / "ladder" / "rows.jsonl").read_text().splitlines()[0])
    assert header["environment"]["commit"] == "of the sender"


def test_a_package_that_every_step_needs_is_named_before_any_starts(tmp_path, hide):
    # tyro was there, but not what it imports. pytest died at once, and the last line said that nothing was missing
    folder = machine(tmp_path, "one")
    process = rehearsal(folder, tmp_path / "keep", hide("docstring_parser", "typeguard"))
    said, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "== " not in said
    assert "error: not installed: docstring_parser, typeguard. Run: " in said
    assert "-m pip install docstring_parser typeguard" in said


def test_a_file_of_tests_that_is_killed_keeps_what_passed(tmp_path, monkeypatch):
    # the report came at the end, so that a file that was cut off at its limit kept nothing
    tests = tmp_path / "tests"
    tests.mkdir()
    for plugin in ("outcomes.py", "__init__.py"):
        shutil.copy(ROOT / "tests" / plugin, tests)
    (tests / "test_hangs.py").write_text(
        "import time, pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "def test_hangs(): time.sleep(600)\n"
    )
    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    monkeypatch.setattr(campaign, "LIMIT", campaign.LAST_ROW + 1)
    real, started = campaign._step, time.monotonic()
    monkeypatch.setattr(campaign, "_step", lambda name, command, limit, *others: real(name, command, 10, *others))
    campaign._test(tmp_path, "hangs", "this code", float("inf"))
    found = json.loads((tmp_path / "tests.json").read_text())["files"]["hangs"]
    assert found["status"] is None and 10 <= found["seconds"] < 30 and time.monotonic() - started < 40
    named = {which: [test.partition("::")[2] for test in found[which]] for which in ("failed", "began")}
    assert found["passed"] == 1 and named == {"failed": ["test_fails"], "began": ["test_hangs"]}
