"""Which kernel cannot run a case, and what the user is told."""

import re
import warnings
from dataclasses import replace

import pytest
import torch

from fusedgpt.attention import permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.errors import UserError

CPU = torch.device("cpu")
SHAPE = (2, 2, 64, 32)
TRAINING = Case(SHAPE, CPU, torch.float32)


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
        permitted.require(name, Case(SHAPE, CPU, torch.float32, dropout, backward))
    assert f"attention='{name}'" in str(raised.value)
    assert "can be manual, blocked, math" in str(raised.value)  # what would run instead


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("manual", 0.1), ("blocked", 0.1), ("math", 0.1), ("flash", 0.0), ("sdpa", 0.1), ("masked", 0.1)],
)
def test_permitted_on_a_cpu(name, dropout):
    case = Case(SHAPE, CPU, torch.float32, dropout)
    permitted.require(name, case)
    assert permitted.refusal(name, case) is None


@pytest.mark.parametrize("name", ["manual", "blocked", "math", "flash", "sdpa", "masked"])
def test_permitted_within_documents_on_a_cpu(name):
    case = Case(SHAPE, CPU, torch.float32, packed=True)
    permitted.require(name, case)
    assert permitted.refusal(name, case) is None


SHARED = Case((2, 6, 64, 32), CPU, torch.float32, kv_heads=2, window=20)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["manual", "blocked", "math", "flash", "sdpa", "masked"])
def test_permitted_with_shared_keys_and_a_window_on_a_cpu(name, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    permitted.require(name, SHARED)
    assert permitted.refusal(name, SHARED) is None


@pytest.mark.parametrize("name", ["flash", "flash3", "flash4"])
def test_on_a_gpu_flash_is_refused_with_a_window(name):
    # PyTorch speaks of a mask, which the user has not asked for
    reason = permitted.refusal(name, replace(SHARED, device=torch.device("cuda"), kv_heads=None))
    assert "SDPA has no argument for a window" in reason and "takes no mask" in reason


def test_shared_keys_are_refused_in_the_words_of_the_setting(monkeypatch):
    # as `efficient` does on a GPU with PyTorch 2.13, which names the sizes of three tensors
    def efficient(*_, **__):
        said = (
            "For dense input, both fused kernels require query, key and value to have the same num_heads. Query.sizes"
        )
        warnings.warn(said, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setitem(ATTENTION, "flash", efficient)
    reason = "takes no heads of queries that share keys and values (n_kv_head)"
    assert reason in permitted.refusal("flash", SHARED) and reason not in permitted.refusal("flash", TRAINING)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("efficient", {"window": None}, "n_kv_head"),
        ("efficient", {}, None),  # with a mask, see functions.as_rows
        ("flash", {}, "no argument for a window"),
        ("flash", {"window": None}, None),
        ("cudnn", {"window": None}, None),
        ("flex", {}, None),
    ],
)
def test_on_a_gpu_shared_keys_and_windows_run_or_are_refused_by_name(name, changes, reason):
    case = replace(SHARED, device=torch.device("cuda"), dtype=torch.bfloat16, **changes)
    found = permitted.refusal(name, case)
    if name == "efficient" and found is None:
        pytest.skip("this PyTorch's efficient kernel takes shared keys")
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("name", "reason"), [("flex", "within documents"), ("my.py:own", "must take an argument `documents`")]
)
def test_refused_within_documents(name, reason, monkeypatch):
    # a kernel of the user's own that knows nothing of documents would attend across them in silence
    monkeypatch.setitem(ATTENTION, "my.py:own", lambda q, k, v, dropout_p=0.0: ATTENTION["manual"](q, k, v))
    assert re.search(reason, permitted.refusal(name, Case(SHAPE, CPU, torch.float32, backward=False, packed=True)))


def test_an_own_kernel_gets_documents_and_a_window_by_keyword_only_if_there_are_any(monkeypatch):
    given = []

    def own(q, k, v, dropout_p=0.0, **masks):
        given.append(sorted(masks))
        return ATTENTION["manual"](q, k, v, **masks)

    monkeypatch.setitem(ATTENTION, "my.py:own", own)
    for case, masks in (
        (TRAINING, []),
        (SHARED, ["window"]),
        (replace(SHARED, packed=True), ["documents", "window"]),
    ):
        given.clear()
        permitted.require("my.py:own", case)
        assert given and all(each == masks for each in given)


def test_an_own_kernel_that_cannot_do_what_the_model_has_is_told_what_to_take(monkeypatch):
    # it would train with full attention, and nobody would know
    monkeypatch.setitem(ATTENTION, "my.py:own", lambda q, k, v, dropout_p=0.0: ATTENTION["manual"](q, k, v))
    with pytest.raises(UserError, match="it must take an argument `window` for a model with a window: the number of"):
        permitted.require("my.py:own", SHARED)
    ignores = lambda q, k, v, dropout_p=0.0, window=None: ATTENTION["manual"](q, k, v)  # noqa: E731
    monkeypatch.setitem(ATTENTION, "my.py:own", ignores)
    with pytest.raises(UserError, match="it is not causal attention in a window of 20: at 127 tokens its errors"):
        permitted.require("my.py:own", SHARED)
    equal = lambda q, k, v, dropout_p=0.0: (q @ k.mT).tril() @ v  # noqa: E731
    monkeypatch.setitem(ATTENTION, "my.py:own", equal)
    with pytest.raises(UserError, match=r"must match .* \(k and v have 2 heads, q has 6\)"):
        permitted.require("my.py:own", replace(SHARED, window=None))


def test_an_own_kernel_that_ignores_documents_is_told_so(monkeypatch):
    ignores = lambda q, k, v, dropout_p=0.0, documents=None: ATTENTION["manual"](q, k, v)  # noqa: E731
    monkeypatch.setitem(ATTENTION, "my.py:own", ignores)
    with pytest.raises(UserError, match="it is not attention within documents: at 127 tokens its errors"):
        permitted.require("my.py:own", Case(SHAPE, CPU, torch.float32, packed=True))


def test_flex_is_refused_where_it_computes_wrongly(monkeypatch):
    # seen with PyTorch 2.13 on an AMD EPYC without AVX-512: cached generation drew ids from NaN
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for head_size in (8, 16):
        case = Case((1, 2, 24, head_size), CPU, torch.float32, backward=False)
        assert "wrongly for heads of 8 and 16" in permitted.refusal("flex", case)


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


def test_one_query_after_many_keys_is_probed_too():
    # generation: a kernel may take a whole prompt and refuse a lone token
    one_token = Case((1, 2, 1, 32), CPU, torch.float32, backward=False, keys=64)
    assert permitted.refusal("flash", one_token) is None
