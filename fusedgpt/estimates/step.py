"""Estimates of the time of a step, and of its bottleneck. Formulas only, no PyTorch; symbols are those of run.py."""

import math
from dataclasses import dataclass
from typing import Any, Self

from fusedgpt.estimates.communication import communication, muons_communication
from fusedgpt.estimates.rates import Machine
from fusedgpt.estimates.run import Run, hidden, keys_seen, owned_matrices, scores_of, tokens_of, widths

REST = 0.17  # uncounted seconds for each counted second of computation, fitted (results/plan/README.md)
RANGE = (0.75, 1.5)  # measured over estimated seconds, in all cases of tests/plan_errors.py


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

    @classmethod
    def of(cls, config: Any, run: Run, machine: Machine) -> Self:
        """Seconds of a step, compiled and in 16 bits.

        Weights are gathered during the forward or backward of a micro-batch, gradients reduced during the last
        backward. Nothing hides the first gather of a forward, the last reduction, or what Muon sends.
        """
        forward, backward = _computation(config, run, machine)
        root, blocks, reduction, last, sent = communication(config, run, machine)
        m, forward_s, backward_s = run.micro_steps, (1 + REST) * sum(forward), (1 + REST) * sum(backward)
        waiting = m * max(root + blocks / config.n_layer, root + blocks - forward_s)
        waiting += (m - 1) * max(0, blocks - backward_s) + max(last, blocks + reduction - backward_s)
        muons, muon_sent = muons_communication(config, run, machine)
        counted = [*(m * sum(both) for both in zip(forward, backward)), _optimizer(config, run, machine)]
        all_of_it = m * (root + 2 * blocks) + reduction + muons
        return cls(*counted, REST * sum(counted), all_of_it, waiting + muons, sent + muon_sent)

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
        return tuple(share * self.total for share in RANGE)

    @property
    def bound(self) -> str:
        """What takes most of the step."""
        parts = {"matrix products": self.products, "attention": self.attention, "memory traffic": self.traffic}
        parts |= {"optimizer": self.optimizer, "communication": self.exposed}
        return max(parts, key=parts.get)


def flops_per_token(config: Any) -> int:
    """6 N + 12 L A T (PaLM, arXiv:2204.02311, appendix B), as GPT.flops_per_token; recomputing does not count."""
    _, A, _, _ = widths(config)
    return 6 * _multiplied(config) + 12 * A * sum(layers * seen for seen, layers in keys_seen(config).items())


def _multiplied(config):
    """Parameters by which each token is multiplied: all but positions and an untied embedding."""
    return config.num_params - config.looked_up


def _optimizer(config, run, machine):
    """Seconds of the optimizer's step.

    AdamW reads a weight, its gradient and two moments, and writes all but the gradient; clipping reads the gradient
    once more: 32 bytes. Muon's kernels are not fused: those of optimizer.py move about 86, and 22 more to pack and
    unpack what goes to owners. Its five steps of Newton-Schulz cost 10 r² (2 c + r) FLOPs for a matrix of r x c, r the
    smaller: 280 C³ for the four of GPT-2's layer.
    """
    owned, muon = owned_matrices(config, run).items(), run.optimizer == "muon"
    traffic = 32 * (config.num_params - hidden(config) * muon) / run.shards
    traffic += (86 + 22 * (run.shards > 1)) * sum(number * math.prod(shape) for shape, number in owned)
    flops = sum(number * 10 * min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape, number in owned)
    return traffic / machine.traffic + flops / machine.products


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
    (C, A, _, inside), tokens, multiplied = widths(config), tokens_of(config, run), _multiplied(config)
    # that an unfused kernel computes, for all heads
    scores = sum(layers * scores_of(config, run, seen) for seen, layers in keys_seen(config).items())
    fused_scores = A * tokens * sum(layers * seen * (1 - seen / (2 * T)) for seen, layers in keys_seen(config).items())
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
    C, A, K, inside = widths(config)
    stream, stream_back = (14, 36) if config.parallel_block else (24, 66)
    wide, wide_back = (6, 10) if config.mlp == "swiglu" else (4, 6)
    turned = 4 * (A + K) if config.position == "rotary" or config.qk_norm else 0
    return stream * C + wide * inside + turned, stream_back * C + wide_back * inside + turned
