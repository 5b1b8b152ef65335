"""train.py's runs in a benchmark, forked: importing PyTorch takes longer than they do."""

import subprocess
import types

import pytest

from fusedgpt.bench import child
from tests.launch import script


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    def run(command, preexec_fn=None, check=False, env=None, **options):
        if preexec_fn or command[1] != child.TRAIN:  # a limit of memory counts what a process imports
            return subprocess.run(command, preexec_fn=preexec_fn, check=check, env=env, **options)
        return script(*command[1:], check=False, **(env or {}))

    completed = subprocess.CompletedProcess
    monkeypatch.setattr(child, "subprocess", types.SimpleNamespace(run=run, CompletedProcess=completed))
