"""Anatomy: the output layer's parity before its time, and a step's time, of which nothing counts twice."""

import time
import types
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.nn import functional as F

from fusedgpt.bench import anatomy
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from fusedgpt.machine.profiler import profile
from tests.fusedgpt.bench.small import run, settings

CPU = torch.device("cpu")


def test_anatomy_to_its_report(tmp_path, data):
    rows = run("anatomy", tmp_path, data)
    assert {row["status"] for row in rows} == {"measured"}
    output = {(row["pass"], row["V"]): row for row in rows if row["part"] == "output layer"}
    assert output.keys() == {(way, V) for way in (anatomy.FORWARD, anatomy.BOTH) for V in (65, 128)}
    assert output[anatomy.BOTH, 128]["errors"].keys() == {"z", "dx", "dw", "beside unpadded"}
    steps = {row["attention"]: row for row in rows if row["part"] == "step"}
    assert {name: row["kernel"]["forward"] for name, row in steps.items()} == {
        "manual": ["unfused"],
        "flash": ["flash"],
    }
    for name, row in steps.items():
        each = torch.tensor([row["ms"][category] for category in anatomy.CATEGORIES])
        assert each.sum(dim=0).tolist() == pytest.approx(row["samples_ms"]) and len(row["samples_ms"]) == 2
        assert bool(each[1].sum()) is (name == "flash") and each[[0, 2, 3]].min() > 0
    folder = tmp_path / "results" / "anatomy"
    text = (folder / "report.md").read_text()
    assert "| float32 | forward + backward | 128 |" in text and "| manual (float32) |" in text
    assert (folder / "output_layer.png").exists() and (folder / "step.png").exists()


def multiplied(x, w, dz=None):
    """The three products, written out."""
    return (x @ w.T,) if dz is None else (x @ w.T, dz @ w, dz.T @ x)


def wrong(which, at):
    """`multiplied`, of which one number is wrong."""

    def products(x, w, dz=None):
        found = multiplied(x, w, dz)
        found[which][at] += 1.0
        return found

    return products


@pytest.mark.parametrize(("which", "at"), [(0, (-1, -1)), (0, (0, 0)), (1, (-1, -1)), (2, (0, -1)), (2, (-1, -1))])
def test_a_wrong_product_gets_no_time(tmp_path, data, monkeypatch, which, at):
    s, spec = settings("anatomy", tmp_path, data), {"part": "output layer", "dtype": "float32", "V": 65}
    monkeypatch.setattr(anatomy, "products", multiplied)
    assert anatomy.measure({**spec, "pass": anatomy.BOTH}, s, CPU, tmp_path)["median_ms"] > 0
    monkeypatch.setattr(anatomy, "products", wrong(which, at))
    with pytest.raises(ParityError, match=r"in 16 rows of each result, allowed 2e-05$"):
        anatomy.measure({**spec, "pass": anatomy.BOTH}, s, CPU, tmp_path)


def test_padding_that_changes_a_logit_gets_no_time(tmp_path, data, monkeypatch):
    # in a row that is not among those compared with float64
    def products(x, w, dz=None):
        z = x @ w.T
        z[1, 5] += len(w) - 65
        return (z,)

    monkeypatch.setattr(anatomy, "products", products)
    s, spec = settings("anatomy", tmp_path, data), {"part": "output layer", "dtype": "float32", "pass": anatomy.FORWARD}
    anatomy.measure({**spec, "V": 65}, s, CPU, tmp_path)
    with pytest.raises(ParityError):
        anatomy.measure({**spec, "V": 128}, s, CPU, tmp_path)


