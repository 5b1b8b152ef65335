"""The file of remembered choices: what is kept, and what a damaged, foreign or busy file costs."""

import ast
import json
import multiprocessing
import pathlib
import re
import shutil

import pytest
import torch

from fusedgpt.errors import UserError
from fusedgpt.machine import choices, files
from fusedgpt.machine.choices import Choices
from fusedgpt.machine.environment import FLASH_PACKAGES
from tests.launch import ROOT

CASE = {"for": "test", "shape": (2, 3), "device": "a CPU"}


def test_what_is_remembered_is_there_for_the_same_case_alone():
    Choices().remember(CASE, {"attention": "math", "ms": 1.5})
    found = Choices().recall(dict(reversed(CASE.items())))
    assert found.pop("when").startswith("20") and found == {"attention": "math", "ms": 1.5}
    assert Choices().recall(CASE | {"shape": (2, 4)}) is None


def test_again_asks_for_new_timings_and_replaces_the_old():
    Choices().remember(CASE, {"attention": "math"})
    again = Choices(again=True)
    assert again.recall(CASE) is None
    again.remember(CASE, {"attention": "flash"})
    assert Choices().recall(CASE)["attention"] == "flash"
    assert len(Choices().path.read_text().splitlines()) == 1


def test_only_the_latest_cases_are_kept(monkeypatch):
    # a file that grows with every new shape would be read for seconds one day
    monkeypatch.setattr(choices, "MOST", 3)
    for n in range(5):
        Choices().remember({"n": n}, {"took": n})
    assert [bool(Choices().recall({"n": n})) for n in range(5)] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x00\xff\xfe garbage", "1 of 1 lines of .* are damaged, and ignored"),
        (b'[1, 2]\n{"case": 3}\n', "2 of 2 lines"),
        (b'{"case": {"n": 1}, "choice": {"attention": "evil"}, "when": "now", "sum": "0"}\n', "1 of 1 lines"),
        (b"x" * 2**24 + b"x", "is ignored: it is too large"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_line_and_replaced(content, said):
    path = Choices().path
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    damaged = Choices()
    assert damaged.recall(CASE) is None and damaged.recall({"n": 1}) is None
    (note,) = damaged.notes
    assert re.search(said, note)
    damaged.remember(CASE, {"attention": "math"})
    fresh = Choices()
    assert fresh.recall(CASE)["attention"] == "math" and not fresh.notes


def test_one_damaged_line_costs_that_line_alone():
    for n in range(3):
        Choices().remember({"n": n}, {"took": n})
    path = Choices().path
    path.write_text(path.read_text().replace('"took": 1', '"took": 7'))  # a flipped bit
    memory = Choices()
    assert [bool(memory.recall({"n": n})) for n in range(3)] == [True, False, True]
    assert len(memory.notes) == 1 and "1 of 3 lines" in memory.notes[0]


def no_home():
    raise RuntimeError("no home")


@pytest.mark.parametrize(
    ("cache", "said"), [("file", "what auto chose is not remembered"), (None, "set XDG_CACHE_HOME")]
)
def test_a_folder_that_cannot_be_written_costs_the_memory_alone(tmp_path, monkeypatch, cache, said):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file")) if cache else monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", no_home)
    memory = Choices()
    memory.remember(CASE, {"attention": "math"})
    assert memory.recall(CASE) is None and any(said in note for note in memory.notes)


@pytest.mark.parametrize(
    ("system", "variable", "want"),
    [
        ("linux", {"XDG_CACHE_HOME": "/there"}, "/there"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "HOME/.cache"),  # XDG's rule
        ("linux", {}, "HOME/.cache"),
        ("darwin", {}, "HOME/Library/Caches"),
    ],
)
def test_the_file_is_where_the_platform_keeps_caches(monkeypatch, system, variable, want):
    monkeypatch.delenv("XDG_CACHE_HOME")
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(choices.sys, "platform", system)
    folder = Choices().path.parent.parent
    assert folder == pathlib.Path(want.replace("HOME", str(pathlib.Path.home())))


