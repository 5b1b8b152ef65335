"""Runs of train.py in a process of their own, and how they end."""

import subprocess

import pytest

from fusedgpt.bench import child
from fusedgpt.errors import UserError


def test_a_sentence_before_other_chatter_is_still_the_reason(tmp_path, monkeypatch):
    said = subprocess.CompletedProcess([], returncode=1, stderr="error: flash cannot\nsome library says goodbye\n")
    monkeypatch.setattr(child.subprocess, "run", lambda *_, **__: said)
    with pytest.raises(UserError, match="flash cannot"):
        child.run({}, tmp_path / "run")
    said.returncode, said.stderr = -9, ""  # the system's own end to a full memory
    with pytest.raises(MemoryError):
        child.run({}, tmp_path / "run")


def test_the_reason_is_the_exception_and_not_the_advice_below_it(tmp_path, monkeypatch):
    # the last line of a CUDA error says how PyTorch could be compiled
    error = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 1',
        error,
        "Compile with `TORCH_USE_CUDA_DSA`",
    ]
    said = subprocess.CompletedProcess([], returncode=1, stderr="\n".join(lines))
    monkeypatch.setattr(child.subprocess, "run", lambda *_, **__: said)
    with pytest.raises(RuntimeError, match=f"status 1: {error}$"):
        child.run({}, tmp_path / "run")
    said.stderr = said.stderr.replace("an illegal memory access was encountered", "out of memory")
    with pytest.raises(MemoryError):
        child.run({}, tmp_path / "run")
