"""Every path against float64 written out by hand, forward and backward; dropout; the dtype of each product."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedgpt.attention import functions, parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from model import GPT, GPTConfig
from tests.conftest import GPU

pytestmark = pytest.mark.usefixtures("uncompiled_flex")
CPU = torch.device("cpu")
EVERYWHERE = [
    *((name, "cpu") for name in ("manual", "blocked", "math", "flash", "sdpa", "masked", "flex")),
    *(pytest.param(name, *GPU.values, marks=GPU.marks) for name in ATTENTION),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# heads, heads of keys, hs, T, window: odd heads; a window of one token, of all but one, and of an odd number
SHARED = [(4, 2, 64, 127, None), (3, 1, 40, 70, None), (3, 1, 40, 70, 1), (2, 2, 32, 300, 299), (6, 2, 32, 300, 37)]
CASES = {
    # K6: cuDNN gave NaN gradients at T % 128 == 64; nobody who tests round lengths only sees it. F15: a last block of
    # `blocked` that was wrong if it was not full passed, as long as no length was beyond 256 and no multiple of it.
    # A CPU's flash splits the keys after 512. A compiler pads the strides of 12 x 127, so flex's gradients were wrong
    "lengths": [
        ((2, 12, 127, 64), {}),
        *(((2, 2, T, 32), {}) for T in (1, 2, 64, 127, 192, 257, 300)),
        ((1, 1, 1000, 32), {}),
    ],
    "sizes of heads": [((1, 2, T, hs), {}) for T in (127, 300) for hs in (40, 64, 128)],
    # T17: is_causal is aligned to the top left, where a lone query after a cache sees the first key only
    "after a cache": [((2, 2, T, 32), dict(keys=70, backward=False)) for T in (1, 5, 64)],
    # a kernel that leaks one document into the next trains, and its loss is even better
    "documents": [
        *(((2, 2, T, 32), dict(packed=True)) for T in (1, 7, 127, 300)),
        ((2, 2, 1, 32), dict(packed=True, keys=300, backward=False)),
    ],
    # heads in another order, or a window one token too wide, train as well as the right ones
    "shared keys and windows": [
        ((2, nh, queries or T, hs), dict(how, kv_heads=nkv, window=window))
        for nh, nkv, hs, T, window in SHARED
        for queries, how in (
            (None, {}),
            (None, dict(packed=True)),
            (1, dict(keys=T, backward=False)),
            (20, dict(keys=T, backward=False)),
        )
    ],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize(("name", "device"), EVERYWHERE)
def test_output_and_gradients_equal_float64(name, device, what, dtype):
    ran, every = 0, 1 if dtype == torch.float32 or device == "cuda" else 3  # a CPU is slow in 16 bits
    if (name, device) == ("flex", "cuda"):  # 10 seconds to compile each, beside other tests
        every = 3
    for shape, given in CASES[what][::every]:
        case = Case(shape, torch.device(device), dtype, **given)
        if (name, device) == ("flex", "cpu"):  # it has no backward there
            case = replace(case, backward=False)
        if device == "cuda" and name not in ("manual", "blocked", "math", "sdpa", "masked"):
            torch.compiler.reset()  # flex is compiled for each, and raises at the ninth graph of a process
            if permitted.refusal(name, case):
                continue
        found = parity.compare(ATTENTION[name], case)
        assert parity.passes(found, dtype), (case, found)
        ran += 1
    if not ran:
        pytest.skip(f"{name} runs none of these here")


@pytest.mark.parametrize("nkv", [4, 2])
@pytest.mark.parametrize(("name", "device"), EVERYWHERE)
def test_dropout_drops_single_weights_and_scales_the_rest(name, device, nkv):
    # F15: dropout at p/2, and dropout of the values in place of the weights, passed a comparison of means
    p, T, hs = 0.3, 64, 128
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = Case((8, 4, T, hs), torch.device(device), dtype, dropout=p, kv_heads=nkv)
    if reason := permitted.refusal(name, case):
        assert name not in ("manual", "blocked", "math", "sdpa", "masked")  # these run everywhere
        pytest.skip(reason)
    torch.manual_seed(0)
    q, k, _, dy = case.inputs(scale=0.5)
    eye = torch.eye(T, device=device, dtype=dtype).repeat(1, 2).expand(8, nkv, T, hs).clone().requires_grad_()
    y, *gradients = (x.detach().double() for x in case.run(ATTENTION[name], q, k, eye, dy))
    first, second = y.split(T, dim=-1)  # each is the weights themselves, because the values are the identity, twice
    assert torch.equal(first, second)  # if the output or the values were dropped, the halves would differ
    q, k, dy, v = (x.detach().double() for x in (q, k, dy, eye))
    k, v = (x.repeat_interleave(4 // nkv, dim=1) for x in (k, v))
    seen = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    weights = (q @ k.mT / hs**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    kept = first > 0.5 * weights
    want = weights * kept / (1 - p)
    torch.testing.assert_close(first, want, rtol=parity.TOLERANCE[dtype], atol=1e-6)

    dropped = ~kept & seen  # 66,560 weights: both shares are known to 0.002
    assert (dropped.sum() / (32 * seen.sum())).item() == pytest.approx(p, abs=0.01)
    for dim in range(4):  # neighbours in sequence, head, query and key are dropped independently of each other
        n = dropped.size(dim) - 1
        both_dropped, both_seen = (x.narrow(dim, 0, n) & x.narrow(dim, 1, n) for x in (dropped, seen.expand_as(kept)))
        assert (both_dropped.sum() / both_seen.sum()).item() == pytest.approx(p * p, abs=0.01), dim

    # the backward drops the same weights: the chain rule through dropout and softmax
    dp = dy @ v.mT * kept / (1 - p)
    ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) / hs**0.5
    of_keys = (x.unflatten(1, (nkv, -1)).sum(2) for x in (ds.mT @ q, want.mT @ dy))
    for got, right in zip(gradients, (ds @ k, *of_keys), strict=True):
        assert (got - right).abs().max() <= parity.TOLERANCE[dtype] * right.abs().max()


class CallsOfSDPA(TorchFunctionMode):
    """Notes of each call of scaled_dot_product_attention whether PyTorch might pick cuDNN for it."""

    def __init__(self):
        super().__init__()
        self.cudnn = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
            return torch.empty_like(args[0])  # it is fake, and a build with CUDA would look for a kernel
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "device", "T", "allowed"),
    [
        ("sdpa", "cuda", 1, False),
        ("masked", "cuda", 1, False),
        ("sdpa", "cuda", 64, True),
        ("sdpa", "cpu", 1, True),  # there is no cuDNN, and the context would cost 10 µs a call
    ],
)
def test_cudnn_is_not_picked_for_queries_after_a_cache(name, device, T, allowed):
    # on Hopper cuDNN is picked first, and builds a plan for every length of the cache
    with FakeTensorMode(), CallsOfSDPA() as saw:
        q, k = (torch.empty(1, 2, length, 64, device=device, dtype=torch.bfloat16) for length in (T, 64))
        ATTENTION[name](q, k, k)
    assert saw.cudnn == [allowed]
    assert torch.backends.cuda.cudnn_sdp_enabled()


class DtypesOfProducts(TorchDispatchMode):
    """Collects the dtypes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        y = op(*args, **(kwargs or {}))
        if str(op) in ("aten.mm.default", "aten.bmm.default", "aten.baddbmm.default"):
            self.seen.add(y.dtype)
        return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_math_computes_in_the_dtype_that_it_is_given(dtype):
    # since 2.5, PyTorch's `math` computes half precision in float32: twice the bytes, and not the article's rung
    case = Case((1, 2, 64, 32), CPU, dtype)
    with DtypesOfProducts() as saw:
        case.run(ATTENTION["math"], *case.inputs())
    assert saw.seen == {dtype}
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


