"""Benchmarks without their costs: train.py and visits run in this process, where PyTorch is, and no file is drawn."""

import subprocess
import types

import pytest

from fusedgpt.bench import child, recipe, visit
from tests.fusedgpt.bench.nanogpt import MODEL, TRAIN
from tests.fusedgpt.bench.small import UNDRAWN
from tests.launch import script


@pytest.fixture
def processes():
    """Runs and visits have processes of their own."""


@pytest.fixture
def drawn():
    """Figures are drawn into their files."""


@pytest.fixture(autouse=True)
def _cheap(request, monkeypatch):
    def run(command, preexec_fn=None, check=False, env=None, **options):
        if preexec_fn or command[1] != child.TRAIN:  # a limit of memory counts what a process imports
            return subprocess.run(command, preexec_fn=preexec_fn, check=check, env=env, **options)
        return script(*command[1:], check=False, **(env or {}))

    def of_a_visit(command, **options):
        return script(visit.__file__, command[-1], check=False)

    completed = subprocess.CompletedProcess
    if "processes" not in request.fixturenames:
        monkeypatch.setattr(child, "subprocess", types.SimpleNamespace(run=run, CompletedProcess=completed))
        monkeypatch.setattr(visit, "subprocess", types.SimpleNamespace(run=of_a_visit))
    if "drawn" not in request.fixturenames:
        for name, cheap in UNDRAWN.items():
            monkeypatch.setattr(name, cheap)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The folder of a stand-in for a clone of nanoGPT."""
    folder = tmp_path_factory.mktemp("nanogpt")
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture
def short_recipe(tmp_path, monkeypatch):
    """nanoGPT's recipe and ours end after ten iterations."""
    short = tmp_path / "train_shakespeare_cpu.py"
    short.write_text(f"{recipe.OURS.read_text()}\nmax_iters = lr_decay_iters = eval_interval = 10\n")
    monkeypatch.setattr(recipe, "OURS", short)
    monkeypatch.setitem(recipe.RECIPE, "eval_iters", 1)
