"""Runs of train.py in a process of their own, and how they end."""

import types

import pytest

from fusedgpt.bench import training
from fusedgpt.errors import UserError


def test_a_sentence_before_other_chatter_is_still_the_reason(tmp_path, monkeypatch):
    said = types.SimpleNamespace(returncode=1, stderr="error: flash cannot\nsome library says goodbye\n")
    monkeypatch.setattr(training.subprocess, "run", lambda *_, **__: said)
    with pytest.raises(UserError, match="flash cannot"):
        training.run({}, tmp_path / "run")
    said.returncode, said.stderr = -9, ""  # the system's own end to a full memory
    with pytest.raises(MemoryError):
        training.run({}, tmp_path / "run")