def test_sdpa_that_takes_math_computes_as_pytorch_does_after_math_ran():
    # the flag is the process's: `math` used once would change every later fall-back of sdpa
    case = Case((1, 2, 64, 32), CPU, torch.bfloat16, dropout=0.1)  # with dropout a CPU has math only
    with pytest.raises(RuntimeError):  # heads of two sizes
        ATTENTION["math"](*case.inputs()[:2], torch.ones(1, 2, 63, 16))
    with DtypesOfProducts() as saw:
        case.run(ATTENTION["sdpa"], *case.inputs())
    assert saw.seen == {torch.float32}


@pytest.mark.parametrize(
    ("name", "dynamic", "window"),
    [*((name, False, 20) for name in ("manual", "blocked", "math", "flash", "masked")), ("flash", True, None)],
)
def test_shared_keys_and_a_window_are_the_same_in_one_compiled_graph(name, dynamic, window):
    # with dynamic shapes SDPA was given a SymBool as enable_gqa, and refused it
    attend = torch.compile(ATTENTION[name], backend="eager", fullgraph=True, dynamic=dynamic)
    case = Case((2, 3, 33, 40), CPU, torch.float32, kv_heads=1, window=window, backward=False)
    torch.testing.assert_close(case.run(attend, *case.inputs()), case.run(ATTENTION[name], *case.inputs()))


def test_blocked_computes_few_scores_above_the_diagonal_and_before_the_window():
    # half of all scores are above the diagonal: `blocked` saves these
    computed = []

    class Products(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            if function is torch.Tensor.softmax:
                computed.append(y.numel())
            return y

    q, k, v, _ = Case((1, 1, 1000, 8), CPU, torch.float32, backward=False).inputs()
    with Products():
        ATTENTION["blocked"](q, k, v)
        ATTENTION["blocked"](q, k, v, window=100)
    assert computed[:4] == [256 * 256, 256 * 512, 256 * 768, 232 * 1000]
    assert computed[4:] == [256 * 256, 256 * 355, 256 * 355, 232 * 331]  # a block's own keys and the 99 before them


def test_flex_makes_one_mask_of_documents_for_all_layers_that_see_the_same(monkeypatch):
    # each layer gave it another view of the documents, so it made a mask in each: `auto` had timed it with one
    made, make = [], flex_attention.create_block_mask
    monkeypatch.setattr(flex_attention, "create_block_mask", lambda *a, **kw: made.append(a) or make(*a, **kw))
    shape = dict(block_size=40, vocab_size=101, n_layer=5, n_head=2, n_embd=16, attention="flex", document_start=3)
    idx = torch.arange(40)[None]
    for windows, kinds in (({}, 1), (dict(window=8, window_pattern="SL"), 2)):
        made.clear()
        GPT(GPTConfig(**shape, **windows)).requires_grad_(False)(idx, idx)
        assert len(made) == kinds


COMPILED_FLEX = functions._compiled_flex.__wrapped__


def test_beyond_pytorchs_limit_of_graphs_flex_raises(monkeypatch):
    # PyTorch would run it uncompiled there, with every score in memory
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda _, dynamic: compile_(torch.neg, dynamic=dynamic, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        attend = COMPILED_FLEX(dynamic=False)
        assert torch._dynamo.config.recompile_limit >= 64  # sample.py --attention=flex ended at its second token
        torch._dynamo.config.recompile_limit = 1
        attend(torch.zeros(1))
        with pytest.raises(FailOnRecompileLimitHit):
            attend(torch.zeros(2))