def test_nothing_counts_twice():
    # F.linear calls aten::linear, that aten::matmul, that aten::mm: with what they call, each has the product's time
    x, seconds = torch.randn(512, 512), []

    def step():
        began = time.perf_counter()
        for _ in range(20):
            F.linear(x.expand(4, 512, 512), x).softmax(dim=-1)
        seconds.append(time.perf_counter() - began)

    step()
    profiled = profile(step)
    operators, wall = anatomy.self_ms(profiled, CPU), 1e3 * seconds[-1]
    assert sum(event.cpu_time_total / 1e3 for event in profiled.key_averages()) > 1.5 * wall
    assert 0.5 * wall < sum(operators.values()) <= 1.001 * wall
    assert sum(anatomy.by_category(operators).values()) == pytest.approx(sum(operators.values()))


def adamw():
    p = torch.nn.Parameter(torch.zeros(2**20))
    p.grad = torch.ones_like(p)
    return torch.optim.AdamW([p], fused=True).step


WITH_GRADIENT = torch.randn(256, 1024).requires_grad_()
HEADS = torch.randn(1, 4, 512, 64).requires_grad_()
DOES = {
    anatomy.PRODUCTS: [lambda: (WITH_GRADIENT @ WITH_GRADIENT.T @ WITH_GRADIENT).backward(WITH_GRADIENT)],
    anatomy.ATTENTION: [
        lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, is_causal=True).backward(HEADS.detach())
    ],
    anatomy.MEMORY: [
        lambda: F.layer_norm(WITH_GRADIENT, (1024,)).backward(WITH_GRADIENT),
        lambda: F.gelu(WITH_GRADIENT, approximate="tanh").backward(WITH_GRADIENT),
        lambda: WITH_GRADIENT.softmax(dim=-1).backward(WITH_GRADIENT),
        lambda: F.cross_entropy(WITH_GRADIENT, torch.zeros(256, dtype=torch.long)).backward(),
        lambda: F.embedding(torch.zeros(256, dtype=torch.long), WITH_GRADIENT).backward(WITH_GRADIENT),
        lambda: WITH_GRADIENT.bfloat16().float(),
    ],
    anatomy.OPTIMIZER: [adamw(), lambda: torch.nn.utils.get_total_norm([WITH_GRADIENT.detach()] * 4)],
    anatomy.OTHER: [WITH_GRADIENT.sort],
}


@pytest.mark.parametrize(("category", "does"), [(c, does) for c, each in DOES.items() for does in each])
def test_an_operator_is_in_the_category_of_what_it_does(category, does):
    does()
    each = [anatomy.by_category(anatomy.self_ms(profile(does), CPU)) for _ in range(5)]
    ms = {name: min(found[name] for found in each) for name in each[0]}  # a suspended process adds to any of them
    assert max(ms, key=ms.get) == category, ms


def test_on_a_gpu_the_time_is_the_devices_and_what_no_operator_launched_is_other(monkeypatch):
    # a kernel is an event of its own beside the operator that launched it: with both, all would count twice
    def event(key, device, cpu, gpu):
        return types.SimpleNamespace(
            key=key, device_type=device, self_cpu_time_total=1e3 * cpu, self_device_time_total=1e3 * gpu
        )

    events = [event("aten::mm", DeviceType.CPU, 50, 6), event("nvjet_tst_128x256", DeviceType.CUDA, 0, 6)]
    events += [event("aten::gelu", DeviceType.CPU, 9, 2), event("void elementwise", DeviceType.CUDA, 0, 2)]
    profiled = mock.create_autospec(torch.autograd.profiler.profile, instance=True)
    profiled.key_averages.return_value = events
    monkeypatch.setattr(anatomy, "busy_ms", lambda profiled: 9.0)
    found = anatomy.by_category(anatomy.self_ms(profiled, torch.device("cuda")))
    assert found == {**dict.fromkeys(anatomy.CATEGORIES, 0), anatomy.PRODUCTS: 6, anatomy.MEMORY: 2, anatomy.OTHER: 1}
    monkeypatch.setattr(anatomy, "busy_ms", lambda profiled: None)
    with pytest.raises(UserError, match="saw no kernel on this GPU"):
        anatomy.self_ms(profiled, torch.device("cuda"))


