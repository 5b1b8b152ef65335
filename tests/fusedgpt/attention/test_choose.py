"""Which kernel `auto` takes."""

from dataclasses import replace

import pytest
import torch

from fusedgpt.attention import choose, parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.errors import UserError

CPU = torch.device("cpu")
SHAPE = (2, 2, 64, 32)
TRAINING = Case(SHAPE, CPU, torch.float32)


@pytest.fixture
def only(monkeypatch):
    """only(name=function, …): from now on there are no other kernels."""

    def only(**kernels):
        monkeypatch.setattr(permitted, "ATTENTION", kernels)
        monkeypatch.setattr(choose, "SINGLE_KERNELS", [*kernels])

    return only


def test_a_long_context_is_compared_on_its_beginning(monkeypatch):
    # float64 scores of two heads take 86 GB at 32768 tokens: every kernel used to be out of memory there
    monkeypatch.setattr(parity, "MOST_COMPARED", 16)
    shapes, compare = set(), parity.compare

    def seen(attend, case, inputs=None, heads=None):
        return shapes.add(case.shape) or compare(attend, case, inputs, heads)

    monkeypatch.setattr(parity, "compare", seen)
    choose.fastest(TRAINING)
    assert {shape[2] for shape in shapes} - {*parity.ODD_LENGTHS} == {16}


def test_auto_takes_the_fastest_that_passes_parity(monkeypatch, only):
    told = [0.0]  # a clock that the kernels move on themselves

    def taking(seconds, attend):
        def kernel(q, k, v, dropout_p=0.0):
            told[0] += seconds
            return attend(q, k, v)

        return kernel

    right, wrong = ATTENTION["math"], lambda q, k, v, dropout_p=0.0: q + k + v
    only(manual=taking(3.0, right), math=taking(2.0, right), flash=taking(1.0, wrong))
    monkeypatch.setattr(permitted, "contradiction", lambda *_: None)
    monkeypatch.setattr(choose.timing.StepClock, "_mark", lambda clock: told[0])
    name, rows = choose.fastest(Case((1, 2, 128, 32), CPU, torch.float32))
    assert name == "math"
    assert "parity" in rows["flash"]["refused"] and "median_ms" not in rows["flash"]
    assert (rows["math"]["median_ms"], rows["manual"]["median_ms"]) == pytest.approx((2e3, 3e3))


@pytest.mark.parametrize(
    ("raised", "phrase"),
    [
        (RuntimeError(), "RuntimeError"),
        (ValueError("not on MPS.\nStack: …"), "not on MPS"),
        (torch._dynamo.exc.FailOnRecompileLimitHit("8 times"), "8 times"),
        (torch.OutOfMemoryError("no room"), "out of memory at this shape"),
    ],
    ids=repr,
)
def test_what_a_kernel_raises_is_its_refusal(raised, phrase, only):
    # FlexAttention on MPS raises ValueError, which ended a run with auto; an empty reason used to count as permitted
    def broken(q, k, v, dropout_p=0.0):
        if q.size(0) >= smallest:
            raise raised
        return ATTENTION["manual"](q, k, v)

    smallest = 1
    only(flash=ATTENTION["flash"], manual=broken)
    assert permitted.refusal("manual", TRAINING) == phrase
    assert choose.fastest(TRAINING)[1]["manual"]["refused"] == phrase
    smallest = 2  # permitted on one sequence, but not at full size
    name, trials = choose.fastest(TRAINING)
    assert name == "flash" and trials["manual"]["refused"] == phrase
    smallest = 1
    only(manual=broken)  # it used to be ValueError: min() arg is an empty sequence
    with pytest.raises(UserError, match=f"attention='auto' found no kernel that can run here: manual: {phrase}. Lower"):
        choose.choose("auto", TRAINING)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, torch.AcceleratorError("CUDA error: an illegal access")])
def test_ctrl_c_and_a_crashed_gpu_are_no_refusal(raised, monkeypatch):
    def ends(q, k, v, dropout_p=0.0):
        if q.size(0) > 1 or raised is KeyboardInterrupt:
            raise raised
        return ATTENTION["manual"](q, k, v)

    monkeypatch.setattr(permitted, "ATTENTION", {**ATTENTION, "manual": ends})
    with pytest.raises((KeyboardInterrupt, torch.AcceleratorError)):
        choose.fastest(TRAINING)


def test_auto_takes_no_kernel_that_is_wrong_in_another_case(only):
    # only the first case was compared: one that was wrong for a lone token, or in the second layer, was taken
    def wrong(q, k, v, dropout_p=0.0, window=None):
        y = ATTENTION["math"](q, k, v, window=window)
        return y if q.size(-2) > 1 and window is None else 0 * y

    only(math=wrong)
    prompt = Case(SHAPE, CPU, torch.float32, backward=False)
    assert choose.choose("auto", prompt)[0] == "math"
    for other in (replace(prompt, window=9), prompt.one_query()):
        with pytest.raises(UserError, match="math: it fails parity with float64 at 127 tokens"):
            choose.choose("auto", prompt, other)


def test_auto_takes_no_kernel_that_the_compiler_replaces(monkeypatch, only):
    # Inductor may rewrite hand-written attention into flash, and the run would end on its receipt
    only(manual=ATTENTION["manual"])
    monkeypatch.setattr(torch, "compile", lambda attend, dynamic: ATTENTION["flash"])
    with pytest.raises(UserError, match=r"manual: .*the profiler saw flash in the forward pass"):
        choose.fastest(TRAINING, compiled=True)
