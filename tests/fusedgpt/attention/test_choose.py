"""Which kernel may run, and which is fastest."""

import itertools
import math
import re
import warnings
from dataclasses import replace

import pytest
import torch

from fusedgpt.attention import choose, parity
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
        choose.require(name, Case(SHAPE, CPU, torch.float32, dropout, backward))
    assert f"attention='{name}'" in str(raised.value)
    assert "can be manual, blocked, math" in str(raised.value)  # what would run instead


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("manual", 0.1), ("blocked", 0.1), ("math", 0.1), ("flash", 0.0), ("sdpa", 0.1), ("masked", 0.1)],
)
def test_permitted_on_a_cpu(name, dropout):
    case = Case(SHAPE, CPU, torch.float32, dropout)
    choose.require(name, case)
    assert choose.refusal(name, case) is None


@pytest.mark.parametrize("name", ["manual", "blocked", "math", "flash", "sdpa", "masked"])
def test_permitted_within_documents_on_a_cpu(name):
    case = Case(SHAPE, CPU, torch.float32, packed=True)
    choose.require(name, case)
    assert choose.refusal(name, case) is None


SHARED = Case((2, 6, 64, 32), CPU, torch.float32, kv_heads=2, window=20)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["manual", "blocked", "math", "flash", "sdpa", "masked"])
def test_permitted_with_shared_keys_and_a_window_on_a_cpu(name, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    choose.require(name, SHARED)
    assert choose.refusal(name, SHARED) is None


@pytest.mark.parametrize("name", ["flash", "flash3", "flash4"])
def test_on_a_gpu_flash_is_refused_with_a_window(name):
    # PyTorch speaks of a mask, which the user has not asked for
    reason = choose.refusal(name, replace(SHARED, device=torch.device("cuda"), kv_heads=None))
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
    assert reason in choose.refusal("flash", SHARED) and reason not in choose.refusal("flash", TRAINING)


def test_auto_takes_a_kernel_for_shared_keys_and_a_window():
    name, trials = choose.choose("auto", SHARED, replace(SHARED, window=None))
    assert name in ("manual", "blocked", "math", "flash")
    assert all(trials[each]["median_ms"] > 0 for each in ("manual", "math", "flash")), trials


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
    found = choose.refusal(name, case)
    if name == "efficient" and found is None:
        pytest.skip("this PyTorch's efficient kernel takes shared keys")
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("name", "reason"), [("flex", "within documents"), ("my.py:own", "must take an argument `documents`")]
)
def test_refused_within_documents(name, reason, monkeypatch):
    # a kernel of the user's own that knows nothing of documents would attend across them in silence
    monkeypatch.setitem(ATTENTION, "my.py:own", lambda q, k, v, dropout_p=0.0: ATTENTION["manual"](q, k, v))
    assert re.search(reason, choose.refusal(name, Case(SHAPE, CPU, torch.float32, backward=False, packed=True)))


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
        choose.require("my.py:own", case)
        assert given and all(each == masks for each in given)


def test_an_own_kernel_that_cannot_do_what_the_model_has_is_told_what_to_take(monkeypatch):
    # it would train with full attention, and nobody would know
    monkeypatch.setitem(ATTENTION, "my.py:own", lambda q, k, v, dropout_p=0.0: ATTENTION["manual"](q, k, v))
    with pytest.raises(UserError, match="it must take an argument `window` for a model with a window: the number of"):
        choose.require("my.py:own", SHARED)
    ignores = lambda q, k, v, dropout_p=0.0, window=None: ATTENTION["manual"](q, k, v)  # noqa: E731
    monkeypatch.setitem(ATTENTION, "my.py:own", ignores)
    with pytest.raises(UserError, match="it is not causal attention in a window of 20: at 127 tokens its errors"):
        choose.require("my.py:own", SHARED)
    equal = lambda q, k, v, dropout_p=0.0: (q @ k.mT).tril() @ v  # noqa: E731
    monkeypatch.setitem(ATTENTION, "my.py:own", equal)
    with pytest.raises(UserError, match=r"must match .* \(k and v have 2 heads, q has 6\)"):
        choose.require("my.py:own", replace(SHARED, window=None))


