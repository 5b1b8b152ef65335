"""The step that Inductor makes for an H200, without one: a graph each way, no second tensor of the logits' size.

Run by `make lowering`, which installs Triton in a folder of its own. Skipped if Triton or g++ is absent.
"""

import functools
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from fusedgpt.dimensions import GPTConfig
from fusedgpt.estimates.training_memory import Load, Memory
from tests.launch import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (importlib.util.find_spec("triton") and shutil.which("g++")), reason="make lowering"),
]

HERE = pathlib.Path(__file__).parent
TORCH = pathlib.Path(torch.__file__).parent
LOGITS = 12 * 1024 * 50257  # the loss cuts the padding off, so a second tensor may lack it
GPT2 = {"vocab_size": 50257, "vocab_multiple": 64, "bias": False}


@pytest.fixture(scope="module")
def lower(tmp_path_factory):
    """A function that lowers a model of 12 x 1024 tokens; its arguments are those of lower.lower."""
    guard = tmp_path_factory.mktemp("lowering") / "guard.so"  # stands in for a CUDA device
    include = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    link = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    options = ["-O1", "-std=c++20", "-shared", "-fPIC"]
    subprocess.run(["g++", *options, *include, HERE / "guard.cpp", "-o", guard, *link], check=True)
    path = os.pathsep.join([str(ROOT), *sys.path])
    device = {"LD_PRELOAD": str(guard), "LD_LIBRARY_PATH": str(TORCH / "lib"), "PYTHONPATH": path}

    @functools.cache
    def lower(**arguments):
        command = [sys.executable, HERE / "lower.py", json.dumps(GPT2 | arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | device, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return lower


def line_of(attention, forward, backward):
    """The line of a kernel in the table of docs/benchmarks.md."""
    config, run = GPTConfig(**GPT2), Load(batch_size=12, attention=attention)
    held = Memory.of(config, run)
    least = 2 * (held.weights + 4 * config.num_params + held.activations + held.logits) / 1e9
    both = [
        f"{forward['launches']} + {backward['launches']}",
        f"{sum(forward['calls'].values())} + {sum(backward['calls'].values())}",
        f"{forward['bytes'] / 1e9:.1f} + {backward['bytes'] / 1e9:.1f}",
    ]
    return " | ".join([f"| `{attention}`", *both, f"{least:.1f} |"])


def as_large_as_the_logits(graph):
    return [(dtype, mib) for shape, dtype, mib in graph["buffers"] if torch.Size(shape).numel() >= LOGITS]


@pytest.mark.parametrize("attention", ["manual", "flash", "cudnn", "flex"])
def test_a_step_is_one_graph_and_holds_the_logits_once(lower, attention):
    # the loss of bfloat16 logits: log-probabilities in bfloat16, and a second tensor of 1,179 MiB in the backward
    found = lower(attention=attention)
    forward, backward = found["forward"], found["backward"]
    assert found["graph_breaks"] == 0
    assert as_large_as_the_logits(forward) == [("bfloat16", 1179)] and as_large_as_the_logits(backward) == []
    # as many launches, calls and bytes as published: more would be a step backwards that no other test sees
    assert line_of(attention, forward, backward) in (ROOT / "docs" / "benchmarks.md").read_text()


def test_a_llama_with_two_kinds_of_layers_is_one_graph_and_makes_each_mask_once(lower):
    llama = dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_inner=2048, n_kv_head=4, tie_embeddings=False)
    found = lower(attention="flex", n_layer=4, window=256, window_pattern="SL", **llama)
    assert found["graph_breaks"] == 0 and found["forward"]["calls"]["mm"] == 4 * 5 + 1
    assert as_large_as_the_logits(found["forward"]) == [("bfloat16", 1179)]
    attention = [launches for name, launches in found["forward"]["kernels"].items() if "tem_fused" in name]
    masks = [launches for name, launches in found["forward"]["kernels"].items() if "_le_" in name]
    assert attention == [2, 2] and masks and set(masks) == {1}


def test_flex_never_trains_with_its_kernel_for_decoding(lower):
    # on an H200, 2 x 12 x 127 x 64: the log-sum-exp that it saves has a padded stride, the backward reads it without,
    # and gradients of the second sequence were wrong by a factor of 73
    found = lower(attention="flex", batch_size=2, block_size=96, n_layer=2)
    kernels = {name: launches for name, launches in found["forward"]["kernels"].items() if "flex_attention" in name}
    assert sum(kernels.values()) == 2 and all("tem_fused" in name for name in kernels), kernels
