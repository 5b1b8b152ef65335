"""FlashAttention-3 and -4 in place of PyTorch's own, with packages that stand in for theirs on a CPU."""

import dataclasses
import importlib.util

import pytest
import torch
from torch.library import Library
from torch.nn import attention

from fusedgpt.attention import parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION, make_ready
from fusedgpt.attention.table import KERNELS
from fusedgpt.errors import UserError
from model import GPT, GPTConfig
from tests.fusedgpt.attention.test_receipt import watch

CPU = torch.device("cpu")
TRAINING = Case((2, 2, 64, 32), CPU, torch.float32)
VERSIONS = {"flash3": "FA3", "flash4": "FA4"}
EVERYWHERE = {name: dataclasses.replace(kernel, gpu_only=False) for name, kernel in KERNELS.items()}
OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"


def weights(q, k):
    T, Tk = q.size(-2), k.size(-2)
    scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(torch.ones(T, Tk).triu(Tk - T + 1) > 0, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def laid_out(x):
    """`x` with the strides that PyTorch's own kernel returns, which compiled code checks."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def forward(q, k, v):
    p, logsumexp = weights(q, k)
    return torch.empty_like(q).copy_(p @ v), laid_out(logsumexp)


def backward(dy, q, k, v):
    p, _ = weights(q, k)
    dp = dy @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.size(-1) ** -0.5
    return tuple(map(laid_out, (ds @ k, ds.mT @ q, p.mT @ dy)))


@pytest.fixture(scope="module")
def operators():
    """For each version two operators, named as the profiler sees the real one's: {'flash3': (fwd, bwd), …}."""
    made = {}
    for name, space, fwd, bwd in (
        ("flash3", "flash_attn_3", "fwd", "bwd"),
        ("flash4", "kernel_cutlass", "kernel_flash_attncuteflash_fwd_sm90", "kernel_flash_attncuteflash_bwd_sm90"),
    ):
        library = Library(space, "DEF")
        library.define(f"{fwd}(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
        library.define(f"{bwd}(Tensor dy, Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)")
        library.impl(fwd, forward, "CPU")
        library.impl(bwd, backward, "CPU")
        made[name] = (getattr(getattr(torch.ops, space), fwd), getattr(getattr(torch.ops, space), bwd), library)
    return made


class Handle:
    def __init__(self, library):
        self.library = library

    def remove(self):
        self.library = None


@pytest.fixture
def provide(monkeypatch, operators):
    """A function of (name, forward, backward) that registers a package under `name`, 'flash3' or 'flash4'.

    Without functions it computes with its own operators. Afterwards PyTorch's own packages are back.
    """
    monkeypatch.setattr(permitted, "KERNELS", EVERYWHERE)
    monkeypatch.setattr(attention._registry, "_FLASH_ATTENTION_IMPLS", {})

    def provide(name, fwd=None, bwd=None):
        fwd, bwd = fwd or operators[name][0], bwd or operators[name][1]

        def register():
            library = Library("aten", "IMPL", "CPU")
            library.impl(OPERATOR, lambda q, k, v, *_, **__: fwd(q, k, v))
            library.impl(f"{OPERATOR}_backward", lambda dy, q, k, v, *_, **__: bwd(dy, q, k, v))
            return Handle(library)

        attention.register_flash_attention_impl(VERSIONS[name], register_fn=register)

    yield provide
    make_ready("flash")


def test_each_name_runs_its_own_version_whatever_ran_before(provide):
    # the version is the process's: `flash` after `flash3` used to be FlashAttention-3
    provide("flash3")
    provide("flash4")
    for name in ("flash", "flash3", "flash", "flash4", "flash3", "sdpa", "flash4", "masked", "flash3", "flash"):
        saw = watch(name)
        want = "flash" if name in ("sdpa", "masked") else name
        assert (saw["forward"], saw["backward"]) == ([want], [want]), name
        assert permitted.refusal(name, TRAINING) is None
        assert parity.passes(parity.compare(ATTENTION[name], TRAINING), torch.float32)


def test_a_compiled_model_follows_use_attention_back_and_forth(provide):
    # the graph of `flash` is reused without tracing: it used to run FlashAttention-3 from then on
    called = []

    def noted(q, k, v):
        called.append("flash3")
        return forward(q, k, v)

    provide("flash3", noted)
    model = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=1, n_head=2, n_embd=32)).eval()
    model.compile(backend="aot_eager")
    with torch.no_grad():
        for name, want in (("flash", []), ("flash3", ["flash3"]), ("flash", []), ("flash3", ["flash3"])):
            model.use_attention(name)
            called.clear()
            model(torch.zeros(1, 16, dtype=torch.long))
            assert called[-1:] == want, name


@pytest.mark.parametrize(("name", "module"), [("flash3", "flash_attn_interface"), ("flash4", "flash_attn")])
def test_without_the_package_the_reason_names_it(monkeypatch, name, module):
    with pytest.raises(UserError, match="on GPUs only"):
        permitted.require(name, TRAINING)
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    monkeypatch.setattr(permitted, "KERNELS", EVERYWHERE)
    assert permitted.refusal(name, TRAINING) == f"No module named '{module}'"
    assert watch("flash")["forward"] == ["flash"]  # a failed activation leaves it alone


def test_a_package_without_a_backward_samples_and_does_not_train(provide):
    def missing(*_):
        raise RuntimeError("This flash attention build does not support backward.")

    provide("flash3", bwd=missing)
    assert permitted.refusal("flash3", TRAINING) == "This flash attention build does not support backward"
    assert permitted.refusal("flash3", Case((2, 2, 64, 32), CPU, torch.float32, backward=False)) is None


def test_a_package_that_changes_nothing_or_is_wrong_is_not_taken_for_its_version(provide):
    # if only PyTorch's operator is seen, a receipt must take it for FlashAttention-2
    provide("flash3", fwd=forward, bwd=backward)
    assert "the profiler saw flash in the forward pass" in permitted.refusal("flash3", TRAINING)
    provide("flash4", fwd=lambda q, k, v: torch.ops.kernel_cutlass.kernel_flash_attncuteflash_fwd_sm90(q, k, 1.5 * v))
    assert permitted.refusal("flash4", TRAINING) is None
    assert not parity.passes(parity.compare(ATTENTION["flash4"], TRAINING), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", VERSIONS)
def test_on_a_gpu(name):
    case = Case((2, 2, 256, 64), torch.device("cuda"), torch.bfloat16)
    if reason := permitted.refusal(name, case):
        pytest.skip(reason)
    for attention_name in (name, "flash", name):
        saw = watch(attention_name, case)
        assert (saw["forward"], saw["backward"]) == ([attention_name], [attention_name]), saw
        assert parity.passes(parity.compare(ATTENTION[attention_name], case), torch.bfloat16)
