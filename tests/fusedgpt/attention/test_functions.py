"""Every path against float64 written out by hand, forward and backward; causality; cached queries."""

import functools
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._C._profiler import _EventType
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedgpt.attention import functions, parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION, MASKED
from fusedgpt.generation import generate
from fusedgpt.machine.profiler import profile
from model import GPT, GPTConfig
from tests.conftest import GPU

CPU = torch.device("cpu")
LENGTHS = (1, 7, 64, 127, 192, 257, 300, 1000, 1024)
FLEX_LENGTHS = (1, 127, 192, 300)  # flex is compiled for each, and raises at the ninth graph of a process
HEAD_SIZES = (32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERYWHERE = [
    *((name, "cpu") for name in ("manual", "blocked", "math", "flash", "sdpa", "masked")),
    *(pytest.param(name, *GPU.values, marks=GPU.marks) for name in ATTENTION),
]


def skip_refused(name, case):
    reason = permitted.refusal(name, case)
    if reason and name not in ("manual", "blocked", "math", "sdpa", "masked"):  # those run everywhere
        pytest.skip(f"{name} on {case.device}, {case.dtype}: {reason}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "device"), EVERYWHERE)
def test_output_and_gradients_equal_float64(name, device, dtype):
    # K6: cuDNN gave NaN gradients at T % 128 == 64; nobody who tests round lengths only sees it. F15: a last block of
    # `blocked` that was wrong if it was not full passed, as long as no length was beyond 256 and no multiple of it.
    for hs in HEAD_SIZES if name != "flex" else (64,):
        torch.compiler.reset()
        skip_refused(name, Case((1, 1, 64, hs), torch.device(device), dtype))
        for T in LENGTHS if name != "flex" else FLEX_LENGTHS:
            case = Case((2, 4, T, hs) if T <= 300 else (1, 2, T, hs), torch.device(device), dtype)
            if name == "cudnn" and permitted.refusal(name, case):  # which lengths it takes depends on its version
                continue
            found = parity.compare(ATTENTION[name], case)
            assert parity.passes(found, dtype), (T, hs, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "device"), EVERYWHERE)
def test_within_documents_output_and_gradients_equal_float64(name, device, dtype):
    # a kernel that leaks one document into the next trains, and its loss is even better
    torch.compiler.reset()
    hs = 64
    skip_refused(name, Case((1, 1, 64, hs), torch.device(device), dtype, packed=True))
    for T in (1, 7, 127, 300) if name != "flex" else (300,):
        case = Case((2, 4, T, hs), torch.device(device), dtype, packed=True)
        found = parity.compare(ATTENTION[name], case)
        assert parity.passes(found, dtype), (T, found)
        last = Case((2, 4, 1, hs), torch.device(device), dtype, keys=T, packed=True, backward=False)
        found = parity.compare(ATTENTION[name], last)
        assert parity.passes(found, dtype), (T, found)


# heads, heads of keys, hs, T, window: odd heads; a window of one token, of all but one, and of an odd number
SHARED = [(4, 2, 64, 127, None), (3, 1, 40, 70, None), (3, 1, 40, 70, 1), (4, 4, 32, 300, 299), (6, 2, 64, 300, 37)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "device"), EVERYWHERE)
def test_with_shared_keys_and_a_window_output_and_gradients_equal_float64(name, device, dtype):
    # heads in another order, or a window one token too wide, train as well as the right ones
    for nh, nkv, hs, T, window in SHARED:
        case = Case((2, nh, T, hs), torch.device(device), dtype, kv_heads=nkv, window=window)
        after_cache = replace(case, shape=(2, nh, 1, hs), keys=T, backward=False)
        chunk = replace(case, shape=(2, nh, 20, hs), keys=T, backward=False)
        packed = replace(case, packed=True)
        for each in (case, after_cache, chunk, packed):
            torch.compiler.reset()
            if name in ("efficient", "flash", "cudnn", "flash3", "flash4", "flex") and permitted.refusal(name, each):
                continue
            found = parity.compare(ATTENTION[name], each)
            assert parity.passes(found, dtype), (each, found)


