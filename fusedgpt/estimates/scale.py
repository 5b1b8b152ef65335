"""Estimates of a training run: memory of each GPU, seconds of a step, and its bottleneck. Formulas only, no PyTorch.

Symbols: N parameters, L layers, C channels, nh heads, A and K channels of all heads of queries and of keys, I channels
inside an MLP, V vocabulary with its padding, B sequences and T tokens of each in a micro-batch, M = B T, e bytes of the
dtype of matrix products. In GPT-2, A = K = C and I = 4 C. A `config` is a GPTConfig. Sizes are bytes, times seconds.
results/plan/README.md says how far off these estimates are.
"""

import collections
import functools
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from fusedgpt.attention.table import scores_held
from fusedgpt.machine.gpus import GPU, Network

PRODUCTS = 0.81  # share of the largest products' rate: 640 of 794 TFLOP/s for products over 768 channels on an H200
# the shares of a data sheet's figures that kernels reach
FLASH = 0.3  # FLOP/s of a fused attention kernel with heads of 64: FlashAttention-3, arXiv:2407.08608, figures 5, 6
TRAFFIC = 0.9  # bytes/s of the memory: 4.3 of 4.8 TB/s on an H200
LINK = 0.8  # bytes/s of a link: NCCL's authors expect 370 of an H100's 450 GB/s (NVIDIA/nccl-tests#212)
REST = 0.17  # uncounted seconds for each counted second of computation, fitted (results/plan/README.md)
# measured over estimated: seconds, and bytes beyond weights and moments, in all cases of tests/plan_errors.py
TIME_RANGE, MEMORY_RANGE = (0.75, 1.5), (0.8, 1.2)

BUCKET = 100 * 2**20  # bytes of gradients in a message of DDP: distributed.BUCKET_MB
BLOCK = 256  # queries in a block of attention=blocked


@dataclass(frozen=True)
class Run:
    """The settings of a training run on which memory and time depend; names and values as in Settings."""

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


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU at one moment, by what they hold."""

    weights: float  # float32
    gradients: float
    optimizer: float
    activations: float  # what the backward needs, and what it computes on the way
    logits: float  # and their gradients
    copies: float  # weights that are cast to the dtype of the products, or gathered from other GPUs

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(asdict(self).values())

    @property
    def range(self) -> tuple[float, float]:
        """The fewest and the most bytes to expect; weights and moments are certain."""
        certain = self.weights + self.optimizer
        return tuple(certain + share * (self.total - certain) for share in MEMORY_RANGE)


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


def hidden(config: Any) -> int:
    """Parameters of the blocks' matrices: 12 L C² in GPT-2."""
    return config.n_layer * config.block_matrices


def _widths(config):
    """C, A, K and I."""
    hs = config.head_channels
    return config.n_embd, config.n_head * hs, config.kv_heads * hs, config.inner


def _seen(config):
    """{the most keys that a query sees: the number of such layers}: T, or a window."""
    found, T = collections.Counter(), config.block_size
    for window, layers in config.layers_by_window.items():
        found[min(window or T, T)] += layers
    return found


def _optimizer_state(config, muon):
    """Bytes of AdamW's two moments; Muon has one for a hidden matrix."""
    return 8 * config.num_params - 4 * hidden(config) * muon


def memory(config: Any, run: Run) -> Memory:
    """Bytes of a GPU's tensors at the fullest moment of a step, without CUDA's and NCCL's own memory.

    Weights, gradients and AdamW's moments are 16 bytes a parameter, divided over the shards (ZeRO, arXiv:1910.02054,
    section 3.1). Gradients of earlier micro-batches stay, and FSDP does not shard them. DDP's buckets stay too.
    """
    N, state = config.num_params, _optimizer_state(config, run.optimizer == "muon")
    earlier = 4 * N if run.micro_steps > 1 or (run.shards == 1 and run.gpus > 1) else 0
    moments = _moments(config, run, earlier)
    found = (Memory(4 * N / run.shards, gradients, state / run.shards, *rest) for gradients, *rest in moments)
    return max(found, key=lambda moment: moment.total)


