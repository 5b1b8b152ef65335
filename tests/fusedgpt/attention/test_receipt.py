"""Which kernel ran: what the profiler saw, and whether that is what was asked for."""

import types
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fusedgpt.attention import permitted, receipt
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.attention.table import SINGLE_KERNELS

CPU = torch.device("cpu")
SHAPE = (2, 2, 64, 32)
TRAINING = Case(SHAPE, CPU, torch.float32)
FORWARD = replace(TRAINING, backward=False)


def watch(name, case=TRAINING, backend=None):
    """The receipt of a kernel; with a `backend`, of a compiled step around it."""
    inputs, attend = case.inputs(), ATTENTION[name]
    if backend:
        torch.compiler.reset()
        attend = torch.compile(lambda q, k, v, p: ATTENTION[name](q * 1.0, k, v, p) * 1.0, backend=backend)
        case.run(attend, *inputs)
    return receipt.observe(lambda: case.run(attend, *inputs))


@pytest.mark.parametrize(
    ("name", "seen"),
    [("manual", "unfused"), ("math", "math"), ("flash", "flash"), ("sdpa", "flash"), ("masked", "flash")],
)
def test_receipt_names_the_kernel_that_ran(name, seen):
    # K1: a silent fall-back to math
    saw = watch(name)
    assert saw["forward"] == [seen]
    assert saw["backward"] == [seen if seen == "flash" else "unfused"]
    assert receipt.contradiction(name, saw, TRAINING) is None


SDPA = "aten::_scaled_dot_product"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash"
CUTE = "kernel_cutlass_kernel_flash_attncuteflash"


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("cudnn", [f"{SDPA}_cudnn_attention", f"{CUDNN}_fprop_wgmma"], [f"{CUDNN}_bprop"]),  # not flash
        ("flash", [f"{SDPA}_flash_attention", "aten::_flash_attention_forward"], ["aten::_flash_attention_backward"]),
        ("flash3", [f"{SDPA}_flash_attention", "flash_attn_3::fwd"], ["flash_attn_3::bwd"]),
        ("flash4", [f"{SDPA}_flash_attention", f"{CUTE}_fwd_sm90Flash"], [f"{CUTE}_bwd_sm90Flash"]),
        # as flash-attention#2564 renames them
        ("flash4", [f"{SDPA}_flash_attention", f"flash_fwd_sm90_{CUTE}_fwd"], [f"flash_bwd_sm90_{CUTE}_bwd"]),
    ],
)
def test_names_seen_on_a_gpu_are_told_apart(monkeypatch, name, forward, backward):
    seen = [*forward, f"{forward[0]}_backward", *backward]

    def profile(step, shapes):
        events = [types.SimpleNamespace(name=lambda op=op: op) for op in seen]
        return types.SimpleNamespace(kineto_results=types.SimpleNamespace(events=lambda: events))

    monkeypatch.setattr(receipt, "profile", profile)
    assert receipt.observe(lambda: None) == {"forward": [name], "backward": [name], "ops": sorted(seen)}
    seen.append("aten::_flash_attention_forward")  # a layer that ran PyTorch's own flash is not hidden
    assert "flash" in receipt.observe(lambda: None)["forward"]


@pytest.mark.parametrize(
    ("columns", "stride", "logits"),
    [(65, 65, [[65, 65]]), (65, 128, [[65, 65], [65, 128]]), (72, 72, [[65, 65], [72, 72]]), (73, 73, [[65, 65]])],
)
def test_it_says_how_the_logits_lay_in_memory(columns, stride, logits):
    # Inductor pads the columns of a product to a multiple of 8, and the memory between its rows to 128 bytes
    x, weight = torch.randn(4, 32, requires_grad=True), torch.randn(65, 32)
    padded, out = torch.randn(columns, 32), torch.empty_strided((4, columns), (stride, 1))

    def step():
        F.linear(x, weight).square().sum().backward()  # its own logits, forward and backward
        torch.mm(x.detach(), padded.T, out=out)

    assert receipt.observe(step, ids=65)["logits"] == logits
    assert "logits" not in receipt.observe(step)


@pytest.mark.parametrize(
    ("name", "forward", "backward", "case", "said"),
    [
        ("manual", "flash", "flash", TRAINING, "saw flash in the forward"),
        ("math", "flash", "flash", TRAINING, "saw flash in the forward"),
        ("flash", "unfused", "unfused", TRAINING, "saw unfused in the forward"),
        ("flash", "flash", "unfused", TRAINING, "saw unfused in the backward"),
        ("flash", "flash", "unfused", FORWARD, None),
        ("sdpa", "flash", "unfused", TRAINING, None),
        ("masked", "unfused", "unfused", TRAINING, None),
        ("flex", "unfused", "unfused", TRAINING, "saw unfused in the forward"),
    ],
)
def test_contradiction_is_found(name, forward, backward, case, said):
    found = receipt.contradiction(name, {"forward": [forward], "backward": [backward]}, case)
    assert found is None if said is None else said in found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SINGLE_KERNELS)
def test_receipt_on_a_gpu(name, dtype):
    # K3: on Hopper PyTorch's own pick is cuDNN, not flash
    case = Case((2, 2, 64, 64), torch.device("cuda"), dtype)
    reason = permitted.refusal(name, case)
    if reason and name in ("cudnn", "flash3", "flash4", "flex"):  # the others run on every GPU
        pytest.skip(reason)
    for backend in (None, "inductor"):
        saw = watch(name, case, backend)
        assert receipt.contradiction(name, saw, case) is None, saw