def test_flex_with_shared_keys_and_a_window_equals_float64_on_cpu():
    for T, keys in ((300, None), (1, 130), (20, 131)):
        case = Case((2, 4, T, 64), CPU, torch.float32, keys=keys, kv_heads=2, window=37, backward=False)
        found = parity.compare(ATTENTION["flex"], case)
        assert parity.passes(found, torch.float32), (T, found)


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [*((name, False) for name in ("manual", "blocked", "math", "flash", "masked")), ("flash", True), ("masked", True)],
)
def test_shared_keys_and_a_window_are_the_same_in_one_compiled_graph(name, dynamic):
    # with dynamic shapes SDPA was given a SymBool as enable_gqa, and refused it
    torch.compiler.reset()
    attend = torch.compile(ATTENTION[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for T in (33, 65):
        case = Case((2, 3, T, 40), CPU, torch.float32, kv_heads=1, window=20)
        for got, want in zip(case.run(attend, *case.inputs()), case.run(ATTENTION[name], *case.inputs()), strict=True):
            torch.testing.assert_close(got, want)


def allocations(step):
    """The bytes of each piece of memory that `step` was given."""
    todo, found = list(profile(step, memory=True).kineto_results.experimental_event_tree()), []
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            found.append(event.extra_fields.alloc_size)
    return found


@pytest.mark.parametrize(("T", "window"), [(20, None), (20, 40), (1, None), (1, 40)])
@pytest.mark.parametrize("name", ["manual", "blocked", "math", "flash", "sdpa", "masked"])
def test_only_math_without_a_mask_copies_keys_and_values_for_each_head_of_queries(name, T, window):
    # the cache of a Llama of 8 B would be four times as large in each layer's attention
    copies = name == "math" and T > 1 and window is None
    case = Case((2, 6, T, 40), CPU, torch.float32, keys=130, kv_heads=2, window=window)
    inputs, for_each_head = case.inputs(), 4 * 2 * 6 * 130 * 40  # bytes
    assert (for_each_head in allocations(lambda: case.run(ATTENTION[name], *inputs))) is copies
    forward = replace(case, backward=False)
    inputs = forward.inputs()
    assert (for_each_head in allocations(lambda: forward.run(ATTENTION[name], *inputs))) is copies


def test_flex_within_documents_equals_float64_on_cpu():
    # as in a compiled model, with shapes that do not vary: for others PyTorch 2.13 writes C++ that does not compile
    attend = torch.compile(ATTENTION["flex"], dynamic=False)
    for T, keys in ((300, None), (1, 300), (20, 300)):
        case = Case((2, 4, T, 64), CPU, torch.float32, keys=keys, packed=True, backward=False)
        found = parity.compare(attend, case)
        assert parity.passes(found, torch.float32), (T, found)


def test_the_reference_computes_each_document_alone():
    q, k, v, dy = (x.detach() for x in Case((1, 2, 60, 16), CPU, torch.float64).inputs())
    documents = torch.tensor([[0] * 13 + [1] * 30 + [2] * 17])
    found = parity.reference(q, k, v, dy, documents)
    for part in (slice(0, 13), slice(13, 43), slice(43, 60)):
        alone = parity.reference(*(x[:, :, part] for x in (q, k, v, dy)))
        for got, want in zip(found, alone, strict=True):
            torch.testing.assert_close(got[:, :, part], want)


def test_a_case_of_several_documents_needs_a_kernel_that_separates_them():
    # otherwise the comparison with float64 could not fail
    case = Case((2, 4, 64, 32), CPU, torch.float32, packed=True)
    assert min(len(row.unique()) for row in case.documents) > 1 and len(case.documents.unique(dim=0)) == 2
    found = parity.compare(lambda q, k, v, dropout_p, documents: ATTENTION["manual"](q, k, v, dropout_p), case)
    assert not parity.passes(found, torch.float32)


def test_flex_is_compiled_for_no_more_lengths_than_pytorch_allows(monkeypatch):
    # with the nine lengths of the others it raised FailOnRecompileLimitHit on every GPU, where alone it has a backward
    compiled = CompileCounter()
    attend = torch.compile(flex_attention, dynamic=False, backend=compiled)  # as with a backward
    monkeypatch.setattr(functions, "_compiled_flex", lambda dynamic: attend)
    monkeypatch.setitem(globals(), "Case", functools.partial(Case, backward=False))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        test_output_and_gradients_equal_float64("flex", "cpu", torch.float32)
    assert len(FLEX_LENGTHS) <= compiled.frame_count <= torch._dynamo.config.recompile_limit


def test_flex_without_backward_equals_float64_on_cpu():
    skip_refused("flex", Case((1, 1, 64, 64), CPU, torch.float32, backward=False))
    for T in LENGTHS:
        found = parity.compare(ATTENTION["flex"], Case((1, 2, T, 64), CPU, torch.float32, backward=False))
        assert parity.passes(found, torch.float32), (T, found)


@pytest.mark.parametrize(("name", "device"), [*EVERYWHERE, ("flex", "cpu")])
def test_future_tokens_move_no_earlier_output(name, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    backward = (name, device) != ("flex", "cpu")
    skip_refused(name, Case((1, 1, 64, 32), torch.device(device), dtype, backward=backward))
    q, k, v, _ = Case((2, 2, 96, 32), torch.device(device), dtype, backward=False).inputs()
    y = ATTENTION[name](q, k, v)
    for changed in (1, 50, 95):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, changed:] += 3.0
        v2[:, :, changed:] -= 5.0
        y2 = ATTENTION[name](q, k2, v2)
        assert torch.equal(y[:, :, :changed], y2[:, :, :changed])
        assert not torch.equal(y[:, :, changed:], y2[:, :, changed:])


@pytest.mark.parametrize(("name", "device"), [*EVERYWHERE, ("flex", "cpu")])
@pytest.mark.parametrize("T", [1, 5, 64])
def test_fewer_queries_than_keys_see_what_came_before(name, device, T):
    # T17: is_causal is aligned to the top left, where a lone query after a cache sees the first key only
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    skip_refused(name, Case((1, 1, T, 32), torch.device(device), dtype, backward=False, keys=70))
    q, k, v, _ = Case((2, 2, 70, 32), torch.device(device), dtype, backward=False).inputs()
    y = ATTENTION[name](q[:, :, -T:], k, v)
    (want,) = parity.reference(q[:, :, -T:], k, v)
    (whole,) = parity.reference(q, k, v)
    torch.testing.assert_close(want, whole[:, :, -T:])
    error = (y.double() - want).abs().max() / want.abs().max()
    assert error <= parity.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "device"), EVERYWHERE)