def test_an_own_kernel_that_ignores_documents_is_told_so(monkeypatch):
    ignores = lambda q, k, v, dropout_p=0.0, documents=None: ATTENTION["manual"](q, k, v)  # noqa: E731
    monkeypatch.setitem(ATTENTION, "my.py:own", ignores)
    with pytest.raises(UserError, match="it is not attention within documents: at 127 tokens its errors"):
        choose.require("my.py:own", Case(SHAPE, CPU, torch.float32, packed=True))


def test_a_long_context_is_compared_on_its_beginning(monkeypatch):
    # float64 scores of two heads take 86 GB at 32768 tokens: every kernel used to be out of memory there
    monkeypatch.setattr(choose, "MOST_COMPARED", 16)
    shapes, compare = set(), choose.parity.compare

    def seen(attend, case, inputs=None, heads=None):
        return shapes.add(case.shape) or compare(attend, case, inputs, heads)

    monkeypatch.setattr(choose.parity, "compare", seen)
    choose.fastest(TRAINING)
    assert {shape[2] for shape in shapes} - {*parity.ODD_LENGTHS} == {16}


def test_flex_is_refused_where_it_computes_wrongly(monkeypatch):
    # seen with PyTorch 2.13 on an AMD EPYC without AVX-512: cached generation drew ids from NaN
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for head_size in (8, 16):
        case = Case((1, 2, 24, head_size), CPU, torch.float32, backward=False)
        assert "wrongly for heads of 8 and 16" in choose.refusal("flex", case)


def test_deterministic_refuses_a_kernel_that_is_not(monkeypatch):
    # K7: determinism differs by kernel
    def noisy(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * (1 + 1e-6 * next(noise))

    noise = iter(range(100))
    monkeypatch.setattr(choose, "ATTENTION", {**ATTENTION, "manual": noisy})
    assert choose.refusal("manual", TRAINING) is None
    torch.use_deterministic_algorithms(True)
    assert "not deterministic" in choose.refusal("manual", TRAINING)
    assert choose.refusal("flash", TRAINING) is None


def test_auto_takes_the_fastest_that_passes_parity(monkeypatch):
    told = [0.0]  # a clock that the kernels move on themselves

    def taking(seconds, attend):
        def kernel(q, k, v, dropout_p=0.0):
            told[0] += seconds
            return attend(q, k, v)

        return kernel

    right, wrong = ATTENTION["math"], lambda q, k, v, dropout_p=0.0: q + k + v
    kinds = {"manual": taking(3.0, right), "math": taking(2.0, right), "flash": taking(1.0, wrong)}
    monkeypatch.setattr(choose, "ATTENTION", kinds)
    monkeypatch.setattr(choose, "SINGLE_KERNELS", list(kinds))
    monkeypatch.setattr(choose, "contradiction", lambda *_: None)
    monkeypatch.setattr(choose.timing, "now", lambda device: told[0])
    monkeypatch.setattr(choose.timing.time, "process_time", lambda: told[0])
    name, rows = choose.fastest(Case((1, 2, 128, 32), CPU, torch.float32))
    assert name == "math"
    assert "parity" in rows["flash"]["refused"] and "median_ms" not in rows["flash"]
    assert (rows["math"]["median_ms"], rows["manual"]["median_ms"]) == pytest.approx((2e3, 3e3))


def test_auto_leaves_out_a_kernel_that_needs_too_much_memory(monkeypatch):
    def greedy(q, k, v, dropout_p=0.0):
        if q.size(0) > 1:  # the trial at full size
            raise torch.OutOfMemoryError("no room")
        return ATTENTION["manual"](q, k, v)

    monkeypatch.setattr(choose, "ATTENTION", {"manual": greedy, "math": ATTENTION["math"]})
    monkeypatch.setattr(choose, "SINGLE_KERNELS", ["manual", "math"])
    name, rows = choose.fastest(TRAINING)
    assert name == "math" and rows["manual"]["refused"] == "out of memory at this shape"


def test_one_query_after_many_keys_is_probed_too():
    # generation: a kernel may take a whole prompt and refuse a lone token
    one_token = Case((1, 2, 1, 32), CPU, torch.float32, backward=False, keys=64)
    assert choose.refusal("flash", one_token) is None


RAISED = [RuntimeError("no such kernel."), RuntimeError(), ValueError("not on MPS\nStack: …"), AssertionError()]
RAISED += [NotImplementedError("NYI"), torch._dynamo.exc.FailOnRecompileLimitHit("8 times"), ImportError("no triton")]
PHRASES = ["no such kernel", "RuntimeError", "not on MPS", "AssertionError", "NYI", "8 times", "no triton"]


@pytest.mark.parametrize(("raised", "phrase"), [*zip(RAISED, PHRASES)], ids=repr)
def test_what_a_kernel_raises_is_its_refusal(raised, phrase, monkeypatch):
    # FlexAttention on MPS raises ValueError, which ended a run with auto; an empty reason used to count as permitted
    def broken(q, k, v, dropout_p=0.0):
        if q.size(0) >= smallest[0]:
            raise raised
        return ATTENTION["manual"](q, k, v)

    smallest = [1]
    monkeypatch.setattr(choose, "ATTENTION", {"flash": ATTENTION["flash"], "manual": broken})
    monkeypatch.setattr(choose, "SINGLE_KERNELS", ["flash", "manual"])
    assert choose.refusal("manual", TRAINING) == phrase
    assert choose.fastest(TRAINING)[1]["manual"]["refused"] == phrase
    smallest = [2]  # permitted on one sequence, but not at full size
    name, trials = choose.fastest(TRAINING)
    assert name == "flash" and trials["manual"]["refused"] == f"{phrase} at this shape"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, torch.AcceleratorError("CUDA error: an illegal access")])