def _moments(config, run, earlier):
    """(gradients, activations, logits, copies) at each moment that can be the fullest.

    The moments are the loss, with all activations and logits; the backward of the last block, which may recompute
    activations; the backward of the first block, with all gradients; and the embedding's, which, if tied, adds up the
    gradients of its two uses. FSDP keeps embeddings and norms gathered, and two blocks gathered or in reduction.
    """
    N, e, L = config.num_params, run.itemsize, config.n_layer
    block, embedding, low = config.block_matrices, config.padded_vocab_size * config.n_embd, e < 4
    layers = [(_block(config, run, seen), _kept(config, run, seen)) for seen in _seen(config)]
    activations = sum(number * kept for (_, kept), number in zip(layers, _seen(config).values()))
    activations += _tokens(config, run) * config.n_embd * _norm(config, run) + _mask(config, run, 4)
    whole, kept = max(layers)  # with or without a window
    working = max(_working(config, run, seen) for seen in _seen(config))
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


def _tokens(config, run):
    """M: tokens of a micro-batch."""
    return run.batch_size * config.block_size


def _block(config, run, seen):
    """Bytes that the backward of a block needs: "Reducing Activation Recomputation", arXiv:2205.05198, section 4.1.

    There the residual stream has 16 bits. Here it is float32, and autocast keeps the inputs of both norms (8 C) and
    what the products read: normalised inputs (e C each), q, k, v (e (A + 2 K)), attention's output (e A), and the wide
    layer before and after GELU (2 e I). A SwiGLU keeps both wide layers, the gate's SiLU and the product (4 e I).
    Rotation makes new queries and keys (e (A + K)); v keeps the memory of the old ones. If compiled, the backward
    computes the SiLU again, and no old queries and keys are kept.
    """
    (C, A, K, inside), e, eager = _widths(config), run.itemsize, not run.compile
    norms, wide = 1 if config.parallel_block else 2, 3 + eager if config.mlp == "swiglu" else 2
    rotated = A + K if eager and (config.position == "rotary" or config.qk_norm) else 0
    heads = e * (2 * A + 2 * K + rotated) + (_norm(config, run) - 4 - e) * (A + K) * config.qk_norm
    linear = _tokens(config, run) * (norms * _norm(config, run) * C + heads + e * wide * inside)
    return linear + 2 * _mask(config, run, run.itemsize) + _inner(config, run, seen)


def _norm(config, run):
    """Bytes of a channel that a norm before a product keeps: its float32 input, and its output as the product reads it.

    On a CPU PyTorch's RMSNorm is made of smaller operations. If eager, it keeps the input divided by its mean too.
    """
    return 4 + run.itemsize + 4 * (config.norm == "rmsnorm" and run.cpu and not run.compile)


def _kept(config, run, seen):
    """Bytes of a block that are kept until its backward, such as its input; the rest is recomputed."""
    inner = _inner(config, run, seen) if run.recompute == "attention" else 0
    return 4 * _tokens(config, run) * config.n_embd if run.recompute == "block" else _block(config, run, seen) - inner


def _working(config, run, seen):
    """Peak bytes that the backward of a block holds beside what was kept for it.

    In the MLP: gradients of the residual stream, of a branch and of the wide layers. In attention: two tables of
    scores, less what the MLP kept, which is freed by then.
    """
    (C, _, _, inside), e, T, gated = _widths(config), run.itemsize, config.block_size, config.mlp == "swiglu"
    blocked = scores_held(run.attention) == "a block"
    rows = min(BLOCK, T) if blocked else T if _scores(config, run, seen) else 0
    columns = min(T, BLOCK + seen) if blocked else T
    tables = 2 * _score_bytes(run) * run.batch_size * config.n_head * rows * columns
    in_mlp = (4 + (e < 4) * e) * C + (1 + gated) * e * inside
    return max(_tokens(config, run) * in_mlp, tables - _tokens(config, run) * e * (C + (2 + 2 * gated) * inside))


