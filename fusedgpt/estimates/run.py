"""A training run as the estimates of memory see it: its settings, and sizes of its tensors. No PyTorch.

Symbols: N parameters, L layers, C channels, nh heads, A and K channels of all heads of queries and of keys, I channels
inside an MLP, V vocabulary with its padding, B sequences and T tokens of each in a micro-batch, M = B T, e bytes of the
dtype of matrix products. In GPT-2, A = K = C and I = 4 C. A `config` is a GPTConfig. Sizes are bytes.
"""

import collections
from dataclasses import dataclass, fields
from typing import Any, Self

from fusedgpt.attention.table import scores_held

BLOCK = 256  # queries in a block of attention=blocked


@dataclass(frozen=True)
class Run:
    """The settings of a training run on which memory depends; names and values as in Settings."""

    batch_size: int
    gradient_accumulation_steps: int = 1  # over all GPUs
    attention: str = "auto"
    optimizer: str = "adamw"
    parallel: str = "ddp"
    shard_size: int | None = None
    recompute: str = "none"
    dtype: str = "bfloat16"
    compile: bool = True
    gpus: int = 1
    cpu: bool = False  # whether `gpus` are processes on a CPU, on which autocast and dropout keep other dtypes

    @classmethod
    def of(cls, s: Any, **resolved) -> Self:
        """A Run of the settings `s`; `resolved` gives values that `s` lacks, or has as "auto"."""
        shared = {field.name: getattr(s, field.name) for field in fields(cls) if hasattr(s, field.name)}
        return cls(**shared | resolved)

    @property
    def shards(self) -> int:
        """GPUs that hold a copy of the model together; one alone holds all of it, whatever shard_size says."""
        return (self.shard_size or self.gpus) if self.parallel == "fsdp" and self.gpus > 1 else 1

    @property
    def micro_steps(self) -> int:
        """Micro-batches of a step on each GPU."""
        return max(1, self.gradient_accumulation_steps // self.gpus)

    @property
    def itemsize(self) -> int:
        """e: bytes of the dtype of matrix products."""
        return 4 if self.dtype == "float32" else 2


def hidden(config: Any) -> int:
    """Parameters of the blocks' matrices: 12 L C² in GPT-2."""
    return config.n_layer * config.block_matrices


def widths(config: Any) -> tuple[int, int, int, int]:
    """C, A, K and I."""
    hs = config.head_channels
    return config.n_embd, config.n_head * hs, config.kv_heads * hs, config.inner


def keys_seen(config: Any) -> dict[int, int]:
    """{the most keys that a query sees: the number of such layers}: T, or a window."""
    found, T = collections.Counter(), config.block_size
    for window, layers in config.layers_by_window.items():
        found[min(window or T, T)] += layers
    return found


def tokens_of(config: Any, run: Run) -> int:
    """M: tokens of a micro-batch."""
    return run.batch_size * config.block_size


def scores_of(config: Any, run: Run, seen: int) -> int:
    """Scores that a layer's attention keeps for a micro-batch: all, those that blocks of queries see, or none."""
    T = config.block_size
    held = scores_held(run.attention)
    whole = held == "all" or (run.cpu and config.dropout and held == "none")  # on a CPU no fused kernel has dropout
    blocks = [(start, min(start + BLOCK, T)) for start in range(0, T, BLOCK)] if held == "a block" else []
    in_blocks = sum((stop - start) * (stop - max(0, start + 1 - seen)) for start, stop in blocks)
    return run.batch_size * config.n_head * (T * T if whole else in_blocks)
