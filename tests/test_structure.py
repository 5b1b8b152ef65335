"""The house rules of CONTRIBUTING.md that ruff does not check: who imports whom, and how long a function may be."""

import ast
import collections
import graphlib
import subprocess
import sys

import pytest

from tests import mutants
from tests.launch import ROOT

SCRIPTS = {"train", "sample", "bench", "study", "export", "plot"}
FILES = sorted(f for pattern in ("*.py", "fusedgpt/**/*.py", "data/*/*.py") for f in ROOT.glob(pattern))


def name_of(file):
    """'fusedgpt.bench.rows' for fusedgpt/bench/rows.py, 'fusedgpt' for its __init__.py."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(file): ast.parse(file.read_text()) for file in FILES}


def names_in(node):
    """The modules that an import statement may mean, as written."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


IMPORTS = {
    module: {name for node in ast.walk(tree) for name in names_in(node) if name in MODULES and name != module}
    for module, tree in MODULES.items()
}


def test_no_module_imports_itself_through_others():
    order = list(graphlib.TopologicalSorter(IMPORTS).static_order())  # raises CycleError
    assert order.index("fusedgpt.errors") < order.index("model") < order.index("train")


def test_a_name_stands_for_one_file_or_class():
    # three classes were called Run. Each script and each kind of benchmark has its own Settings
    names = [file.stem for file in ROOT.glob("fusedgpt/**/*.py") if file.stem != "__init__"]
    classes = (node.name for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    counts = collections.Counter([*names, *(name for name in classes if name != "Settings")])
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_script_is_imported():
    # but train.py's build and train_step, so that a benchmark times what users run
    imported = {(module, name) for module, names in IMPORTS.items() for name in names & SCRIPTS}
    assert imported == {("fusedgpt.bench.training", "train")}


def room_of(module):
    """The folder of fusedgpt/ that a module is in, otherwise the module."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "fusedgpt" else module


def test_no_room_imports_itself_through_others():
    rooms = {}
    for module, names in IMPORTS.items():
        rooms.setdefault(room_of(module), set()).update({room_of(name) for name in names} - {room_of(module)})
    order = list(graphlib.TopologicalSorter(rooms).static_order())  # raises CycleError
    floors = [f"fusedgpt.{room}" for room in ("machine", "attention", "training", "runs", "bench")]
    assert [room for room in order if room in floors] == floors


def test_model_and_configurator_know_little():
    rooms = ("attention", "dimensions", "eager", "errors", "generation", "interchange", "loss", "machine", "rotary")
    assert {room_of(name) for name in IMPORTS["model"]} - {"fusedgpt"} == {f"fusedgpt.{name}" for name in rooms}
    assert IMPORTS["configurator"] == {"fusedgpt.errors", "fusedgpt.home"}


@pytest.mark.parametrize(("room", "script"), [("fusedgpt.bench", "bench"), ("fusedgpt.studies", "study")])
def test_a_room_that_serves_a_script_is_known_to_it_alone(room, script):
    for module, names in IMPORTS.items():
        if not module.startswith(room) and module != script:
            assert not any(name.startswith(room) for name in names), module


def test_the_package_knows_no_model():
    for module, names in IMPORTS.items():
        if module.startswith("fusedgpt") and not module.startswith(("fusedgpt.bench", "fusedgpt.studies")):
            assert all(name.startswith("fusedgpt") for name in names), module


def test_functions_can_be_read():
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{module}.{node.name}"


def test_every_file_has_a_mutant_and_every_mutant_can_be_planted():
    # a refactor that removes the text of one should fail before `make test-slow` does
    found = mutants.table()
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("fusedgpt/**/*.py") if path.name != "__init__.py"}
    assert not files - {each.file for each in found}
    for each in found:
        ast.parse(each.planted(ROOT))
        for test in each.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_mutant_dies():
    # F15: 8 of 48 lived
    plant = [sys.executable, "tests/mutants.py"]
    done = subprocess.run(plant, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