def test_ctrl_c_and_a_crashed_gpu_are_no_refusal(raised, monkeypatch):
    def ends(q, k, v, dropout_p=0.0):
        if q.size(0) > 1 or raised is KeyboardInterrupt:
            raise raised
        return ATTENTION["manual"](q, k, v)

    monkeypatch.setattr(choose, "ATTENTION", {**ATTENTION, "manual": ends})
    with pytest.raises((KeyboardInterrupt, torch.AcceleratorError)):
        choose.fastest(TRAINING)


def test_auto_without_any_kernel_left_is_one_sentence(monkeypatch):
    # it used to be ValueError: min() arg is an empty sequence
    def greedy(q, k, v, dropout_p=0.0):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(choose, "ATTENTION", {"manual": greedy})
    monkeypatch.setattr(choose, "SINGLE_KERNELS", ["manual"])
    with pytest.raises(UserError, match=r"attention='auto' found no kernel that can run here: manual: .*no room"):
        choose.choose("auto", Case(SHAPE, CPU, torch.float32))


def test_auto_takes_no_kernel_that_another_case_refuses(monkeypatch):
    # sampling: the fastest for the prompt used to be refused afterwards, because it took no lone token
    def no_lone_query(q, k, v, dropout_p=0.0):
        if q.size(-2) == 1:
            raise RuntimeError("not one query")
        return ATTENTION["math"](q, k, v)

    monkeypatch.setattr(choose, "ATTENTION", {"flash": ATTENTION["flash"], "math": no_lone_query})
    monkeypatch.setattr(choose, "SINGLE_KERNELS", ["flash", "math"])
    prompt = Case(SHAPE, CPU, torch.float32, backward=False)
    name, trials = choose.choose("auto", prompt, prompt.one_query())
    assert name == "flash" and trials["math"]["refused"] == "not one query"


