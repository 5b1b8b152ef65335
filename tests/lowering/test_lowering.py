"""The step that Inductor makes for an H200, without one: a graph each way, no second tensor of the logits' size.

Run by `make lowering`, which installs Triton in a folder of its own. Skipped if Triton or g++ is absent.
"""

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
from fusedgpt.estimates import scale
from fusedgpt.machine.gpus import GPUS, NETWORKS
from tests.conftest import ROOT

HERE = pathlib.Path(__file__).parent
TORCH = pathlib.Path(torch.__file__).parent
LOGITS = 12 * 1024 * 50304
GPT2 = {"vocab_size": 50257, "vocab_multiple": 64, "bias": False}
pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") and shutil.which("g++")), reason="needs Triton and g++: make lowering"
)


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """The library that stands in for a CUDA device."""
    library = tmp_path_factory.mktemp("lowering") / "guard.so"
    include = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    link = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, *include, HERE / "guard.cpp", "-o", library, *link], check=True)
    return library


@pytest.fixture
def lower(guard):
    """A function that lowers a model of 12 x 1024 tokens; its arguments are those of lower.lower."""
    python_path = [str(ROOT), *sys.path]
    device = {
        "LD_PRELOAD": str(guard),
        "LD_LIBRARY_PATH": str(TORCH / "lib"),
        "PYTHONPATH": os.pathsep.join(python_path),
    }

    def lower(**arguments):
        command = [sys.executable, HERE / "lower.py", json.dumps(GPT2 | arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | device, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return lower


def line_of(attention, forward, backward):
    """The line of a kernel in the table of docs/benchmarks.md."""
    config, run = GPTConfig(**GPT2), scale.Run(batch_size=12, attention=attention)
    held, step = scale.memory(config, run), scale.step(config, run, scale.Machine.of(GPUS["H200"], NETWORKS["ndr"]))
    least = 2 * (held.weights + 4 * config.num_params + held.activations + held.logits) / 1e9
    both = [
        f"{forward['launches']} + {backward['launches']}",
        f"{sum(forward['calls'].values())} + {sum(backward['calls'].values())}",
        f"{forward['bytes'] / 1e9:.1f} + {backward['bytes'] / 1e9:.1f}",
    ]
    low, high = (1e3 * seconds for seconds in step.range)
    times = f"{1e3 * step.total:.1f} ({low:.1f} to {high:.1f})"
    return " | ".join([f"| `{attention}`", *both, f"{least:.1f}", f"{times} |"])


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


def test_attention_within_documents_costs_flex_no_launch(lower):
    # the mask of each layer is computed once for all
    within, across = (lower(attention="flex", n_layer=4, document_start=start) for start in (50256, None))
    assert within["graph_breaks"] == 0
    for way in ("forward", "backward"):
        for what in ("launches", "calls", "buffers"):
            assert within[way][what] == across[way][what], (way, what)
        assert within[way]["bytes"] < across[way]["bytes"] + 2e6


def test_a_fused_kernel_is_a_call_each_way_and_keeps_no_scores(lower):
    found = lower(attention="flash", n_layer=2)
    assert found["forward"]["calls"] == {"mm": 9, "_scaled_dot_product_flash_attention": 2}
    assert found["backward"]["calls"] == {"mm": 18, "_scaled_dot_product_flash_attention_backward": 2}
    scores = lower(attention="manual", n_layer=2)["forward"]["buffers"]
    assert [[12, 12, 1024, 1024], "bfloat16", 288] in scores
    assert all(shape[-1] != 1024 for shape, _, _ in found["forward"]["buffers"])