def _inner(config, run, seen):
    """Bytes that attention keeps beside q, k, v and its output.

    A fused kernel keeps a float32 for each query and head (FlashAttention, arXiv:2205.14135). Other kernels keep the
    softmax of every score, a cast of it for the product, and with dropout its mask and a copy. Causal attention needs
    one mask, if any; within documents each sequence has its own. SDPA keeps that, or the mask of a window, in the dtype
    of the products.
    """
    T, packed = config.block_size, config.packed
    masks = run.batch_size if packed else 1
    if not (scores := _scores(config, run, seen)):
        mask = run.itemsize * masks * T * T if (packed or seen < T) and run.attention != "flex" else 0
        return 4 * _tokens(config, run) * config.n_head + mask
    softmax, e, dropout = _score_bytes(run), run.itemsize, config.dropout > 0
    each = 3 * softmax if run.cpu and dropout else softmax + (e if dropout or e < softmax else 0) + dropout
    return each * scores + masks * scores // (run.batch_size * config.n_head)  # a mask serves all heads


def _score_bytes(run):
    """Bytes of a score in the softmax.

    On a GPU it counts as float32, in which autocast computes the softmax. On a CPU it has the dtype of the products,
    also in the named `math` (attention.only). Only `sdpa` and `masked` compute in float32 there, if dropout leaves
    PyTorch no kernel but math.
    """
    return run.itemsize if run.cpu and scores_held(run.attention) != "none" else 4


def _scores(config, run, seen):
    """Scores that a layer's attention keeps for a micro-batch: all, those that blocks of queries see, or none."""
    T = config.block_size
    held = scores_held(run.attention)
    whole = held == "all" or (run.cpu and config.dropout and held == "none")  # on a CPU no fused kernel has dropout
    blocks = [(start, min(start + BLOCK, T)) for start in range(0, T, BLOCK)] if held == "a block" else []
    in_blocks = sum((stop - start) * (stop - max(0, start + 1 - seen)) for start, stop in blocks)
    return run.batch_size * config.n_head * (T * T if whole else in_blocks)


def _mask(config, run, itemsize):
    """Bytes of a dropout mask of the residual stream; on a CPU it has the `itemsize` of what it masks."""
    return _tokens(config, run) * config.n_embd * (itemsize if run.cpu else 1) if config.dropout else 0


def _logits(config, run):
    """Peak bytes of the logits and their gradients.

    If eager, the cross-entropy's gradient takes three float32 numbers for each logit. If compiled, it takes the logits'
    place, and memory also holds the output layer's gradient, not yet in float32. Chunks compute a part of the logits at
    a time, and add that gradient up.
    """
    e, V = run.itemsize, config.padded_vocab_size
    if config.chunks > 1:
        return 12 * _tokens(config, run) * V // config.chunks + 2 * e * V * config.n_embd
    return (e * (_tokens(config, run) + config.n_embd) if run.compile else 12 * _tokens(config, run)) * V


@dataclass(frozen=True)
class Machine:
    """What a GPU and its links really reach: FLOP/s, bytes/s, and seconds of a hop."""

    peak: float  # FLOP/s of the data sheet; MFU is a share of it
    products: float  # FLOP/s of matrix products
    flash: float  # FLOP/s of a fused attention kernel, counting only the FLOPs that it does
    traffic: float  # bytes/s of memory
    link: float = math.inf  # bytes/s to the other GPUs of the node
    hop: float = 0.0
    network: float = math.inf  # bytes/s of a GPU to other nodes
    network_hop: float = 0.0
    per_node: int = 1

    @classmethod
    def of(cls, gpu: GPU, network: Network) -> Self:
        """What a GPU and a network are assumed to reach of their data sheets."""
        products, traffic = PRODUCTS * gpu.reached * gpu.peak, TRAFFIC * gpu.bandwidth
        links = LINK * gpu.link, gpu.hop, LINK * network.rate, network.hop
        return cls(gpu.peak, products, FLASH * gpu.peak, traffic, *links, gpu.per_node)