def test_a_program_waits_for_another_but_not_for_long(monkeypatch):
    lock, refusals = files.lock, [True] * 2

    def taken(folder):
        if refusals:
            refusals.pop()
            raise UserError("in use by another run")
        return lock(folder)

    Choices().path.parent.mkdir(parents=True)
    monkeypatch.setattr(files, "lock", taken)
    Choices().remember(CASE, {"attention": "math"})
    assert not refusals and Choices().recall(CASE)["attention"] == "math"
    monkeypatch.setattr(choices, "PATIENCE_S", 0.0)
    refusals += [True] * 99
    busy = Choices()
    busy.remember({"n": 1}, {"attention": "math"})
    assert "in use by another run" in busy.notes[0] and busy.recall({"n": 1}) is None


def test_programs_that_write_at_once_lose_nothing_of_each_other():
    # read, changed and replaced without a lock, the file would keep what the last of them had read
    def write(who):
        for n in range(10):
            Choices().remember({"who": who, "n": n}, {})

    forks = multiprocessing.get_context("fork")  # three imports of PyTorch would take longer than all of this file
    others = [forks.Process(target=write, args=(who,)) for who in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    rows = files.read_jsonl(Choices().path)
    assert {(row["case"]["who"], row["case"]["n"]) for row in rows} == {(w, n) for w in range(3) for n in range(10)}


def test_a_machine_is_its_processor_threads_versions_and_code(monkeypatch):
    cpu = torch.device("cpu")
    found = choices.machine(cpu)
    assert json.loads(json.dumps(found)) == found == choices.machine(cpu)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert choices.machine(cpu) == found | {"threads": 99}
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(choices, "device_name", lambda device: "another")
    assert choices.machine(cpu) == found | {"threads": 99, "torch": "9.9", "device": "another"}


def test_a_machine_with_a_gpu_is_also_the_versions_of_what_has_its_kernels(monkeypatch):
    # auto went on with flash after flash-attn-3 was installed or became faster, and said that it was remembered
    monkeypatch.setattr(choices, "device_name", lambda device: "a GPU")
    gpu, found = torch.device("cuda"), []
    for version in ("1.0", "1.1"):
        monkeypatch.setattr("importlib.metadata.version", lambda package, version=version: version)
        found.append(choices.machine(gpu))
    assert {name for name in found[0] if found[0][name] != found[1][name]} >= {*FLASH_PACKAGES, "triton"}
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 99999)
    assert choices.machine(gpu) == found[1] | {"cudnn": 99999}


def test_the_code_of_choices_is_all_that_a_step_computes_with_and_what_decides():
    # the rules of tuning changed, and runs went on as the old ones had decided
    tree = ast.parse((ROOT / "model.py").read_text())
    ours = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module.startswith("fusedgpt")]
    paths = {
        (ROOT / node.module.replace(".", "/") / name.name).with_suffix(".py") for node in ours for name in node.names
    }
    paths = {path if path.exists() else path.parent.with_suffix(".py") for path in paths}
    names = {path.relative_to(ROOT).as_posix() for path in paths}
    names -= {"fusedgpt/errors.py", "fusedgpt/interchange/pretrained.py"}  # no step calls them
    assert len(names) > 5
    names |= {"fusedgpt/training/tuning.py", "fusedgpt/machine/device.py"}
    assert not [name for name in names if name not in choices.CODE and not name.startswith(choices.CODE_FOLDERS)]


def test_a_change_of_any_code_that_choices_depend_on_is_another_machine(tmp_path, monkeypatch):
    # with another model.py, or one more kernel, what was fastest before says nothing
    shutil.copytree(ROOT / "fusedgpt", tmp_path / "fusedgpt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "model.py", tmp_path)
    monkeypatch.setattr(choices.home, "SCRIPTS", tmp_path)
    monkeypatch.setattr(choices, "__file__", str(tmp_path / "fusedgpt" / "machine" / "choices.py"))
    here, names = torch.device("cpu"), (*choices.CODE, *(f"{folder}/new.py" for folder in choices.CODE_FOLDERS))
    found = [choices.machine(here)["code"]]
    for name in names:
        with open(tmp_path / name, "a") as file:
            file.write("# changed")
        found.append(choices.machine(here)["code"])
    assert len({*found}) == 1 + len(names)
