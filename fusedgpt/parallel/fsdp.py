"""A model divided among ranks: each holds a part of every weight, of its gradient and of its optimizer state (FSDP2).

A block's matrices are gathered from the other ranks just before the forward and backward use them, then freed.
The arithmetic is that of parallel=ddp: matrices are gathered in the dtype that autocast would cast them to, embeddings
and norms in float32, and gradients are averaged in float32. Sources: ZeRO, arXiv:1910.02054; PyTorch FSDP,
arXiv:2304.11277.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(model: Any, shards: int, copies: int, device: torch.device, dtype: torch.dtype, compiled: bool) -> None:
    """Divide a GPT among `shards` ranks. There are `copies` such groups of ranks, each with a whole model.

    Weights on PyTorch's meta device, which has no storage, are drawn here as GPT(config) draws them, block by block, so
    that no rank ever holds more than its part, the embeddings and a block. dtype: that of the matrix products.
    Norms of queries and keys are gathered on their own, in float32, because a group has one dtype.
    """
    shape, names = ((shards,), ("shard",)) if copies == 1 else ((copies, shards), ("copy", "shard"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    low = None if dtype == torch.float32 else dtype
    matrices = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    new, t = model.lm_head.weight.is_meta, model.transformer
    for part in t.children():
        for module in part if part is t.h else [part]:
            if new:
                _draw(model, module)
            if part is not t.h:
                continue
            if compiled:
                module.compile()  # in parts: FSDP cuts the graph where it gathers the weights of attn and mlp
            if module.attn.qk_norm:
                fully_shard([module.attn.q_norm, module.attn.k_norm], mesh=mesh)
            fully_shard([module.attn, module.mlp], mesh=mesh, mp_policy=matrices)
    if new and (not model.config.tie_embeddings or model.config.output_bias):
        _draw(model, model.lm_head)
    model.tie_weights()  # to_empty unties them
    fully_shard(model, mesh=mesh)  # what is left: embeddings, norms and the output layer


def _draw(model, part):
    part.to_empty(device="cpu")  # every run draws its random numbers on the CPU
    model.init_weights(part)
