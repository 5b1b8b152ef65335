"""Which kernel may run, which is fastest, and which one ran."""

import contextlib
import types

import pytest
import torch

from parts import kernels, machine, parity
from parts.attention import ATTENTION
from parts.errors import UserError

CPU = torch.device("cpu")
SHAPE = (2, 2, 64, 32)


def watch(name, device=CPU, dtype=torch.float32, dropout=0.0, compiled=False):
    q, k, v, dy = parity.inputs(SHAPE, device, dtype)

    def step(attend=ATTENTION[name]):
        return torch.autograd.grad(attend(q, k, v, dropout), (q, k, v), dy)

    if compiled:
        torch.compiler.reset()
        attend = torch.compile(lambda q, k, v, p: ATTENTION[name](q * 1.0, k, v, p) * 1.0)
        step(attend)
        return kernels.observe(lambda: step(attend))
    return kernels.observe(step)


@pytest.mark.parametrize(
    ("name", "seen"), [("manual", "unfused"), ("math", "math"), ("flash", "flash"), ("sdpa", "flash")]
)
def test_receipt_names_the_kernel_that_ran(name, seen):
    # K1: a silent fall-back to math
    receipt = watch(name)
    assert receipt["forward"] == [seen]
    assert receipt["backward"] == [seen if seen == "flash" else "unfused"]
    assert kernels.contradiction(name, receipt, CPU) is None


def test_receipt_shows_that_sdpa_takes_math_with_dropout_on_a_cpu():
    # K8: on a CPU the flash kernel takes no dropout
    assert watch("sdpa", dropout=0.1)["forward"] == ["math"]


@pytest.mark.parametrize("name", ["manual", "flash"])
def test_compiling_changes_no_kernel(name):
    # K5: Inductor may rewrite hand-written attention into SDPA
    if reason := machine.can_compile(CPU):
        pytest.skip(reason)
    receipt = watch(name, compiled=True)
    assert kernels.contradiction(name, receipt, CPU) is None
    assert receipt["forward"] == ["unfused" if name == "manual" else "flash"]


def test_cudnns_own_kernel_names_are_not_taken_for_flash(monkeypatch):
    seen = ["aten::_scaled_dot_product_cudnn_attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma"]
    seen += ["aten::_scaled_dot_product_cudnn_attention_backward", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop"]

    class Profile(contextlib.nullcontext):
        def __enter__(self):
            return self

        def key_averages(self):
            return [types.SimpleNamespace(key=key) for key in seen]

    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile())
    receipt = kernels.observe(lambda: None)
    assert receipt == {"forward": ["cudnn"], "backward": ["cudnn"], "ops": sorted(seen)}


def test_contradiction_is_found():
    flash = {"forward": ["flash"], "backward": ["flash"]}
    mixed = {"forward": ["flash"], "backward": ["unfused"]}
    unfused = {"forward": ["unfused"], "backward": ["unfused"]}
    assert "saw flash" in kernels.contradiction("manual", flash, CPU)
    assert "saw unfused" in kernels.contradiction("flash", unfused, CPU)
    assert "backward" in kernels.contradiction("flash", mixed, CPU)
    assert kernels.contradiction("flash", mixed, CPU, backward=False) is None
    assert "saw flash" in kernels.contradiction("math", flash, CPU)
    assert kernels.contradiction("sdpa", mixed, CPU) is None


@pytest.mark.parametrize(
    ("name", "dropout", "backward", "reason"),
    [
        ("efficient", 0.0, True, "on GPUs only"),
        ("cudnn", 0.0, True, "on GPUs only"),
        ("flex", 0.0, True, "no backward of FlexAttention on a CPU"),
        ("flex", 0.1, False, "no dropout"),
        ("flash", 0.1, True, "do not support non-zero dropout"),
    ],
)
def test_refused_with_the_reason_on_a_cpu(name, dropout, backward, reason):
    with pytest.raises(UserError, match=reason) as raised:
        kernels.require(name, SHAPE, CPU, torch.float32, dropout, backward)
    assert f"attention='{name}'" in str(raised.value)
    assert "can be manual, math" in str(raised.value)  # what would run instead


