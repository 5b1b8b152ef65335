"""Make runs repeatable: a separate random stream for each use, and deterministic operations."""

import os

import numpy as np
import torch


def number(*stream: int | str) -> int:
    """The seed of a named stream, such as (1337, 'dropout', iteration).

    Each use (one weight, dropout of one micro-batch) has its own stream, so that it does not depend on earlier draws.
    """
    words = [int.from_bytes(word.encode()) if isinstance(word, str) else word for word in stream]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def seed(*stream: int | str) -> None:
    """Seed PyTorch on every device with a named stream."""
    torch.manual_seed(number(*stream))


def require_deterministic() -> None:
    """Let PyTorch raise an error for what is not deterministic. Inductor then chooses no kernels by their time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(True)
