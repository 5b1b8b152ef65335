"""What `auto` chooses for a run."""

from types import SimpleNamespace

import pytest
import torch

from fusedgpt.attention.case import Case
from fusedgpt.machine import device as device_module
from fusedgpt.training import tuning
from model import GPT, GPTConfig

CPU = torch.device("cpu")
CASE = Case((4, 2, 16, 16), CPU, torch.bfloat16)


@pytest.fixture
def model():
    return GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=1, n_head=2, n_embd=32))


@pytest.fixture(autouse=True)
def _a_cpu_with_bfloat16(monkeypatch):
    monkeypatch.setattr(tuning, "resolve_dtype", lambda name, device: getattr(torch, name.replace("auto", "bfloat16")))


def settle(model, before=None, case=CASE, rows=4, **settings):
    batch = (torch.zeros(rows, 16, dtype=torch.long), torch.ones(rows, 16, dtype=torch.long))
    rest = dict(attention="manual", dtype="auto", compile=False, deterministic=False)
    s = SimpleNamespace(**rest | settings)
    return tuning.settle(s, model, [case], batch, before)


def taking(monkeypatch, **ms):
    """Let a step take `ms` by the dtype of its products. Returns the dtypes of the steps that are made."""
    steps = []

    def autocast(device, dtype):
        steps.append(dtype)
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def make(self, count):
        self.step()
        return [ms[str(steps[-1]).removeprefix("torch.")]] * count

    monkeypatch.setattr(tuning, "autocast", autocast)
    monkeypatch.setattr(tuning.timing.Steps, "make", make)
    monkeypatch.setattr(tuning, "SECONDS", 0.0)
    return steps


@pytest.mark.parametrize("quick", ["bfloat16", "float32"])
def test_the_dtype_is_the_one_whose_step_is_quicker(model, monkeypatch, quick):
    # bfloat16 was taken if the CPU multiplies it: on one kind of CPU a small model then trained no faster than nanoGPT
    before = {name: p.clone() for name, p in model.named_parameters()}
    steps = taking(monkeypatch, **{"bfloat16": 2.0, "float32": 2.0, quick: 1.0})
    chosen = settle(model)
    assert chosen.dtype == getattr(torch, quick) and chosen.dtype_trials[quick] == 1.0
    pairs = [set(steps[n : n + 2]) for n in range(0, len(steps), 2)]
    assert pairs == [{torch.bfloat16, torch.float32}] * len(pairs)  # in turns
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())


FORWARD = Case((4, 2, 16, 16), CPU, torch.bfloat16, backward=False)


BEFORE = {"attention": "math", "dtype": "float32", "compile": False}
OPEN = dict(attention="auto", compile="auto")


@pytest.mark.parametrize(
    ("settings", "attention", "dtype"),
    [
        (dict(dtype="float32"), "manual", torch.float32),
        (dict(before={}), "manual", torch.bfloat16),
        (dict(case=FORWARD), "manual", torch.bfloat16),
        (dict(OPEN, before=BEFORE), "math", torch.float32),  # a resumed run keeps what it had
        # two runs of one command must give the same bytes, but timing may choose differently in the second
        (dict(OPEN, deterministic=True), "sdpa", torch.bfloat16),
    ],
)
def test_what_is_named_resumed_evaluated_or_deterministic_is_not_timed(model, monkeypatch, settings, attention, dtype):
    monkeypatch.delattr(tuning.turns, "race")
    chosen = settle(model, **settings)
    assert (chosen.attention, chosen.dtype, chosen.compiled) == (attention, dtype, False)
    assert chosen.dtype_trials == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_compiles_on_a_gpu_and_not_on_a_cpu(monkeypatch, device):
    # a CPU weighed cost against gain, and most runs of minutes gained nothing
    monkeypatch.setattr(device_module, "why_no_compiler", lambda device: None)
    assert device_module.resolve_compile("auto", torch.device(device)) == (device == "cuda", "")


def test_attention_is_chosen_for_each_dtype(model, monkeypatch):
    # flash is the fastest in float32 and the slowest in bfloat16 on short sequences of a CPU
    taking(monkeypatch, bfloat16=2.0, float32=1.0)
    picks = {torch.bfloat16: ("manual", {}), torch.float32: ("flash", {"flash": {}})}
    monkeypatch.setattr(tuning.choose, "choose", lambda name, case, **_: picks[case.dtype])
    chosen = settle(model, attention="auto")
    assert (chosen.attention, chosen.attention_trials) == ("flash", {"flash": {}})