@pytest.mark.parametrize(("name", "dropout"), [("manual", 0.1), ("math", 0.1), ("flash", 0.0), ("sdpa", 0.1)])
def test_permitted_on_a_cpu(name, dropout):
    kernels.require(name, SHAPE, CPU, torch.float32, dropout)
    assert kernels.refusal(name, SHAPE, CPU, torch.float32, dropout) is None


def test_deterministic_refuses_a_kernel_that_is_not(monkeypatch):
    # K7: determinism differs by kernel
    def noisy(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * (1 + 1e-6 * next(noise))

    noise = iter(range(100))
    monkeypatch.setattr(kernels, "ATTENTION", {**ATTENTION, "manual": noisy})
    assert kernels.refusal("manual", SHAPE, CPU, torch.float32) is None
    torch.use_deterministic_algorithms(True)
    assert "not deterministic" in kernels.refusal("manual", SHAPE, CPU, torch.float32)
    assert kernels.refusal("flash", SHAPE, CPU, torch.float32) is None


def test_auto_takes_the_fastest_that_passes_parity(monkeypatch):
    told = [0.0]  # a clock that the kernels themselves move on

    def taking(seconds, attend):
        def kernel(q, k, v, dropout_p=0.0):
            told[0] += seconds
            return attend(q, k, v)

        return kernel

    right, wrong = ATTENTION["math"], lambda q, k, v: q + k + v
    kinds = {"manual": taking(3.0, right), "math": taking(2.0, right), "flash": taking(1.0, wrong)}
    monkeypatch.setattr(kernels, "ATTENTION", kinds)
    monkeypatch.setattr(kernels, "contradiction", lambda *_: None)
    monkeypatch.setattr(kernels.clock, "now", lambda device: told[0])
    name, rows = kernels.fastest((1, 2, 128, 32), CPU, torch.float32)
    assert name == "math"
    assert "parity" in rows["flash"]["refused"] and "median_ms" not in rows["flash"]
    assert (rows["math"]["median_ms"], rows["manual"]["median_ms"]) == pytest.approx((2e3, 3e3))


def test_auto_leaves_out_a_kernel_that_needs_too_much_memory(monkeypatch):
    def greedy(q, k, v, dropout_p=0.0):
        if q.size(0) > 1:  # the trial at full size
            raise torch.OutOfMemoryError("no room")
        return ATTENTION["manual"](q, k, v)

    monkeypatch.setattr(kernels, "ATTENTION", {"manual": greedy, "math": ATTENTION["math"]})
    name, rows = kernels.fastest(SHAPE, CPU, torch.float32)
    assert name == "math" and rows["manual"]["refused"] == "out of memory at this shape"


def test_a_gpu_must_show_flex(monkeypatch):
    unfused = {"forward": ["unfused"], "backward": ["unfused"], "ops": []}
    assert "saw unfused" in kernels.contradiction("flex", unfused, torch.device("cuda"))
    assert kernels.contradiction("flex", unfused, CPU, backward=False) is None


def test_one_query_after_many_keys_is_probed_too():
    # generation: a kernel may take a whole prompt and refuse a lone token
    assert kernels.refusal("flash", (1, 2, 1, 32), CPU, torch.float32, backward=False, keys=64) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["manual", "math", "efficient", "flash", "cudnn", "flex"])
def test_receipt_on_a_gpu(name, dtype):
    # K3: on Hopper PyTorch's own pick is cuDNN, not flash
    device = torch.device("cuda")
    reason = kernels.refusal(name, SHAPE, device, dtype)
    if reason and name in ("cudnn", "flex"):  # the others run on every GPU
        pytest.skip(reason)
    for compiled in (False, True):
        receipt = watch(name, device, dtype, compiled=compiled)
        assert kernels.contradiction(name, receipt, device) is None, receipt
