"""Time to first token: the models are the published ones, and each row is of the attention that it names."""

import functools
import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedgpt import rotary
from fusedgpt.attention import parity
from fusedgpt.bench import foreign, prefill
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from fusedgpt.machine import determinism
from model import GPT
from tests.fusedgpt.bench.small import run

CPU = torch.device("cpu")
LLAMA = pytest.param("llama-small", marks=pytest.mark.slow)  # its parts are Mistral's


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    """Stand-ins with two layers and few ids, a small GPT, and no model kept from test to test."""
    for name, shape in foreign.PUBLISHED.items():
        tiny = {"num_hidden_layers": 16, "intermediate_size": 1024, "vocab_size": 300}
        if name in foreign.GPT2:
            tiny = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 300}
        monkeypatch.setitem(foreign.PUBLISHED, name, shape | tiny)
    yield
    foreign._loaded.clear()


def settings(**changes):
    return prefill.Settings(**dict(models="mistral-small", lengths="48", dtype="float32", seed=1) | changes)


def build(attention, model="mistral-small", T=48, device=CPU, **changes):
    """(the turn, what was found out) of an attention in a model."""
    return prefill.build({"model": model, "T": T}, attention, settings(**changes), device)


def found(*args, **options):
    return build(*args, **options)[1]


@pytest.fixture
def published(monkeypatch):
    monkeypatch.undo()


PARAMETERS = {"mistral-7b": 7_241_732_096, "llama-3-8b": 8_030_261_248, "phi-2": 2_779_683_840}
PARAMETERS |= {"gpt2": 124_439_808 + 1024 * 768, "gpt2-xl": 1_557_611_200 + 1024 * 1600}  # with 1024 positions more


def test_parameters_are_those_published(published):
    # transformers' default LlamaConfig is Llama 2, its PhiConfig Phi-1
    for name, parameters in PARAMETERS.items():
        model = foreign._theirs(name, torch.device("meta"), torch.bfloat16).model
        assert sum(p.numel() for p in model.parameters()) == parameters
        assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "meta")}


def test_stand_ins_keep_head_size_and_grouping(published):
    def workload(name):
        c = foreign.config(name)
        return c.hidden_size // c.num_attention_heads, c.num_attention_heads // c.num_key_value_heads, c.rope_parameters

    for small, whole in foreign.STAND_INS.items():
        assert workload(small) == workload(whole)