@pytest.fixture
def told(monkeypatch):
    """Replaces the clock by the times in {name: ms}. Kernels are told apart by what they compute."""
    ms = {}

    def own_samples(step, device, count, warmup):
        step()
        return [ms[watched[-1]]] * count

    def watching(name):
        def kernel(*args):
            watched.append(name)
            return ATTENTION[name](*args)

        return kernel

    watched = []
    monkeypatch.setattr(choose, "SINGLE_KERNELS", ["manual", "math", "flash"])
    monkeypatch.setattr(choose, "ATTENTION", {name: watching(name) for name in ("manual", "math", "flash")})
    monkeypatch.setattr(choose.timing, "own_samples", own_samples)
    return ms


def test_auto_times_on_what_is_near_the_fastest(told):
    # each kernel used to be timed to the end and compared with float64: 4 seconds on a CPU in float32
    told |= {"manual": 1.0, "math": 1.8, "flash": 5.0}
    name, trials = choose.fastest(TRAINING)
    samples = {kernel: trial["samples"] for kernel, trial in trials.items()}
    assert name == "manual" and samples["flash"] == 1 < samples["math"] < samples["manual"]
    assert [kernel for kernel, trial in trials.items() if "errors" in trial] == ["manual"]


@pytest.mark.parametrize(("hits", "of"), [(1, 2), (2, 5)])  # with 3 kernels, each is hit in so many rounds
def test_auto_is_not_misled_by_disturbed_calls(hits, of, monkeypatch, told):
    # it ranked by the median: on a loaded machine its choice was luck
    told |= {"manual": 1.0, "math": 1.3, "flash": 1.2}
    quiet, calls = choose.timing.own_samples, []

    def own_samples(*args):
        calls.append(None)
        hit = torch.get_num_threads() > 1 and len(calls) % of < hits
        return [one * (50 if hit else 1) for one in quiet(*args)]

    monkeypatch.setattr(choose, "CUTOFFS", (100, 100, 100))
    monkeypatch.setattr(choose.timing, "own_samples", own_samples)
    assert choose.fastest(TRAINING)[0] == "manual"


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="one thread only")
@pytest.mark.parametrize("counted", [True, False], ids=["by the system", "by the times"])
def test_beside_a_program_that_holds_up_every_call_the_times_on_one_thread_count(counted, monkeypatch, told):
    # a kernel whose first two calls were held up dropped out: beside a spinning process, 5 of 32 picks lost a third
    told |= {"manual": 1.3, "math": 1.0, "flash": 1.1}
    quiet = choose.timing.own_samples

    def own_samples(*args):
        held_up = torch.get_num_threads() > 1
        return [{1.3: 6.0, 1.0: 9.0, 1.1: 40.0}[ms] if held_up else ms for ms in quiet(*args)]

    monkeypatch.setattr(choose.timing, "own_samples", own_samples)
    switches = itertools.count(0, 1000)
    monkeypatch.setattr(choose.timing, "PREEMPTED", 100 if counted else math.inf)
    monkeypatch.setattr(choose.timing, "usage", lambda: (next(switches), 1.0))
    threads = torch.get_num_threads()
    name, trials = choose.fastest(TRAINING)
    assert name == "math" and torch.get_num_threads() == threads
    assert {trial["timed"] for trial in trials.values()} == {"calls on one thread, their median"}


def test_auto_takes_no_kernel_that_the_compiler_replaces(monkeypatch, told):
    # Inductor may rewrite hand-written attention into flash, and the run would end on its receipt
    told |= {"manual": 1.0, "math": 3.0, "flash": 2.0}
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
    _, trials = choose.fastest(Case(SHAPE, torch.device("cuda"), torch.bfloat16), compiled=True)
    assert made and set(made) == set(timed)
    assert any(trial["timed"] == "graph replay, cold L2" for trial in trials.values())


@pytest.mark.usefixtures("compiler")
def test_auto_compiles_on_a_cpu():
    _, trials = choose.fastest(TRAINING, compiled=True)
    assert all(trials[each]["median_ms"] > 0 for each in ("manual", "math", "flash")), trials
    assert "flex" in trials and trials["flex"]["refused"]
