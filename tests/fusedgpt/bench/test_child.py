"""Runs of train.py in a process of their own, and how they end."""

import subprocess

import pytest

from fusedgpt.bench import child, ladder
from fusedgpt.errors import UserError

ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
FULL = "torch.AcceleratorError: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("code", "said", "error", "reason"),
    [
        (1, "error: attention='flash' cannot train\nsome library says goodbye\n", UserError, "'flash' cannot train"),
        # all of these were refusals, and so final: they stayed after the data was prepared or the disk had room
        (1, "error: [Errno 28] No space left on device\n", ChildProcessError, "No space left on device"),
        (1, "error: dataset=shakespeare_char has no data here: run\n", ChildProcessError, "has no data here"),
        (-9, "", MemoryError, "exit status -9"),  # the system's own end to a full memory
        # the last line of a CUDA error says how PyTorch could be compiled
        (
            1,
            f"Traceback\n  line 1\n{ILLEGAL}\nCompile with `TORCH_USE_CUDA_DSA`",
            RuntimeError,
            f"status 1: {ILLEGAL}$",
        ),
        (1, f"Traceback\n  line 1\n{FULL}\nCompile with `TORCH_USE_CUDA_DSA`", MemoryError, FULL),
    ],
)
def test_the_reason_is_the_sentence_or_the_exception_and_not_what_follows(
    code, said, error, reason, tmp_path, monkeypatch
):
    done = subprocess.CompletedProcess([], returncode=code, stderr=said)
    monkeypatch.setattr(child.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(error, match=reason):
        child.run({}, tmp_path / "run")


@pytest.mark.parametrize("given", [{}, {"choose": "remembered"}])
def test_what_auto_took_earlier_is_no_measurement_and_variables_are_beside_ours(given, tmp_path, monkeypatch):
    # a kernel that was fastest beside another program, or with another driver, would be in every later row
    calls, done = [], subprocess.CompletedProcess([], returncode=1, stderr="error: enough\n")
    monkeypatch.setattr(child.subprocess, "run", lambda command, env, **_: calls.append((command, env)) or done)
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", "1")
    with pytest.raises(ChildProcessError, match="enough"):
        child.run(given, tmp_path / "run", variables=ladder.USUAL)
    ((command, env),) = calls
    assert [word for word in map(str, command) if word.startswith("--choose")] == ["--choose=again"]
    assert ladder.USUAL.items() <= env.items() and env["PATH"]
