"""Benchmarks without their costs: contenders run in this process, where PyTorch is, and no figure is drawn."""

import pytest

from fusedgpt.bench import kinds
from tests.fusedgpt.bench.nanogpt import MODEL


@pytest.fixture
def processes():
    """Contenders have processes of their own."""


@pytest.fixture
def drawn():
    """Figures are drawn into their files."""


@pytest.fixture(autouse=True)
def _cheap(request, monkeypatch):
    if "processes" not in request.fixturenames:
        for kind in kinds.KINDS.values():
            monkeypatch.setattr(kind, "TOGETHER", True)
    for kind in kinds.KINDS.values():
        monkeypatch.setattr(kind, "TURN", min(kind.TURN, 1e-3))  # a step
    if "drawn" not in request.fixturenames:  # that takes longer than to measure
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The folder of a stand-in for a clone of nanoGPT."""
    folder = tmp_path_factory.mktemp("nanogpt")
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text("")  # its command is not run
    return folder