@pytest.mark.parametrize(
    ("device", "dtype", "difference"),
    [("cpu", "float32", 1e-5), pytest.param("cuda", "bfloat16", 0.05, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("model", ["mistral-small", LLAMA, "phi-small", "gpt2"])
def test_contenders_of_a_model(model, device, dtype, difference):
    for attention, seen in (("eager", "unfused"), ("flash", "flash"), ("ours, flash", "flash")):
        turn, line = build(attention, model, device=torch.device(device), dtype=dtype)
        assert line["kernel"]["forward"] == [seen] and len(turn(0.0)) == 1
        assert line["logits_differ"] < difference
        assert parity.passes(line["errors"], getattr(torch, dtype))
        assert line["dtype"] == dtype
        json.dumps(line)


@pytest.mark.parametrize("name", ["mistral-small", LLAMA, pytest.param("phi-small", marks=pytest.mark.slow)])
def test_transformers_and_ours_use_one_copy_of_the_weights(name):
    # two models of 8B with weights of their own would not fit beside what a long prompt needs
    both = [foreign.load(name, attention, 1, CPU, torch.float32).model for attention in ("eager", "ours, flash")]
    used = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for model in both for p in model.parameters()}
    assert isinstance(both[1], GPT) and not isinstance(both[0], GPT)
    assert sum(used.values()) == 4 * sum(p.numel() for p in both[0].parameters()) == 4 * both[1].config.num_params


@pytest.mark.parametrize(("part", "wrong"), [("rotate", lambda x, _: x), ("frequencies", lambda *_: torch.ones(64))])
def test_ours_that_computes_something_else_gets_no_time(monkeypatch, part, wrong):
    # with random weights as they are drawn, a model without positions would differ by less than bfloat16 rounds
    monkeypatch.setattr(rotary, part, wrong)
    monkeypatch.setattr(prefill.timing, "Steps", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ParityError, match="two layers of llama-small have other logits here than in transformers"):
        found("ours, flash", "llama-small")


def test_logits_that_differ_from_eagers_get_no_time(monkeypatch):
    difference = prefill._difference
    monkeypatch.setattr(prefill, "_difference", lambda got, *rest: difference(1.001 * got, *rest))
    for attention in ("flash", "ours, flash"):
        with pytest.raises(ParityError, match=r"its logits differ from eager's by 1.0e-03, allowed 1e-04"):
            found(attention)


def test_each_turn_is_of_the_attention_of_its_contender():
    # all of a model share it: whoever had the turn before leaves another attention
    turns = {attention: build(attention, "llama-small")[0] for attention in ("eager", "flash")}
    for attention, seen in (("flash", "flash"), ("eager", "unfused"), ("flash", "flash")):
        assert prefill.observe(lambda turn=turns[attention]: turn(0.0))["forward"] == [seen]


def unscaled(right, *args, **options):
    return right(*args, **options | {"scaling": 1.0})


def mixed(right, module, q, k, v, *args, **options):
    """Queries of a head meet another head's keys."""
    return right(module, q, k.flip(1), v.flip(1), *args, **options)


@pytest.mark.parametrize("wrong", [unscaled, mixed])
def test_a_row_that_fails_parity_has_no_time(monkeypatch, wrong):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as interfaces

    monkeypatch.setitem(interfaces._global_mapping, "sdpa", functools.partial(wrong, interfaces["sdpa"]))
    monkeypatch.setattr(prefill.timing, "Steps", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ParityError, match="flash"):
        found("flash")


# SDPA falls back to math without a word; the other one is for GPUs only
@pytest.mark.parametrize(
    ("taken", "message"), [(SDPBackend.MATH, "saw math"), (SDPBackend.EFFICIENT_ATTENTION, "No viable backend")]
)
def test_flash_that_is_not_flash_is_refused(monkeypatch, taken, message):
    monkeypatch.setattr(foreign, "sdpa_kernel", lambda _: sdpa_kernel(taken))
    with pytest.raises(UserError, match=message):
        found("flash")


@pytest.mark.parametrize(("model", "T"), [("gpt2", 2049), ("phi-small", 2049), ("mistral-small", 4097)])
def test_more_tokens_than_the_model_attends_to_are_refused(model, T):
    # a window that slides, or a prompt that is cropped, would be timed at fewer tokens than the row says
    with pytest.raises(UserError, match=f"{T} tokens are more"):
        found("flash", model, T)


def test_the_same_seed_draws_the_same_weights_and_one_model_is_kept():
    determinism.seed(5)
    weights = [
        foreign.load(name, "eager", 1, CPU, torch.float32).model.state_dict()
        for name in ("phi-small", "gpt2", "phi-small")
    ]
    assert len(foreign._loaded) == 1
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[2].values()))
    frequencies = foreign.load("phi-small", "eager", 1, CPU, torch.float32).model.model.rotary_emb.inv_freq
    assert frequencies[0] == 1 and frequencies.size(0) == 16  # 0.4 of 80, in pairs: built on meta it would hold garbage


def test_prefill_to_its_report(tmp_path, data):
    with pytest.raises(UserError, match="models='phi-3' has 'phi-3': it can have mistral-7b, llama-3-8b, phi-2, gpt2"):
        prefill.comparisons(settings(models="phi-3"), CPU)
    results = run("prefill", tmp_path, data, models="mistral-small", lengths="32,48", dtype="float32")
    assert all(each.measured.keys() == {"eager", "flash", "ours, flash"} for each in results)
    text = (tmp_path / "results" / "prefill" / "report.md").read_text()
    assert "## mistral-small" in text and "| tokens | eager | flash | ours, flash |" in text
    assert "- **At 48 tokens flash " in text
