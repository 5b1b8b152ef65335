"""What makes a run repeatable: a random stream of its own for each use, and operations that are deterministic."""

import os

import numpy as np
import torch


def seed(*stream: int | str) -> None:
    """Seed PyTorch on every device with the stream that a tuple names, such as (1337, 'dropout', iteration).

    Each use (weights, dropout of one micro-batch) has its own stream, so that none depends on what was drawn before.
    """
    words = [int.from_bytes(word.encode()) if isinstance(word, str) else word for word in stream]
    torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1))


def require_deterministic() -> None:
    """From here on, PyTorch raises an error for every operation that is not deterministic.

    Inductor then chooses no kernel by timing it, because a choice that varies changes the rounding.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(True)