@dataclass(frozen=True)
class Step:
    """Seconds of a training step."""

    products: float  # matrix products
    attention: float
    traffic: float  # element-wise work, bound by memory
    optimizer: float
    rest: float  # computation that no formula counts
    communication: float  # all of it, hidden or not
    exposed: float  # communication that no computation hides
    sent: float  # bytes that a GPU sends

    @property
    def computation(self) -> float:
        """Seconds without any communication."""
        return self.products + self.attention + self.traffic + self.optimizer + self.rest

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.computation + self.exposed

    @property
    def range(self) -> tuple[float, float]:
        """The fewest and the most seconds to expect."""
        return tuple(share * self.total for share in TIME_RANGE)

    @property
    def bound(self) -> str:
        """What takes most of the step."""
        parts = {"matrix products": self.products, "attention": self.attention, "memory traffic": self.traffic}
        parts |= {"optimizer": self.optimizer, "communication": self.exposed}
        return max(parts, key=parts.get)


def flops_per_token(config: Any) -> int:
    """6 N + 12 L A T (PaLM, arXiv:2204.02311, appendix B), as GPT.flops_per_token; recomputing does not count."""
    _, A, _, _ = _widths(config)
    return 6 * _multiplied(config) + 12 * A * sum(layers * seen for seen, layers in _seen(config).items())


def _multiplied(config):
    """Parameters by which each token is multiplied: all but positions and an untied embedding."""
    return config.num_params - config.looked_up


def step(config: Any, run: Run, machine: Machine) -> Step:
    """Seconds of a step, compiled and in 16 bits.

    Weights are gathered during the forward or backward of a micro-batch, gradients reduced during the last backward.
    Nothing hides the first gather of a forward or the last reduction.
    """
    forward, backward = _computation(config, run, machine)
    root, blocks, reduction, last, sent = _communication(config, run, machine)
    m, forward_s, backward_s = run.micro_steps, (1 + REST) * sum(forward), (1 + REST) * sum(backward)
    waiting = m * max(root + blocks / config.n_layer, root + blocks - forward_s)
    waiting += (m - 1) * max(0, blocks - backward_s) + max(last, blocks + reduction - backward_s)
    counted = [*(m * sum(both) for both in zip(forward, backward)), _optimizer(config, run, machine)]
    return Step(*counted, REST * sum(counted), m * (root + 2 * blocks) + reduction, waiting, sent)


def _optimizer(config, run, machine):
    """Seconds of the optimizer's step.

    AdamW reads a weight, its gradient and two moments, and writes all but the gradient; clipping reads the gradient
    once more: 32 bytes. Muon's kernels are not fused: those of optimizer.py move about 86. Its five steps of
    Newton-Schulz cost 10 r² (2 c + r) FLOPs for a matrix of r x c, r the smaller: 280 C³ for the four of GPT-2's layer.
    """
    muon = run.optimizer == "muon"
    matrices = hidden(config) * muon
    traffic = 32 * (config.num_params - matrices) / run.shards + 86 * matrices
    of_layer = sum(10 * min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in _matrices(config))
    return traffic / machine.traffic + config.n_layer * of_layer * muon / machine.products


def _matrices(config):
    """The shapes of a block's matrices; those of queries, keys and values are one, as in GPT-2."""
    C, A, K, inside = _widths(config)
    return [(A + 2 * K, C), (C, A), *[(inside, C)] * (2 if config.mlp == "swiglu" else 1), (C, inside)]


def _computation(config, run, machine):
    """Seconds of products, attention and traffic in the forward of a micro-batch, and in its backward.

    A token costs 2 FLOPs per weight forward and 4 backward. The scores of a layer count as 4 A T forward and 8 A T
    backward. A fused kernel does those that are seen: about half of them, because scores are causal, or those in a
    window. Its backward repeats one product of five. Unfused attention does all of them as products, and moves each
    score 4 times forward and 7 times backward, in 16 bits.
    What is not kept is recomputed in the backward: logits in chunks, and attention or a block up to its last product,
    which only the forward needs.
    """
    L, T, N, V = config.n_layer, config.block_size, config.num_params, config.padded_vocab_size
    (C, A, _, inside), tokens, multiplied = _widths(config), _tokens(config, run), _multiplied(config)
    # that an unfused kernel computes, for all heads
    scores = sum(layers * _scores(config, run, seen) for seen, layers in _seen(config).items())
    fused_scores = A * tokens * sum(layers * seen * (1 - seen / (2 * T)) for seen, layers in _seen(config).items())
    moved, moved_back = _moved(config)
    again, logits_again = run.recompute == "block", config.chunks > 1

    def attention(passes, moves, fused):  # FLOPs of a score's channel, and how often a score is moved
        if not scores:
            return fused * fused_scores / machine.flash
        flops, size = passes * config.head_channels * scores, 2 * scores
        return flops / machine.products + moves * size / machine.traffic

    forward = (
        2 * multiplied * tokens / machine.products,
        attention(4, 4, 4),
        (tokens * (L * moved + 4 * V) + 6 * N) / machine.traffic,
    )
    attention_again = {"none": 0, "attention": attention(2, 3, 4), "block": forward[1]}[run.recompute]
    products_again = 2 * (hidden(config) - L * C * inside) * again + 2 * V * C * logits_again
    backward = (
        (4 * multiplied + products_again) * tokens / machine.products,
        attention(8, 7, 10) + attention_again,
        (tokens * (L * (moved_back + moved * again) + 4 * V * (1 + logits_again)) + 10 * N) / machine.traffic,
    )
    return forward, backward


