"""Packed weights against float64, and a model that generates with them against the same model without."""

import itertools

import pytest
import torch
from torch import nn

from fusedgpt.generation import engines, generate, packed
from model import GPT, GPTConfig
from tests.fusedgpt.generation.families import family, ids

CPU = torch.device("cpu")
needs_bfloat16 = pytest.mark.skipif(
    not packed.gains(CPU, torch.bfloat16), reason="this CPU has no instructions for products in bfloat16"
)


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@needs_bfloat16
@pytest.mark.parametrize(("inner", "outer", "bias"), [(64, 192, True), (120, 50, False), (1, 7, True), (768, 1, False)])
@torch.no_grad()
def test_a_packed_product_is_that_of_float64_rounded(inner, outer, bias):
    # a layout for one row has to be right for many; odd sizes are padded inside it
    torch.manual_seed(0)
    linear = nn.Linear(inner, outer, bias=bias).bfloat16()
    exact = nn.Linear(inner, outer, bias=bias).double()
    exact.load_state_dict({name: w.double() for name, w in linear.state_dict().items()})
    layer = packed.PackedLinear(linear)
    for shape in ((1, 1), (1, 3), (3, 65)):
        x = torch.randn(*shape, inner).bfloat16()
        got, want = layer(x), exact(x.double())
        assert got.shape == want.shape and got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-8 * want.abs().max().item())


@needs_bfloat16
@pytest.mark.parametrize("name", ["gpt2", "pattern", "phi"])
@torch.no_grad()
def test_a_packed_model_generates_what_it_did_before(name):
    net = family(name)
    plain = engines.converted(net, CPU, torch.bfloat16).eval()
    engine = engines.prepare(net, CPU, "bfloat16", prompt_length=9, new_tokens=8)
    assert not linears(engine.prefill) and engine.prefill is engine.decode
    caches = engine.cache, generate.new_cache(net.config)
    text = ids(2, 9 + 8)
    for start, stop in itertools.pairwise((0, *range(9, 9 + 8))):
        got, want = engine(text[:, start:stop], caches[0])[0], plain(text[:, start:stop], cache=caches[1])[0]
        seen = want.isfinite()  # ids that only pad the vocabulary have -inf
        assert torch.equal(seen, got.isfinite())
        torch.testing.assert_close(got[seen], want[seen], rtol=0.02, atol=0.02 * want[seen].abs().max().item())


@needs_bfloat16
def test_only_the_copy_is_packed_and_only_for_bfloat16():
    net = GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=32)).eval()
    layers, before = len(linears(net)), {name: w.clone() for name, w in net.state_dict().items()}
    engine = engines.prepare(net, CPU, (torch.bfloat16, torch.float16))
    assert not linears(engine.prefill) and len(linears(engine.decode)) == len(linears(net)) == layers == 9
    assert all(torch.equal(w, before[name]) for name, w in net.state_dict().items())
    # the output layer no longer shares the embedding's weights, but a token reads as many as before
    assert engine.bytes_per_step == 2 * (sum(p.numel() for p in net.parameters()) - 16 * 32)


def test_no_weight_is_packed_if_that_gains_nothing_or_the_step_is_compiled(monkeypatch):
    monkeypatch.setattr(packed.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(packed, "cpu_multiplies_bfloat16", lambda: True)
    assert packed.gains(CPU, torch.bfloat16)
    assert not packed.gains(CPU, torch.float16) and not packed.gains(torch.device("cuda"), torch.bfloat16)
    net = GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=2, n_embd=32)).eval()
    with monkeypatch.context() as patch:
        patch.setattr(packed, "pack", lambda module: pytest.fail("packed"))
        compile_ = torch.compile
        patch.setattr(torch, "compile", lambda model, **_: compile_(model, dynamic=True, backend="eager"))
        engines.prepare(net, CPU, "bfloat16", compiled=True)  # compilers take plain weights
    monkeypatch.setattr(packed, "cpu_multiplies_bfloat16", lambda: False)
    assert not packed.gains(CPU, torch.bfloat16)
    monkeypatch.setattr(packed, "cpu_multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(packed.platform, "machine", lambda: "aarch64")
    assert not packed.gains(CPU, torch.bfloat16)


def test_a_layer_that_computes_something_else_is_not_packed(monkeypatch):
    # a layer of a class derived from nn.Linear lost its own forward, in silence
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class StandIn(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

    monkeypatch.setattr(packed, "PackedLinear", StandIn)
    plain, scaled, hooked, first = nn.Linear(4, 4), Scaled(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    first.register_forward_pre_hook(lambda *_: None)
    model = nn.ModuleDict({"a": plain, "b": nn.ModuleList([scaled, hooked, first, nn.LayerNorm(4)])})
    packed.pack(model)
    assert isinstance(model["a"], StandIn) and model["a"].linear is plain
    assert [*model["b"]][:3] == [scaled, hooked, first]
