"""Estimates of what GPUs send each other in a step. Formulas only, no PyTorch; symbols are those of run.py."""

import functools
import math
from typing import Any

from fusedgpt.estimates.rates import Machine
from fusedgpt.estimates.run import Run, hidden, owned_matrices

BUCKET = 100 * 2**20  # bytes of gradients in a message of DDP: distributed.BUCKET_MB


def communication(config: Any, run: Run, machine: Machine) -> tuple[float, float, float, float, float]:
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


def muons_communication(config: Any, run: Run, machine: Machine) -> tuple[float, float]:
    """Seconds in which matrices go to their owners and their updates come back, and the bytes that a GPU sends.

    Each way, in 16 bits, a GPU keeps its own rows of its own matrices. The bytes are a mean over GPUs. The seconds are
    those of the GPU that owns the most: it sends to all others at once, over links and network at the same time. There
    is at most a message for each matrix.
    """
    shards = run.shards
    owned = {shape: n for shape, n in owned_matrices(config, run).items() if shards > 1}
    size = sum(run.itemsize * n * math.prod(shape) for shape, n in owned.items())
    in_node = min(shards, machine.per_node)
    near, far = (in_node - 1) / shards * size / machine.link, (shards - in_node) / shards * size / machine.network
    latency = sum(owned.values()) * (machine.hop if in_node == shards else machine.network_hop)
    sent = 2 * _share(shards) * run.itemsize * hidden(config) / shards if owned else 0
    return 2 * (max(near, far) + latency), sent


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
