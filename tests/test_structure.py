"""The house rules of CONTRIBUTING.md that a machine can check: who imports whom, and how long a function may be."""

import ast
import graphlib
import tomllib

import pytest

from tests import mutants
from tests.launch import ROOT

SCRIPTS = {"train", "sample", "bench", "study", "export", "convert", "harness", "plot"}
# slow to import, or missing where only tests run
LAZY = {"datasets", "lm_eval", "matplotlib", "optuna", "sqlalchemy", "tokenizers", "transformers", "tyro", "wandb"}
LAZY |= {"gguf", "huggingface_hub"}
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


def test_the_files_are_found():
    assert {*SCRIPTS, "model", "configurator", "fusedgpt.bench.ladder", "data.shakespeare.prepare"} <= MODULES.keys()
    assert "fusedgpt.training.tuning" in IMPORTS["train"]


def test_no_module_imports_itself_through_others():
    order = list(graphlib.TopologicalSorter(IMPORTS).static_order())  # raises CycleError
    assert order.index("fusedgpt.errors") < order.index("model") < order.index("train")


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
    assert IMPORTS["configurator"] == {"fusedgpt.aliases", "fusedgpt.errors", "fusedgpt.home"}


@pytest.mark.parametrize(("room", "script"), [("fusedgpt.bench", "bench"), ("fusedgpt.studies", "study")])
def test_a_room_that_serves_a_script_is_known_to_it_alone(room, script):
    for module, names in IMPORTS.items():
        if not module.startswith(room) and module != script:
            assert not any(name.startswith(room) for name in names), module


def test_the_package_knows_no_model():
    for module, names in IMPORTS.items():
        if module.startswith("fusedgpt") and not module.startswith(("fusedgpt.bench", "fusedgpt.studies")):
            assert all(name.startswith("fusedgpt") for name in names), module


def test_slow_libraries_load_only_where_they_are_used():
    for module, tree in MODULES.items():
        top = {name for node in tree.body for name in names_in(node) if name}
        assert not {name.split(".")[0] for name in top} & LAZY, module


def test_text_is_read_and_written_in_a_named_encoding():
    # Windows would take the code page of its user's language
    for module, node in ((module, node) for module, tree in MODULES.items() for node in ast.walk(tree)):
        if not isinstance(node, ast.Call) or any(keyword.arg in ("encoding", None) for keyword in node.keywords):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        parts = [part for a in (*node.args[1:], *node.keywords) for part in ast.walk(a)]
        binary = any(isinstance(part, ast.Constant) and "b" in str(part.value) for part in parts)
        of_a_method = isinstance(node.func, ast.Attribute) and name == "open"  # of os, tarfile, the logger
        text = name in ("read_text", "write_text") or (name == "open" and not of_a_method and not binary)
        assert not text, f"{module}, line {node.lineno}: {ast.unparse(node)}"


def test_functions_can_be_read():
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{module}.{node.name}"
                lines = node.end_lineno - node.lineno + 1
                assert lines <= 60, f"{name} has {lines} lines"


def test_a_dependency_has_one_bound():
    # tokenizers used to have two
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [dependency.split(">=")[0] for dependency in dependencies]
    assert len(names) == len(set(names)) > 10


def test_every_mutant_can_be_planted():
    # a refactor that removes the text of one should fail before `make faults` does
    found = mutants.table()
    assert len(found) >= 40
    for each in found:
        ast.parse(each.planted(ROOT))
        for test in each.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test
