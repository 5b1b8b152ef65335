"""Estimates of the memory that a training run takes of each GPU. Formulas only, no PyTorch.

Symbols: N parameters, L layers, C channels, nh heads, A and K channels of all heads of queries and of keys, I channels
inside an MLP, V vocabulary with its padding, B sequences and T tokens of each in a micro-batch, M = B T, e bytes of the
dtype of matrix products. In GPT-2, A = K = C and I = 4 C. A `config` is a GPTConfig. Sizes are bytes.
"""

import collections
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from fusedgpt.attention.table import scores_held

BLOCK = 256  # queries in a block of attention=blocked


@dataclass(frozen=True)
class Load:
    """The settings of a training run on which memory depends; names and values as in Settings."""

    batch_size: int
    gradient_accumulation_steps: int = 1  # over all GPUs
    attention: str = "auto"
    optimizer: str = "adamw"
    ema_decay: float = 0.0
    parallel: str = "ddp"
    shard_size: int | None = None
    recompute: str = "none"
    dtype: str = "bfloat16"
    compile: bool = True
    gpus: int = 1
    cpu: bool = False  # whether `gpus` are processes on a CPU, on which autocast and dropout keep other dtypes

    @classmethod
    def of(cls, s: Any, **resolved) -> Self:
        """The Load of the settings `s`; `resolved` gives values that `s` lacks, or has as "auto"."""
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

    def tokens(self, config: Any) -> int:
        """M: tokens of a micro-batch."""
        return self.batch_size * config.block_size


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU at one moment, by what they hold."""

    weights: float  # float32
    gradients: float
    optimizer: float
    activations: float  # what the backward needs, and what it computes on the way
    logits: float  # and their gradients
    copies: float  # weights that are cast to the dtype of the products, or gathered from other GPUs

    @classmethod
    def of(cls, config: Any, run: Load) -> Self:
        """Bytes of a GPU's tensors at the fullest moment of a step, without CUDA's and NCCL's own memory.

        Weights, gradients and AdamW's moments are 16 bytes a parameter, averages of weights 4 more, divided over the
        shards (ZeRO, arXiv:1910.02054, section 3.1). Gradients of earlier micro-batches and DDP's buckets stay whole.
        """
        N, averaged = config.num_params, run.ema_decay > 0
        state = _optimizer_state(config, run.optimizer == "muon") + 4 * N * averaged
        earlier = 4 * N if run.micro_steps > 1 or (run.shards == 1 and run.gpus > 1) else 0
        moments = _moments(config, run, earlier)
        found = (cls(4 * N / run.shards, gradients, state / run.shards, *rest) for gradients, *rest in moments)
        return max(found, key=lambda moment: moment.total)

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(asdict(self).values())


def least_memory(config: Any, batch_size: int, itemsize: int, backward: bool, muon: bool, shards: int = 1) -> int:
    """Bytes that a GPU needs at least: float32 weights and the logits of a micro-batch.

    With `backward`, the moments too, and either the logits or, once they are gone, all gradients.
    """
    logits = batch_size * config.block_size * config.padded_vocab_size * itemsize // config.chunks
    weights = 4 * config.num_params // shards
    if not backward:
        return weights + logits
    return weights + _optimizer_state(config, muon) // shards + max(weights, logits)


def _optimizer_state(config, muon):
    """Bytes of AdamW's two moments; Muon has one for a hidden matrix."""
    return 8 * config.num_params - 4 * config.n_layer * config.block_matrices * muon


def _moments(config, run, earlier):
    """(gradients, activations, logits, copies) at each moment that can be the fullest.

    The moments are the loss; the backward of the last block, which may recompute activations; that of the first block,
    with all gradients; and the embedding's, which, if tied, adds up the gradients of its two uses.
    """
    N, e, L = config.num_params, run.itemsize, config.n_layer
    block, embedding, low = config.block_matrices, config.padded_vocab_size * config.n_embd, e < 4
    layers = [(_block(config, run, seen), _kept(config, run, seen)) for seen in _keys_seen(config)]
    activations = sum(number * kept for (_, kept), number in zip(layers, _keys_seen(config).values()))
    activations += run.tokens(config) * config.n_embd * _norm(config, run) + _mask(config, run, 4)
    whole, kept = max(layers)  # with or without a window; the backward computes again what is not kept
    working = max(_working(config, run, seen) for seen in _keys_seen(config))
    if run.shards > 1:
        root, gathered = 4 * (N - L * block), 2 * e * block
        gradients = earlier + 4 * (N - min(2, L) * block) / run.shards + (0 if earlier else root)
        reduced = (4 + 2 * e) * block  # a block's gradient, its float32 copy, and the gradient of the next
        copies = [root + gathered + low * e * embedding] * 2
    else:
        root, gathered, gradients, reduced = 0, 0, 4 * N, 0
        copies = [low * e * (L * block + embedding)] * 2
        if run.recompute == "block":  # a recomputed block casts its weights again
            copies[1] = low * e * (block + embedding)
    looked_up = 4 * config.looked_up * (run.shards == 1)  # whose gradients come last
    twice = 4 * embedding * (1 if low else 2) * config.tie_embeddings  # in float32 the sum is a third tensor
    return (
        (earlier, activations, _logits(config, run), copies[0]),
        (earlier + 4 * embedding, activations + whole - kept + working, 0, copies[1]),
        (gradients - looked_up + reduced, whole + working, 0, root + gathered),
        (gradients + twice, 0, 0, root),
    )


