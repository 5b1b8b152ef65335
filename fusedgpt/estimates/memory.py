"""Estimates of the memory that a run takes of each GPU. Formulas only, no PyTorch; symbols are those of run.py."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from fusedgpt.attention.table import scores_held
from fusedgpt.estimates.run import BLOCK, Run, hidden, keys_seen, scores_of, tokens_of, widths

# measured over estimated bytes beyond weights and moments: test_memory.py, and two published runs of torchtitan
RANGE = (0.8, 1.2)


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
    def of(cls, config: Any, run: Run) -> Self:
        """Bytes of a GPU's tensors at the fullest moment of a step, without CUDA's and NCCL's own memory.

        Weights, gradients and AdamW's moments are 16 bytes a parameter, divided over the shards (ZeRO,
        arXiv:1910.02054, section 3.1). Gradients of earlier micro-batches stay, and FSDP does not shard them. DDP's
        buckets stay too.
        """
        N, state = config.num_params, _optimizer_state(config, run.optimizer == "muon")
        earlier = 4 * N if run.micro_steps > 1 or (run.shards == 1 and run.gpus > 1) else 0
        moments = _moments(config, run, earlier)
        found = (cls(4 * N / run.shards, gradients, state / run.shards, *rest) for gradients, *rest in moments)
        return max(found, key=lambda moment: moment.total)

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(asdict(self).values())

    @property
    def range(self) -> tuple[float, float]:
        """The fewest and the most bytes to expect; weights and moments are certain."""
        certain = self.weights + self.optimizer
        return tuple(certain + share * (self.total - certain) for share in RANGE)


def least_memory(config: Any, batch_size: int, itemsize: int, backward: bool, muon: bool, shards: int = 1) -> int:
    """Bytes that a GPU needs at least to train: float32 weights, and the logits of a micro-batch.

    With `backward`, AdamW's moments too, of which `muon` needs only one for a hidden matrix, and either the logits or,
    once they are gone, all gradients.
    """
    logits = batch_size * config.block_size * config.padded_vocab_size * itemsize // config.chunks
    weights = 4 * config.num_params // shards
    if not backward:
        return weights + logits
    return weights + _optimizer_state(config, muon) // shards + max(weights, logits)


def _optimizer_state(config, muon):
    """Bytes of AdamW's two moments; Muon has one for a hidden matrix."""
    return 8 * config.num_params - 4 * hidden(config) * muon


def _moments(config, run, earlier):
    """(gradients, activations, logits, copies) at each moment that can be the fullest.

    The moments are the loss, with all activations and logits; the backward of the last block, which may recompute
    activations; the backward of the first block, with all gradients; and the embedding's, which, if tied, adds up the
    gradients of its two uses. FSDP keeps embeddings and norms gathered, and two blocks gathered or in reduction. The
    optimizer's step is no such moment: what Muon puts together is a few matrices, less than a block in reduction.
    """
    N, e, L = config.num_params, run.itemsize, config.n_layer
    block, embedding, low = config.block_matrices, config.padded_vocab_size * config.n_embd, e < 4
    layers = [(_block(config, run, seen), _kept(config, run, seen)) for seen in keys_seen(config)]
    activations = sum(number * kept for (_, kept), number in zip(layers, keys_seen(config).values()))
    activations += tokens_of(config, run) * config.n_embd * _norm(config, run) + _mask(config, run, 4)
    whole, kept = max(layers)  # with or without a window
    working = max(_working(config, run, seen) for seen in keys_seen(config))
    again = whole - kept  # 0 if all is kept
    if run.shards > 1:
        root, gathered = 4 * (N - hidden(config)), 2 * e * block
        gradients = earlier + 4 * (N - min(2, L) * block) / run.shards + (0 if earlier else root)
        reduced = (4 + 2 * e) * block  # a block's gradient, its float32 copy, and the gradient of the next
        copies = [root + gathered + low * e * embedding] * 2
    else:
        root, gathered, gradients, reduced = 0, 0, 4 * N, 0
        copies = [low * e * (hidden(config) + embedding)] * 2
        if run.recompute == "block":  # a recomputed block casts its weights again
            copies[1] = low * e * (block + embedding)
    twice = 4 * embedding * (1 if low else 2) * config.tie_embeddings  # in float32 the sum is a third tensor
    return (
        (earlier, activations, _logits(config, run), copies[0]),
        (earlier + 4 * embedding, activations + again + working, 0, copies[1]),
        (gradients + reduced, whole + working, 0, root + gathered),
        (gradients + twice, 0, 0, root),
    )