def test_large_scores_differ_in_every_dtype(name, device, dtype):
    # F15: scores clamped at 60, or at 8, passed, because scores of ordinary inputs stay below 6
    case = Case((2, 4, 127, 64), torch.device(device), dtype)
    skip_refused(name, case)
    q, k, *_ = case.inputs_of_large_scores()
    scores = q.detach().double() @ k.detach().double().mT / 8
    assert scores.unique().tolist() == [16 * level for level in range(8)]
    found = {where: errors for where, errors in parity.checks(ATTENTION[name], case)}["on large scores"]
    assert found.keys() == {"y", "dv"} and parity.passes(found, dtype), found


@pytest.mark.parametrize("nkv", [4, 2])
@pytest.mark.parametrize(("name", "device"), EVERYWHERE)
def test_dropout_drops_single_weights_and_scales_the_rest(name, device, nkv):
    # F15: dropout at p/2, and dropout of the values in place of the weights, passed a comparison of means
    p, T, hs = 0.3, 64, 128
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = Case((8, 4, T, hs), torch.device(device), dtype, dropout=p, kv_heads=nkv)
    skip_refused(name, case)
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
    assert dropped.sum() / (32 * seen.sum()) == pytest.approx(p, abs=0.01)
    for dim in range(4):  # neighbours in sequence, head, query and key are dropped independently of each other
        n = dropped.size(dim) - 1
        both_dropped, both_seen = (x.narrow(dim, 0, n) & x.narrow(dim, 1, n) for x in (dropped, seen.expand_as(kept)))
        assert both_dropped.sum() / both_seen.sum() == pytest.approx(p * p, abs=0.01), dim

    # the backward drops the same weights: the chain rule through dropout and softmax
    dp = dy @ v.mT * kept / (1 - p)
    ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) / hs**0.5
    of_keys = (x.unflatten(1, (nkv, -1)).sum(2) for x in (ds.mT @ q, want.mT @ dy))
    for got, right in zip(gradients, (ds @ k, *of_keys), strict=True):
        assert (got - right).abs().max() <= parity.TOLERANCE[dtype] * right.abs().max()


