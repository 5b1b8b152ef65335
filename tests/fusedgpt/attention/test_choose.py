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
SHARED = Case((2, 6, 64, 32), CPU, torch.float32, kv_heads=2, window=20)


@pytest.fixture
def only(monkeypatch):
    """only(name=function, …): from now on there are no other kernels."""

    def only(**kernels):
        monkeypatch.setattr(permitted, "ATTENTION", kernels)
        monkeypatch.setattr(choose, "SINGLE_KERNELS", [*kernels])

    return only


def test_auto_takes_a_kernel_for_shared_keys_and_a_window():
    name, trials = choose.choose("auto", SHARED, replace(SHARED, window=None))
    assert name in ("manual", "blocked", "math", "flash")
    assert all(trials[each]["median_ms"] > 0 for each in ("manual", "math", "flash")), trials


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
    ("raised", "phrase", "at_full_size"),
    [
        (RuntimeError(), "RuntimeError", "RuntimeError"),
        (ValueError("not on MPS.\nStack: …"), "not on MPS", "not on MPS"),
        (torch._dynamo.exc.FailOnRecompileLimitHit("8 times"), "8 times", "8 times"),
        (torch.OutOfMemoryError("no room"), "no room", "out of memory"),
    ],
    ids=repr,
)
def test_what_a_kernel_raises_is_its_refusal(raised, phrase, at_full_size, only):
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
    assert name == "flash" and trials["manual"]["refused"] == f"{at_full_size} at this shape"
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


def test_auto_takes_no_kernel_that_another_case_refuses(only):
    # sampling: the fastest for the prompt used to be refused afterwards, because it took no lone token
    def no_lone_query(q, k, v, dropout_p=0.0):
        if q.size(-2) == 1:
            raise RuntimeError("not one query")
        return ATTENTION["math"](q, k, v)

    only(flash=ATTENTION["flash"], math=no_lone_query)
    prompt = Case(SHAPE, CPU, torch.float32, backward=False)
    name, trials = choose.choose("auto", prompt, prompt.one_query())
    assert name == "flash" and trials["math"]["refused"] == "not one query"


def test_auto_takes_no_kernel_that_is_wrong_in_another_case(only):
    # only the first case was compared: one that was wrong for a lone token, or in the second layer, was taken
    def wrong(q, k, v, dropout_p=0.0, window=None):
        y = ATTENTION["math"](q, k, v, window=window)
        return y if q.size(-2) > 1 and window is None else 0 * y

    only(math=wrong)
    prompt = Case(SHAPE, CPU, torch.float32, backward=False)
    assert choose.choose("auto", prompt)[0] == "math"
    for other in (replace(prompt, window=9), prompt.one_query()):
        with pytest.raises(UserError, match=r"math: it fails parity with float64 on Case\(shape=\(1, 1, "):
            choose.choose("auto", prompt, other)


@pytest.fixture
def told(monkeypatch, only):
    """Replaces the clock by the times in {name: ms}. Kernels are told apart by what they compute."""
    ms = {}

    def make(self, count):
        self.step()
        return [ms[watched[-1]]] * count

    def watching(name):
        def kernel(*args):
            watched.append(name)
            return ATTENTION[name](*args)

        return kernel

    watched = []
    only(**{name: watching(name) for name in ("manual", "math", "flash")})
    monkeypatch.setattr(choose.timing.Steps, "make", make)
    return ms


def test_auto_times_on_what_is_near_the_fastest(told):
    # each kernel used to be timed to the end and compared with float64: 4 seconds on a CPU in float32
    told |= {"manual": 1.0, "math": 1.3, "flash": 5.0}
    name, trials = choose.fastest(TRAINING)
    samples = {kernel: trial["samples"] for kernel, trial in trials.items()}
    assert name == "manual" and samples["flash"] == 1 < samples["math"] == samples["manual"]
    assert [kernel for kernel, trial in trials.items() if "errors" in trial] == ["manual"]


def test_auto_takes_no_kernel_that_the_compiler_replaces(monkeypatch, told):
    # Inductor may rewrite hand-written attention into flash, and the run would end on its receipt
    told |= {"manual": 1.0, "math": 1.4, "flash": 1.2}
    monkeypatch.setattr(torch, "compile", lambda attend, dynamic: ATTENTION["flash"])
    name, trials = choose.fastest(TRAINING, compiled=True)
    assert name == "flash" and "saw flash in the forward pass" in trials["manual"]["refused"]


@pytest.mark.gpu
def test_on_a_gpu_auto_times_what_will_run(monkeypatch):
    # it timed eager kernels for a model that runs compiled, in which another may be the fastest
    made, timed = [], []

    def compile(attend, dynamic):
        made.append(lambda *args: timed.append(made[-1]) or attend(*args))
        return made[-1]

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(choose, "SINGLE_KERNELS", ["math", "flash"])
    choose.fastest(Case(SHAPE, torch.device("cuda"), torch.bfloat16), compiled=True)
    assert made and set(made) == set(timed)
