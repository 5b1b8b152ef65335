"""The file of remembered choices: what is kept, and what a damaged or busy file costs."""

import json
import multiprocessing
import shutil

import torch

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


def test_a_damaged_line_costs_that_line_alone():
    Choices().remember({"n": 1}, {"took": 1})
    with open(choices.path(), "ab") as file:
        file.write(b'\x00\xff garbage\n[1, 2]\n{"case": {"n": 2}, "choi')  # the last: of a full disk
    Choices().remember({"n": 3}, {"took": 3})
    assert [bool(Choices().recall({"n": n})) for n in (1, 2, 3)] == [True, False, True]


def test_a_folder_that_cannot_be_written_costs_the_memory_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    memory = Choices()
    memory.remember(CASE, {"attention": "math"})
    assert memory.recall(CASE) is None and "what auto chose is not remembered" in memory.notes[0]


def test_programs_that_write_at_once_lose_nothing_of_each_other():
    def write(who):
        for n in range(10):
            Choices().remember({"who": who, "n": n}, {})

    forks = multiprocessing.get_context("fork")  # three imports of PyTorch would take longer than all of this file
    others = [forks.Process(target=write, args=(who,)) for who in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    rows = [row["case"] for row in files.read_jsonl(choices.path()) if "who" in row["case"]]
    assert {(row["who"], row["n"]) for row in rows} == {(w, n) for w in range(3) for n in range(10)}


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


def test_a_change_of_any_code_is_another_machine(tmp_path, monkeypatch):
    # the rules of tuning changed, and runs went on as the old ones had decided
    shutil.copytree(ROOT / "fusedgpt", tmp_path / "fusedgpt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "model.py", tmp_path)
    monkeypatch.setattr(choices.home, "SCRIPTS", tmp_path)
    monkeypatch.setattr(choices, "__file__", str(tmp_path / "fusedgpt" / "machine" / "choices.py"))
    found = {choices.machine(torch.device("cpu"))["code"]}
    for name in ("model.py", "fusedgpt/loss.py", "fusedgpt/training/tuning.py", "fusedgpt/attention/new.py"):
        with open(tmp_path / name, "a") as file:
            file.write("# changed")
        found.add(choices.machine(torch.device("cpu"))["code"])
    assert len(found) == 5