def test_scaling_after_the_product_overflows_in_float16_and_the_kernels_do_not():
    # K12: scores of 230,400 are beyond float16's 65,504, their eighth is not
    q = torch.full((1, 1, 4, 64), 60.0, dtype=torch.float16)
    v = torch.ones_like(q)
    assert ATTENTION["manual"](q, q, v).isnan().any()
    for name in ("math", "flash"):
        torch.testing.assert_close(ATTENTION[name](q, q, v), v)


class CallsOfSDPA(TorchFunctionMode):
    """Notes of each call of scaled_dot_product_attention its options, and whether PyTorch might pick cuDNN for it."""

    def __init__(self):
        super().__init__()
        self.options, self.cudnn = [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.options.append(kwargs)
            self.cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
            if args[0].is_cuda:  # a fake tensor, for which a build with CUDA would look for a kernel
                return torch.empty_like(args[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("T", [1, 3, 5])
@pytest.mark.parametrize("attend", [ATTENTION["masked"], MASKED["math, masked"], MASKED["flash, masked"]])
def test_masked_gives_sdpa_a_mask_and_no_flag(attend, T):
    # a mask aligned to the top left, or is_causal beside it, would be another computation
    q, k, v, _ = Case((1, 1, 5, 8), CPU, torch.float32, backward=False).inputs()
    with CallsOfSDPA() as saw:
        y = attend(q[:, :, -T:], k, v)
    (options,) = saw.options
    assert not options.get("is_causal")
    assert options["attn_mask"].tolist() == [[key <= 5 - T + query for key in range(5)] for query in range(T)]
    torch.testing.assert_close(y.double(), parity.reference(q[:, :, -T:], k, v)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "device", "T", "allowed"),
    [
        ("sdpa", "cuda", 1, False),
        ("masked", "cuda", 1, False),
        ("sdpa", "cuda", 64, True),
        ("cudnn", "cuda", 1, True),
        ("sdpa", "cpu", 1, True),  # there is no cuDNN, and the context would cost 10 µs a call
    ],
)
def test_cudnn_is_not_picked_for_queries_after_a_cache_unless_it_is_named(name, device, T, allowed, compiled):
    # on Hopper cuDNN is picked first, and builds a plan for every length of the cache
    if name == "cudnn" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("PyTorch for CUDA asks the driver, which is not here, whether cuDNN can run")

    def watched(graph, inputs):
        def run(*args):
            with saw:
                return graph(*args)

        return run

    saw, attend = CallsOfSDPA(), ATTENTION[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = (torch.empty(1, 2, length, 64, device=device, dtype=torch.bfloat16) for length in (T, 64))
        y = (
            torch.compile(attend, backend=watched, fullgraph=True)(q, k, k)
            if compiled
            else watched(attend, None)(q, k, k)
        )
    assert y.shape == q.shape and set(saw.cudnn) == {allowed}
    assert torch.backends.cuda.cudnn_sdp_enabled()


class DtypesOfProducts(TorchDispatchMode):
    """Collects the dtypes of all matrix products, of those that run and of those in a compiled graph."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        y = op(*args, **(kwargs or {}))
        self.note(op, y)
        return y

    def note(self, op, y):
        if str(op) in ("aten.mm.default", "aten.bmm.default", "aten.baddbmm.default"):
            self.seen.add(y.dtype)

    def compile(self, graph, inputs):
        for node in graph.graph.nodes:
            self.note(node.target, node.meta.get("val"))
        return make_boxed_func(graph)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_math_computes_in_the_dtype_that_it_is_given(dtype, compiled):
    # since 2.5, PyTorch's `math` computes half precision in float32: twice the bytes, and not the article's rung
    case, saw = Case((1, 2, 64, 32), CPU, dtype), DtypesOfProducts()
    if compiled:
        backend = aot_autograd(fw_compiler=saw.compile, bw_compiler=saw.compile)
        case.run(torch.compile(ATTENTION["math"], backend=backend, fullgraph=True), *case.inputs())
    else:
        with saw:
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
    ("window", "scores"),
    [
        (None, [256 * 256, 256 * 512, 256 * 768, 232 * 1000]),
        (100, [256 * 256, 256 * 355, 256 * 355, 232 * 331]),  # a block's own keys and the 99 before them
        (1, [256 * 256, 256 * 256, 256 * 256, 232 * 232]),
    ],
)
def test_blocked_computes_few_scores_above_the_diagonal_and_before_the_window(window, scores):
    # half of all scores are above the diagonal: `blocked` saves these
    computed = []

    class Products(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            if function is torch.Tensor.softmax:
                computed.append(y.numel())
            return y

    case = Case((1, 1, 1000, 8), CPU, torch.float32, backward=False)
    with Products():
        ATTENTION["blocked"](*case.inputs()[:3], window=window)
    assert computed == scores


def test_the_mask_of_flex_leaves_out_blocks_before_the_window():
    def blocks(window):
        mask = functions._block_mask(1024, 1024, CPU, window)
        return (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().tolist()

    assert blocks(None) == [1, 2, 3, 4, 5, 6, 7, 8]  # of 128 keys
    assert blocks(128) == [1, 2, 2, 2, 2, 2, 2, 2]
    assert blocks(1) == [1] * 8


def test_flex_makes_one_mask_of_documents_for_all_layers_that_see_the_same(monkeypatch):
    # each layer gave it another view of the documents, so it made a mask in each: `auto` had timed it with one
    made, make = [], functions.create_block_mask
    monkeypatch.setattr(functions, "create_block_mask", lambda *args, **how: made.append(args) or make(*args, **how))
    attend = lambda q, k, v, block_mask: ATTENTION["manual"](q, k, v)  # noqa: E731
    monkeypatch.setattr(functions, "_compiled_flex", lambda dynamic: attend)
    shape = dict(block_size=40, vocab_size=101, n_layer=5, n_head=2, n_embd=16, attention="flex", document_start=3)
    idx = torch.arange(40)[None]
    for windows, kinds in (({}, 1), (dict(window=8, window_pattern="SL"), 2)):
        net, made[:] = GPT(GPTConfig(**shape, **windows)), []
        with torch.no_grad():
            net(idx, idx)
            assert len(made) == kinds
            cache = generate.new_cache(net.config)
            net(idx[:, :30], cache=cache)
            assert len(made) == 2 * kinds + 1  # in the last layer only the last token asks
            if not windows:  # keys that a window has dropped leave the documents too
                net(idx[:, 30:31], cache=cache)
                assert len(made) == 2 * kinds + 2
