"""Which kernel cannot run a case, and what the user is told."""

from dataclasses import replace

import pytest
import torch

from fusedgpt.attention import functions, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.errors import UserError

CPU = torch.device("cpu")
TRAINING = Case((2, 2, 64, 32), CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("efficient", {}, "on GPUs only"),
        ("cudnn", {}, "on GPUs only"),
        ("flex", {}, "on GPUs only"),
        ("flex", dict(dropout=0.1), "no dropout"),
        ("flash", dict(dropout=0.1), "do not support non-zero dropout"),
    ],
)
def test_refused_with_the_reason_on_a_cpu(name, changes, reason):
    with pytest.raises(UserError, match=reason) as raised:
        permitted.require(name, replace(TRAINING, **changes))
    assert f"attention='{name}'" in str(raised.value)
    assert "can be manual, blocked, math" in str(raised.value)  # what would run instead


SHARED = Case((2, 6, 64, 32), CPU, torch.float32, kv_heads=2, window=20)
PACKED = replace(TRAINING, packed=True)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["manual", "blocked", "math", "flash", "sdpa", "masked"])
def test_permitted_on_a_cpu(name, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    one_token = replace(TRAINING, shape=(1, 2, 1, 32), keys=64, backward=False)  # generation
    for case in (replace(TRAINING, dropout=0.0 if name == "flash" else 0.1), PACKED, SHARED, one_token):
        permitted.require(name, case)
        assert permitted.refusal(name, case) is None  # which auto asks


def full(q, k, v, dropout_p=0.0):
    return ATTENTION["manual"](q, k, v)


def ignores_masks(q, k, v, dropout_p=0.0, documents=None, window=None):
    return ATTENTION["manual"](q, k, v)


@pytest.mark.parametrize(("case", "mask"), [(SHARED, "window"), (PACKED, "documents")])
def test_an_own_kernel_that_cannot_do_what_the_model_has_is_refused(case, mask, monkeypatch):
    # it would train with full attention, or across documents, and nobody would know
    monkeypatch.setitem(ATTENTION, "my.py:own", ATTENTION["manual"])
    permitted.require("my.py:own", case)
    for own, said in ((full, f"unexpected keyword argument '{mask}'"), (ignores_masks, "it fails parity with float64")):
        monkeypatch.setitem(ATTENTION, "my.py:own", own)
        with pytest.raises(UserError, match=said):
            permitted.require("my.py:own", case)


def test_cudnn_is_refused_where_it_may_round_the_dropout():
    # PyTorch 2.11's cuDNN may train at n/16, and on Hopper sdpa is cuDNN first
    for p in (0.1, 0.2):
        on_gpu = replace(TRAINING, device=torch.device("cuda"), dropout=p)
        assert "may round dropout" in permitted.refusal("cudnn", on_gpu)
    assert not functions.rounded_by_cudnn(0.125) and not functions.rounded_by_cudnn(0.0)


def test_flex_is_compared_as_the_compiler_makes_it(monkeypatch):
    # with PyTorch 2.11 on an H200, training within documents was as manual's eager, and not compiled
    case = Case((2, 2, 64, 16), torch.device("cpu"), torch.float32, backward=False, packed=True)
    monkeypatch.setattr(permitted, "refusal", lambda *_, **__: None)
    monkeypatch.setattr(permitted, "ATTENTION", {"flex": ATTENTION["manual"], "manual": ATTENTION["manual"]})

    def compiled_wrongly(attend, dynamic):
        return lambda *inputs, **masks: 1.1 * attend(*inputs, **masks)

    monkeypatch.setattr(torch, "compile", compiled_wrongly)
    permitted.require("flex", case)
    permitted.require("manual", case, compiled=True)
    with pytest.raises(UserError, match="it fails parity with float64 compiled"):
        permitted.require("flex", case, compiled=True)


def test_deterministic_refuses_a_kernel_that_is_not(monkeypatch):
    # K7: determinism differs by kernel
    def noisy(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * (1 + 1e-6 * next(noise))

    noise = iter(range(100))
    monkeypatch.setattr(permitted, "ATTENTION", {**ATTENTION, "manual": noisy})
    assert permitted.refusal("manual", TRAINING) is None
    torch.use_deterministic_algorithms(True)
    assert "not deterministic" in permitted.refusal("manual", TRAINING)
    assert permitted.refusal("flash", TRAINING) is None