def _block(config, run, seen):
    """Bytes that the backward of a block needs: "Reducing Activation Recomputation", arXiv:2205.05198, section 4.1.

    Inputs of both norms (8 C), what products read: normalised inputs (e C each), q, k, v (e (A + 2 K)), attention's
    output (e A), the MLP's wide layers (2 e I; SwiGLU 4 e I, compiled 3); eager rotation's new q and k (e (A + K)).
    """
    (C, A, K, inside), e, eager = _widths(config), run.itemsize, not run.compile
    norms, wide = 2 - config.parallel_block, 2 + (1 + eager) * (config.mlp == "swiglu")
    rotated = (A + K) * (eager and (config.position == "rotary" or config.qk_norm))
    qk_norm = _norm(config, run) - 4 - e + 4 * (eager and e < 4)  # eager, a cast to float32 is kept
    heads = e * (2 * A + 2 * K + rotated) + qk_norm * (A + K) * config.qk_norm
    linear = run.tokens(config) * (norms * _norm(config, run) * C + heads + e * wide * inside)
    return linear + 2 * _mask(config, run, run.itemsize) + _inner(config, run, seen)


def _norm(config, run):
    """Bytes of a channel that a norm keeps: its input, its output, and in a CPU's eager RMSNorm one more float32."""
    return 4 + run.itemsize + 4 * (config.norm == "rmsnorm" and run.cpu and not run.compile)


def _kept(config, run, seen):
    """Bytes of a block that are kept until its backward, such as its input; the rest is recomputed."""
    if run.recompute == "block":
        return 4 * run.tokens(config) * config.n_embd
    return _block(config, run, seen) - _inner(config, run, seen) * (run.recompute == "attention")


def _working(config, run, seen):
    """Peak bytes that the backward of a block holds beside what was kept for it: in the MLP, gradients of the residual
    stream, of a branch and of the wide layers; in attention, two tables of scores, less what the MLP has freed."""
    (C, _, _, inside), e, T, gated = _widths(config), run.itemsize, config.block_size, config.mlp == "swiglu"
    rows, columns = (T if _scores_of(config, run, seen) else 0), T
    if scores_held(run.attention) == "a block":
        rows, columns = min(BLOCK, T), min(T, BLOCK + seen)
    tables = 2 * _score_bytes(run) * run.batch_size * config.n_head * rows * columns
    in_mlp = (4 + (e < 4) * e) * C + (1 + gated) * e * inside
    return max(run.tokens(config) * in_mlp, tables - run.tokens(config) * e * (C + (2 + 2 * gated) * inside))


def _inner(config, run, seen):
    """Bytes that attention keeps beside q, k, v and its output.

    A fused kernel keeps a float32 for each query and head (FlashAttention, arXiv:2205.14135). Other kernels keep the
    softmax of every score, a cast of it for the product, and with dropout its mask and a copy. SDPA keeps the mask of
    documents or a window; heads that share keys become rows of one (functions.as_rows), with copies of q and output.
    """
    T, e, dropout = config.block_size, run.itemsize, config.dropout > 0
    masks, scores = (run.batch_size if config.packed else 1), _scores_of(config, run, seen)
    if not scores:
        kept, group = 4 * run.tokens(config) * config.n_head, config.n_head // config.kv_heads
        if (config.packed or seen < T) and run.attention != "flex":
            kept += e * masks * group * T * T + (group > 1) * 2 * e * run.tokens(config) * _widths(config)[1]
        return kept
    softmax = _score_bytes(run)
    each = softmax + e * (dropout or e < softmax) + dropout
    if run.cpu and dropout:
        each = 3 * softmax
    if run.compile and e < softmax:
        each = 2 * e + dropout  # the scores and their softmax, both cast: the backward computes in float32 again
    return each * scores + masks * scores // (run.batch_size * config.n_head)  # a mask serves all heads


def _score_bytes(run):
    """Bytes of a score in the softmax: float32 under a GPU's autocast but in `math`; on a CPU those of the products."""
    if run.attention == "math" or (run.cpu and scores_held(run.attention) != "none"):
        return run.itemsize
    return 4


def _mask(config, run, itemsize):
    """Bytes of a dropout mask of the residual stream; on a CPU it has the `itemsize` of what it masks."""
    return run.tokens(config) * config.n_embd * (itemsize if run.cpu else 1) * (config.dropout > 0)


def _logits(config, run):
    """Peak bytes of the logits and their gradients.

    If eager, the cross-entropy's gradient takes three float32 numbers for each logit; if compiled, the logits' place,
    beside the output layer's gradient. On a GPU the compiler pads an odd number of ids in a second tensor.
    """
    M, e, V = run.tokens(config), run.itemsize, config.padded_vocab_size
    if config.chunks > 1:
        return 12 * M * V // config.chunks + 4 * V * config.n_embd
    if not run.compile:
        return 12 * M * V
    padded = V % 8 > 0 and not run.cpu
    return e * ((1 + padded) * M + config.n_embd) * V


def _widths(config):
    """C, A, K and I."""
    return config.n_embd, config.n_head * config.head_channels, config.kv_heads * config.head_channels, config.inner


def _keys_seen(config):
    """{the most keys that a query sees: the number of such layers}: T, or a window."""
    return collections.Counter(min(window or config.block_size, config.block_size) for window in config.windows)


def _scores_of(config, run, seen):
    """Scores that a layer's attention keeps for a micro-batch: all, those that blocks of queries see, or none."""
    T, held, scores = config.block_size, scores_held(run.attention), 0
    if held == "all" or (run.cpu and config.dropout and held == "none"):  # on a CPU no fused kernel has dropout
        scores = T * T
    elif held == "a block":
        blocks = [(start, min(start + BLOCK, T)) for start in range(0, T, BLOCK)]
        scores = sum((stop - start) * (stop - max(0, start + 1 - seen)) for start, stop in blocks)
    return run.batch_size * config.n_head * scores
