"""What torch.compile makes with its default backend, Inductor: losses, kernels and ids are those of eager PyTorch.

Inductor takes 5 to 8 seconds for a graph with a C++ kernel. Elsewhere tests compile for the backends eager, aot_eager.
"""

import copy
import functools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn.attention import flex_attention

from fusedgpt.attention import receipt
from fusedgpt.attention.case import Case
from fusedgpt.parallel import distributed
from fusedgpt.parallel.distributed import Ranks
from model import GPT, GPTConfig
from tests.fusedgpt.attention.test_receipt import watch
from tests.fusedgpt.generation.families import ids

# a minute on an idle machine, many on a busy one
pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.timeout(900)]
CPU = torch.device("cpu")
TRAINING = Case((2, 2, 64, 32), CPU, torch.float32)
slow = pytest.mark.slow


@pytest.mark.parametrize("given", [{}, pytest.param(dict(attention="masked", document_start=3), marks=slow)], ids=str)
def test_a_training_step_is_that_of_eager(given):
    torch.manual_seed(0)
    eager = GPT(GPTConfig(32, 101, 1, 2, 32, vocab_multiple=64, **given))
    compiled, text = copy.deepcopy(eager), ids(4, 32)
    compiled.compile()
    text[:, [5, 20]] = 3  # documents begin there
    for net in (eager, compiled):
        net(text, text, logits=False)[1].backward()
        net.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu").step()
    for p, q in zip(compiled.parameters(), eager.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
        assert not p.grad.eq(0).all()


@slow
@pytest.mark.parametrize("name", ["manual", "flash"])
def test_compiling_changes_no_kernel(name):
    # K5: Inductor may rewrite hand-written attention into SDPA
    saw = watch(name, backend="inductor")
    assert receipt.contradiction(name, saw, TRAINING) is None
    assert saw["forward"] == ["unfused" if name == "manual" else "flash"]


def test_flex_and_recompute_are_one_graph(monkeypatch):
    # flex makes its mask within a checkpoint: that broke the graph, and the model ran eagerly, though "compiled"
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it trains on no CPU
    monkeypatch.setattr(GPT, "compile", functools.partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    model, x = GPT(GPTConfig(32, 101, 2, 2, 32, attention="manual", recompute="block", window=9)), ids(2, 32)
    model(x, x, logits=False)[1].backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.use_attention("flex")
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch():
        distributed.parallelize(model, Ranks(), CPU, torch.float32, True)(x, x, logits=False)[1].backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], grads, rtol=1e-4, atol=1e-6)
    assert not torch._dynamo.utils.counters["graph_break"]


def recorded(model, *batch, **options):
    """The forward and backward graphs that Inductor gets of `model`."""
    graphs = []
    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graphs.append(graph) or make_boxed_func(graph),
        bw_compiler=lambda graph, inputs: graphs.append(graph) or make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = torch.compile(model, backend=backend)(*batch, **options)
    loss.backward()
    return graphs


def shapes(graph):
    """The shapes of the inputs of a graph."""
    return [tuple(n.meta["val"].shape) for n in graph.graph.nodes if n.op == "placeholder" and "val" in n.meta]


def test_training_keeps_no_logits_and_copies_none():
    # the loop used to hold the logits until the next forward, and the compiled backward read a gradient of them;
    # writing -inf into the padding copied all logits (slice_scatter)
    model = GPT(GPTConfig(32, 101, 1, 4, 64, vocab_multiple=64))
    B, T, V = 2, 32, 128
    idx = torch.randint(0, 101, (B, T))
    forward, backward = recorded(model, idx, idx, logits=False)
    assert (B, T, V) not in shapes(backward)
    assert shapes(backward).count((B * T, V)) == 1  # what the head computed, which the softmax's backward needs
    called = [str(node.target) for node in forward.graph.nodes if node.op == "call_function"]
    assert not [name for name in called if "slice_scatter" in name or ".copy" in name]
    torch.compiler.reset()
    _, with_logits = recorded(model, idx, idx)
    assert (B, T, V) in shapes(with_logits)  # so this test would see them
