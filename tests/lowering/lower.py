"""What Inductor would launch on an H200 in a forward and a backward of our GPT, seen without one.

Fake tensors, which have shapes but no numbers, go through the model that train.py would compile, down to Triton source.
Nothing runs. `python tests/lowering/lower.py '{"attention": "flash"}'`, in the environment that test_lowering.py
prepares, prints a line of JSON: see `summary`.
"""

import collections
import json
import os
import re
import sys
import types

os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}

import h200
import torch

h200.install()

from torch._dynamo.utils import counters
from torch._inductor.fx_passes import fuse_attention
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedgpt import eager
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.machine.device import autocast
from model import GPT, GPTConfig

LARGE = 150e6  # bytes: what a buffer is reported from
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int8": 1, "bool": 1}
DEVICE = torch.device("cuda", 0)


def _sdpa(name, *mask):
    """The operator that SDPA would dispatch to on a GPU: its own choice looks at a real device."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    and_for_backward = [True] if mask else []  # whether to compute what the backward needs; flash always does
    return lambda q, k, v, dropout_p: operator(q, k, v, *mask, *and_for_backward, dropout_p, True)[0]


OPERATORS = {"flash": _sdpa("flash"), "efficient": _sdpa("efficient", None), "cudnn": _sdpa("cudnn", None)}


def lower(dtype="bfloat16", batch_size=12, **config):
    """The summaries of the forward and of the backward of GPT-2 124M, or with other fields of `config`."""
    found = []

    def instead_of_loading(self):
        code, _ = self.codegen()
        found.append(summary(code.value, self))
        # the traced graph itself stands in for its kernels, so that autograd goes on to the backward
        return types.SimpleNamespace(call=lambda args: self.orig_gm(*args), __file__="lowered", key="lowered")

    GraphLowering.compile_to_module = instead_of_loading
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(GPTConfig(**config))
        ids = torch.zeros(batch_size, model.config.block_size, dtype=torch.long, device=DEVICE)
        model.compile(dynamic=False)
        with autocast(DEVICE, getattr(torch, dtype)):
            _, loss = model(ids, ids, logits=False)
        loss.backward()
    return found


def build(config):
    """A GPT of fake tensors on the device."""
    eager.to_empty = lambda model: None
    GPT.init_weights = lambda self: None
    with torch.device("meta"):
        model = GPT(config)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(torch.empty(p.shape, device=DEVICE)))
    model.lm_head.weight = model.transformer.wte.weight
    return model


def summary(code: str, graph: GraphLowering) -> dict:
    """What a graph's call does: launches of Triton kernels, all and by name, calls of libraries, and large buffers.

    `buffers` are [shape, dtype, MiB]; `bytes` are those that its kernels and products read and write.
    """
    call = code[code.index("def call") :]
    kernels = collections.Counter(re.findall(r"^\s+(\w+)\.run\(", call, re.MULTILINE))
    libraries = re.findall(r"(extern_kernels\.\w+|torch\.ops\.aten\.\w+)[\w.]*\(", call)
    buffers = []
    for shape, dtype in re.findall(r"empty_strided_cuda\(\(([^)]*)\), \([^)]*\), torch\.(\w+)\)", call):
        size = [int(n) for n in shape.split(",") if n.strip()]
        if (held := torch.Size(size).numel() * BYTES[dtype]) >= LARGE:
            buffers.append([size, dtype, round(held / 2**20)])
    calls = {name.rpartition(".")[2]: n for name, n in collections.Counter(libraries).items()}
    found = {"launches": kernels.total(), "calls": calls, "buffers": buffers, "bytes": graph.count_bytes()[0]}
    return found | {"kernels": kernels}


def main():
    ATTENTION.update(OPERATORS)
    # PyTorch registers its patterns of attention by tracing them on the first device that it finds
    on_any_device = fuse_attention._get_sfdp_patterns
    fuse_attention._get_sfdp_patterns = lambda device=None: on_any_device(torch.device("cpu"))
    torch._inductor.config.joint_graph_constant_folding = False  # would run operators
    forward, backward = lower(**json.loads(sys.argv[1]))
    print(json.dumps({"graph_breaks": counters["graph_break"].total(), "forward": forward, "backward": backward}))


if __name__ == "__main__":
    main()