def of_step(products, attention, memory, optimizer):
    ms = dict(zip(anatomy.CATEGORIES, ([x] * 3 for x in (products, attention, memory, optimizer, 0.0))))
    return dict(part="step", attention="manual", status="measured", ms=ms, largest_other={}, ran={"dtype": "bfloat16"})


def test_the_share_of_products_is_that_of_forward_and_backward():
    # as the article's 61 % and 39 % are counted: the optimizer is no part of them
    row = of_step(61.0, 9.0, 30.0, 100.0) | dict(median_ms=200.0, p10_ms=200.0, p90_ms=200.0)
    (claim,) = anatomy.claims([row])
    assert (claim.value, claim.low, claim.high) == pytest.approx((61 / 39,) * 3)
    line = anatomy.table([row])[-4]
    assert line.startswith("| manual (bfloat16) | 200.0 (200.0-200.0) | 30.5 % | 4.5 % | 15.0 % | 50.0 % | 0.0 %")
    assert line.endswith("| 61.0 % (61.0-61.0) |")


def test_padding_is_compared_in_the_same_dtype_and_direction():
    forward = {("float32", 65): 8.0, ("float32", 128): 4.0, ("bfloat16", 65): 3.0, ("bfloat16", 128): 2.0}
    rows = [
        dict(part="output layer", dtype=dtype, V=V, status="measured")
        | {"pass": way, **dict.fromkeys(("median_ms", "p10_ms", "p90_ms"), ms + 90.0 * (way == anatomy.BOTH))}
        for way in (anatomy.BOTH, anatomy.FORWARD)
        for (dtype, V), ms in forward.items()
    ]
    assert [claim.value for claim in anatomy.claims(rows)] == [98 / 94, 93 / 92, 2.0, 1.5]


def test_a_vocabulary_that_needs_no_padding_has_one_row_of_each(tmp_path, data):
    s = settings("anatomy", tmp_path, data, vocab_size=128)
    assert [spec["V"] for spec in anatomy.plan(s, CPU) if spec["part"] == "output layer"] == [128, 128]


def test_a_device_without_times_of_operators_is_refused(tmp_path, data):
    s, spec = settings("anatomy", tmp_path, data), {"part": "step", "attention": "manual"}
    with pytest.raises(UserError, match="no times of operators on mps: set --device=cpu"):
        anatomy.measure(spec, s, torch.device("mps"), tmp_path)


def test_the_titles_say_what_padding_gains_and_where_the_time_goes():
    def product(V, ms, dtype="float32", **more):
        found = {"part": "output layer", "dtype": dtype, "pass": "forward", "V": V, "status": "measured"}
        return found | {"median_ms": ms, "p10_ms": ms, "p90_ms": ms} | more

    def title(*rows):
        return next(anatomy.figures(list(rows), vars(anatomy.Settings())))[1]

    said, plain = "The padded output layer alone ", product(65, 100.0)
    assert title(plain, product(128, 50.0)) == said + "is 2 times as fast as the unpadded one"
    assert title(plain, product(128, 220.0)) == said + "takes 2.2 times as long as the unpadded one"
    assert (
        title(plain, product(128, 99.0, p90_ms=101.0))
        == said + "shows no difference from the unpadded one beyond the noise"
    )
    assert title(plain) == title(plain, product(128, 50.0, disturbed=True)) == said + "was not compared"
    failed = {"part": "output layer", "dtype": "float32", "pass": "forward", "V": 128} | dict(
        status="failed", reason="?"
    )
    assert title(plain, failed) == said + "was not compared"
    spent = {name: [0.0] for name in anatomy.CATEGORIES} | {anatomy.PRODUCTS: [3.0], anatomy.MEMORY: [1.0]}
    step = {"part": "step", "attention": "manual", "status": "measured", "ms": spent, "ran": {"dtype": "float32"}}
    assert title(step) == "Matrix products take 75 % with manual of a training step"