def _block(config, run, seen):
    """Bytes that the backward of a block needs: "Reducing Activation Recomputation", arXiv:2205.05198, section 4.1.

    There the residual stream has 16 bits. Here it is float32, and autocast keeps the inputs of both norms (8 C) and
    what the products read: normalised inputs (e C each), q, k, v (e (A + 2 K)), attention's output (e A), and the wide
    layer before and after GELU (2 e I). A SwiGLU keeps both wide layers, the gate's SiLU and the product (4 e I).
    Rotation makes new queries and keys (e (A + K)); v keeps the memory of the old ones. If compiled, the backward
    computes the SiLU again, and no old queries and keys are kept.
    """
    (C, A, K, inside), e, eager = widths(config), run.itemsize, not run.compile
    norms, wide = 1 if config.parallel_block else 2, 3 + eager if config.mlp == "swiglu" else 2
    rotated = A + K if eager and (config.position == "rotary" or config.qk_norm) else 0
    heads = e * (2 * A + 2 * K + rotated) + (_norm(config, run) - 4 - e) * (A + K) * config.qk_norm
    linear = tokens_of(config, run) * (norms * _norm(config, run) * C + heads + e * wide * inside)
    return linear + 2 * _mask(config, run, run.itemsize) + _inner(config, run, seen)


def _norm(config, run):
    """Bytes of a channel that a norm before a product keeps: its float32 input, and its output as the product reads it.

    On a CPU PyTorch's RMSNorm is made of smaller operations. If eager, it keeps the input divided by its mean too.
    """
    return 4 + run.itemsize + 4 * (config.norm == "rmsnorm" and run.cpu and not run.compile)


def _kept(config, run, seen):
    """Bytes of a block that are kept until its backward, such as its input; the rest is recomputed."""
    inner = _inner(config, run, seen) if run.recompute == "attention" else 0
    return 4 * tokens_of(config, run) * config.n_embd if run.recompute == "block" else _block(config, run, seen) - inner


def _working(config, run, seen):
    """Peak bytes that the backward of a block holds beside what was kept for it.

    In the MLP: gradients of the residual stream, of a branch and of the wide layers. In attention: two tables of
    scores, less what the MLP kept, which is freed by then.
    """
    (C, _, _, inside), e, T, gated = widths(config), run.itemsize, config.block_size, config.mlp == "swiglu"
    blocked = scores_held(run.attention) == "a block"
    rows = min(BLOCK, T) if blocked else T if scores_of(config, run, seen) else 0
    columns = min(T, BLOCK + seen) if blocked else T
    tables = 2 * _score_bytes(run) * run.batch_size * config.n_head * rows * columns
    in_mlp = (4 + (e < 4) * e) * C + (1 + gated) * e * inside
    return max(tokens_of(config, run) * in_mlp, tables - tokens_of(config, run) * e * (C + (2 + 2 * gated) * inside))


def _inner(config, run, seen):
    """Bytes that attention keeps beside q, k, v and its output.

    A fused kernel keeps a float32 for each query and head (FlashAttention, arXiv:2205.14135). Other kernels keep the
    softmax of every score, a cast of it for the product (compiled: casts alone), and with dropout its mask and a copy.
    Causal attention needs one mask, if any; within documents each sequence has its own. SDPA keeps that, or the mask of
    a window, in the dtype of the products. Heads that share keys then become rows of one (functions.as_rows), each with
    the mask, and the queries and the output are copied.
    """
    T, packed = config.block_size, config.packed
    masks = run.batch_size if packed else 1
    if not (scores := scores_of(config, run, seen)):
        masked, group = (packed or seen < T) and run.attention != "flex", config.n_head // config.kv_heads
        mask = run.itemsize * masks * group * T * T if masked else 0
        rows = 2 * run.itemsize * tokens_of(config, run) * widths(config)[1] if masked and group > 1 else 0
        return 4 * tokens_of(config, run) * config.n_head + mask + rows
    softmax, e, dropout = _score_bytes(run), run.itemsize, config.dropout > 0
    each = 3 * softmax if run.cpu and dropout else softmax + (e if dropout or e < softmax else 0) + dropout
    if run.compile and e < softmax:
        each = 2 * e + dropout  # the scores and their softmax, both cast: the backward computes in float32 again
    return each * scores + masks * scores // (run.batch_size * config.n_head)  # a mask serves all heads


def _score_bytes(run):
    """Bytes of a score in the softmax.

    On a GPU it is float32, in which autocast computes the softmax, but for the named `math` (functions.only). On a CPU
    it has the dtype of the products. Only `sdpa` and `masked` compute in float32 there, if dropout leaves PyTorch no
    kernel but math.
    """
    narrow = scores_held(run.attention) != "none" if run.cpu else run.attention == "math"
    return run.itemsize if narrow else 4


def _mask(config, run, itemsize):
    """Bytes of a dropout mask of the residual stream; on a CPU it has the `itemsize` of what it masks."""
    return tokens_of(config, run) * config.n_embd * (itemsize if run.cpu else 1) if config.dropout else 0


def _logits(config, run):
    """Peak bytes of the logits and their gradients.

    If eager, the cross-entropy's gradient takes three float32 numbers for each logit. If compiled, it takes the logits'
    place, and memory also holds the output layer's gradient, not yet in float32. On a GPU the compiler pads products of
    an odd number of ids itself, in a second tensor. Chunks compute a part of the logits at a time, and add that
    gradient up.
    """
    e, V = run.itemsize, config.padded_vocab_size
    tensors = 2 if V % 8 and not run.cpu else 1
    if config.chunks > 1:
        return 12 * tokens_of(config, run) * V // config.chunks + 2 * e * V * config.n_embd
    return (e * (tensors * tokens_of(config, run) + config.n_embd) if run.compile else 12 * tokens_of(config, run)) * V
