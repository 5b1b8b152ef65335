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


def test_a_step_is_timed_on_as_much_of_the_batch_as_takes_little(model, monkeypatch):
    # a step of GPT-2 124M takes seconds in float32
    taking(monkeypatch, bfloat16=1.0, float32=2.0)
    monkeypatch.setattr(tuning, "LEAST_TOKENS", 1)
    shapes = []
    model.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    for flops in (1e15, 3 * 16 * model.config.flops_per_token, 5 * model.config.flops_per_token):
        monkeypatch.setattr(tuning, "ENOUGH_FLOPS", flops)
        settle(model)
    assert [*dict.fromkeys(map(tuple, shapes))] == [(4, 16), (3, 16), (1, 5)]


FORWARD = Case((4, 2, 16, 16), CPU, torch.bfloat16, backward=False)


def test_ranks_that_share_a_model_have_no_weights_to_time_with(model):
    shared = settle(model.to("meta"), attention="auto")
    assert (shared.dtype, shared.dtype_trials) == (torch.bfloat16, {})


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
    monkeypatch.setattr(torch, "compile", lambda function: lambda x: x)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    assert device_module.resolve_compile("auto", torch.device(device)) == (device == "cuda", "")


def test_attention_is_chosen_for_each_dtype(model, monkeypatch):
    # flash is the fastest in float32 and the slowest in bfloat16 on short sequences of a CPU
    taking(monkeypatch, bfloat16=2.0, float32=1.0)
    picks = {torch.bfloat16: ("manual", {}), torch.float32: ("flash", {"flash": {}})}
    monkeypatch.setattr(tuning.choose, "choose", lambda name, case, **_: picks[case.dtype])
    chosen = settle(model, attention="auto")
    assert (chosen.attention, chosen.attention_trials) == ("flash", {"flash": {}})


def test_a_kernel_that_was_named_must_run_compiled_if_the_run_is_compiled(model, monkeypatch):
    # flex cannot run compiled on a CPU: `auto` knew that, a named kernel was not checked
    asked = []
    monkeypatch.setattr(
        tuning.choose, "choose", lambda *_, compiled=False, **__: asked.append(compiled) or ("math", {})
    )
    monkeypatch.setattr(tuning, "resolve_compile", lambda wish, device: (wish is True, ""))
    settle(model, attention="math", dtype="bfloat16", compile=True)
    assert asked == [True]


def test_a_kernel_must_run_the_attention_of_every_layer(model, monkeypatch):
    # only the first layer's was looked at: a kernel without windows ended such a run in its first step
    asked = []

    def choose(name, *cases, **_):
        asked.append([(case.window, case.dtype) for case in cases])
        return "manual", {}

    monkeypatch.setattr(tuning.choose, "choose", choose)
    config = GPTConfig(block_size=16, n_layer=3, n_head=2, n_embd=32, window=4, window_pattern="LLS")
    cases = Case.of_layers(config, 4, CPU, torch.bfloat16)
    batch = (torch.zeros(4, 16, dtype=torch.long), torch.ones(4, 16, dtype=torch.long))
    s = SimpleNamespace(attention="auto", dtype="float32", compile=False, deterministic=False)
    tuning.settle(s, model, cases, batch, None)
    assert asked == [[(None, torch.float32), (4, torch.float32)]]