def _moved(config):
    """Bytes that compiled element-wise kernels of a block move for a token, forward and backward.

    24 C and 66 C are the float32 residual stream through both norms, and 16-bit inputs and outputs of products. GELU
    moves its wide layer 2 times forward and 3 times backward, and SwiGLU its three 3 and 5 times. Queries and keys are
    read and written again by their norms and rotation. Branches side by side share a norm: that leaves 14 C and 36 C.
    Logits are moved twice each way. A weight is cast once (6 bytes), and its gradient added up in float32 (10).
    """
    C, A, K, inside = _widths(config)
    stream, stream_back = (14, 36) if config.parallel_block else (24, 66)
    wide, wide_back = (6, 10) if config.mlp == "swiglu" else (4, 6)
    turned = 4 * (A + K) if config.position == "rotary" or config.qk_norm else 0
    return stream * C + wide * inside + turned, stream_back * C + wide_back * inside + turned


def _communication(config, run, machine):
    """Seconds of communication, and the bytes that a GPU sends in a step: arXiv:1910.02054, section 7.

    Seconds are those of gathering embeddings and LayerNorms (the root) for a micro-batch, of gathering all blocks for a
    forward or a backward, of reducing the gradients once a step, and of the part of that reduction that comes last.
    The GPUs of a group share a copy; a GPU and its replica in the next group are `shards` GPUs apart.
    """
    N, L, shards, replicas = config.num_params, config.n_layer, run.shards, run.gpus // run.shards
    weights, root, blocks = 4 * N, 4 * (N - hidden(config)), run.itemsize * hidden(config)
    messages = L + 1 if shards > 1 else math.ceil(weights / BUCKET)
    within, across = functools.partial(_ring, machine, shards, 1), functools.partial(_ring, machine, replicas, shards)
    reduction = within(weights, messages) + across(weights / shards, messages, both=True)
    sent = _share(shards) * (run.micro_steps * (root + 2 * blocks) + weights) + _share(replicas) * 2 * weights / shards
    return within(root, 1), within(blocks, L), reduction, reduction / messages, sent


def _share(ranks):
    """The share of what is gathered or reduced that each GPU of a ring sends: the least (Patarasuk and Yuan, 2009)."""
    return (ranks - 1) / ranks


def _ring(machine, ranks, stride, size, messages, both=False):
    """Seconds in which `ranks` GPUs, each `stride` from the next, gather or reduce `size` bytes, or do `both`.

    If a ring visits several GPUs of a node, it uses the network links of all of them. Latencies are NCCL's
    own model (src/graph/tuning.cc): n - 1 hops for each message, or for `both` a tree's depth if that is less.
    """
    in_node = max(1, min(ranks, machine.per_node // stride))
    nodes = math.ceil(ranks / in_node)
    rate = machine.link if nodes == 1 else min(machine.link, in_node * machine.network)
    hops = (ranks - nodes) * machine.hop + (nodes - 1) * machine.network_hop
    tree = (in_node - 1) * machine.hop + math.log2(nodes) * machine.network_hop
    latency = 2 * min(hops, tree) if both else hops
    return (1 + both) * _share(ranks) * size / rate + messages * latency
