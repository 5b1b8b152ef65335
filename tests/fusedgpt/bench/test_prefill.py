"""Time to first token: the models are the published ones, and each row is of the attention that it names."""

import functools
import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedgpt import rotary
from fusedgpt.attention import parity
from fusedgpt.bench import causal_models, prefill
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from fusedgpt.machine import determinism
from model import GPT
from tests.launch import ROOT

CPU = torch.device("cpu")
LLAMA = pytest.param("llama-small", marks=pytest.mark.slow)  # its parts are Mistral's


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    """Stand-ins with two layers and few ids, a small GPT, and no model kept from test to test."""
    for name, shape in causal_models.PUBLISHED.items():
        tiny = {"num_hidden_layers": 16, "intermediate_size": 1024, "vocab_size": 300}
        monkeypatch.setitem(causal_models.PUBLISHED, name, shape | tiny)
    monkeypatch.setitem(causal_models.GPT2, "gpt2", (2, 2, 64))
    yield
    causal_models._loaded.clear()


def settings(**changes):
    chosen = dict(models="mistral-small", lengths="48", repeats=2, warmup=1, dtype="float32", seed=1, profile=False)
    return prefill.Settings(**{**chosen, **changes})


def row(attention, model="mistral-small", T=48, device=CPU, **changes):
    return prefill.measure({"model": model, "attention": attention, "T": T}, settings(**changes), device, ROOT)


@pytest.fixture
def published(monkeypatch):
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("name", "parameters"), [("mistral-7b", 7_241_732_096), ("llama-3-8b", 8_030_261_248), ("phi-2", 2_779_683_840)]
)
def test_parameters_are_those_published(published, name, parameters):
    # transformers' default LlamaConfig is Llama 2, its PhiConfig Phi-1
    model = causal_models.TransformersModel(name, torch.device("meta"), torch.bfloat16).model
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "meta")}


@pytest.mark.parametrize("small", causal_models.STAND_INS)
def test_stand_ins_keep_head_size_and_grouping(published, small):
    def of(name):
        c = causal_models.config(name)
        return c.hidden_size // c.num_attention_heads, c.num_attention_heads // c.num_key_value_heads, c.rope_parameters

    assert of(small) == of(causal_models.STAND_INS[small])


def test_gpt_has_gpt2s_parameters(published):
    for name, parameters in (("gpt2", 124), ("gpt2-medium", 355), ("gpt2-large", 774), ("gpt2-xl", 1558)):
        model = causal_models.OurGPT.of_gpt2(name, torch.device("meta"), torch.bfloat16).model
        n = sum(p.numel() for p in model.parameters()) - 1024 * model.config.n_embd  # ours has 1024 positions more
        assert round(n / 1e6) == parameters


@pytest.mark.parametrize(
    ("device", "dtype", "difference"),
    [("cpu", "float32", 1e-5), pytest.param("cuda", "bfloat16", 0.05, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("model", ["mistral-small", LLAMA, "phi-small", "gpt2"])
def test_rows_of_a_model(model, device, dtype, difference):
    ours = [("ours, flash", "flash")] if model != "gpt2" else []
    for attention, seen in (("eager", "unfused"), ("flash", "flash"), *ours):
        found = row(attention, model, device=torch.device(device), dtype=dtype)
        assert found["kernel"]["forward"] == [seen]
        assert found["logits"] == "last position" and found["logits_differ"] < difference
        assert parity.passes(found["errors"], getattr(torch, dtype))
        assert (found["samples"], len(found["samples_ms"]), found["dtype"]) == (2, 2, dtype)
        assert found["parameters"] > 0 and ("peak_memory" in found) is (device == "cuda")
        assert (found["device_busy_ms"] is None) is (device == "cpu")
        json.dumps(found)


@pytest.mark.parametrize("name", ["mistral-small", LLAMA, pytest.param("phi-small", marks=pytest.mark.slow)])
def test_transformers_and_ours_use_one_copy_of_the_weights(name):
    # two models of 8B with weights of their own would not fit beside what a long prompt needs
    both = [causal_models.load(name, attention, 1, CPU, torch.float32).model for attention in ("eager", "ours, flash")]
    used = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for model in both for p in model.parameters()}
    assert isinstance(both[1], GPT) and not isinstance(both[0], GPT)
    assert sum(used.values()) == 4 * sum(p.numel() for p in both[0].parameters()) == 4 * both[1].config.num_params


@pytest.mark.parametrize(("part", "wrong"), [("rotate", lambda x, _: x), ("frequencies", lambda *_: torch.ones(64))])
def test_ours_that_computes_something_else_gets_no_time(monkeypatch, part, wrong):
    # with random weights as they are drawn, a model without positions would differ by less than bfloat16 rounds
    monkeypatch.setattr(rotary, part, wrong)
    monkeypatch.setattr(prefill.timing, "samples", lambda *_: pytest.fail("timed"))
    with pytest.raises(ParityError, match="two layers of llama-small have other logits here than in transformers"):
        row("ours, flash", "llama-small")


def test_logits_that_differ_from_eagers_get_no_time(monkeypatch):
    difference = prefill._difference
    monkeypatch.setattr(prefill, "_difference", lambda got, *rest: difference(1.001 * got, *rest))
    for attention in ("flash", "ours, flash"):
        with pytest.raises(ParityError, match=r"its logits differ from eager's by 1.0e-03, allowed 1e-04"):
            row(attention)


def test_a_model_does_not_change_the_attention_of_another():
    # a model keeps the config it is given: another one built from it changed the first one's attention
    one, other = (causal_models.TransformersModel("llama-small", CPU, torch.float32) for _ in range(2))
    other.use("flash")
    one.use("eager")
    assert other.model.config._attn_implementation == "sdpa"


def test_what_is_timed_is_the_attention_of_the_row(monkeypatch):
    # the comparison with eager, just before, leaves the model eager
    def samples(step, device, count, warmup):
        timed.append(prefill.observe(step)["forward"])
        return [1.0]

    timed = []
    monkeypatch.setattr(prefill.timing, "samples", samples)
    for model in ("llama-small", "gpt2"):
        for attention in ("eager", "flash", "eager"):
            row(attention, model)
    assert timed == [["unfused"], ["flash"], ["unfused"]] * 2


def test_logits_at_all_positions_are_seen(monkeypatch):
    # the share of the output layer: a version of transformers may compute logits that nobody asked for
    whole = causal_models.TransformersModel.generate
    monkeypatch.setattr(
        causal_models.TransformersModel, "generate", lambda self, idx: self.model(idx) and whole(self, idx)
    )
    assert row("eager")["logits"] == "all positions"


def unscaled(right, *args, **options):
    return right(*args, **options | {"scaling": 1.0})


def mixed(right, module, q, k, v, *args, **options):
    """Queries of a head meet another head's keys."""
    return right(module, q, k.flip(1), v.flip(1), *args, **options)


@pytest.mark.parametrize("wrong", [unscaled, mixed])
def test_a_row_that_fails_parity_has_no_time(monkeypatch, wrong):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as interfaces

    monkeypatch.setitem(interfaces._global_mapping, "sdpa", functools.partial(wrong, interfaces["sdpa"]))
    monkeypatch.setattr(prefill.timing, "samples", lambda *_: pytest.fail("timed"))
    with pytest.raises(ParityError, match="flash"):
        row("flash")


# SDPA falls back to math without a word; the other one is for GPUs only
@pytest.mark.parametrize(
    ("taken", "message"), [(SDPBackend.MATH, "saw math"), (SDPBackend.EFFICIENT_ATTENTION, "No viable backend")]
)
def test_flash_that_is_not_flash_is_refused(monkeypatch, taken, message):
    monkeypatch.setattr(causal_models, "sdpa_kernel", lambda _: sdpa_kernel(taken))
    with pytest.raises(UserError, match=message):
        row("flash")


def test_flash_is_measured_where_eager_has_no_room(monkeypatch):
    def full(self, attention, use=causal_models.TransformersModel.use):
        if attention == "eager":
            raise torch.OutOfMemoryError("no room")
        use(self, attention)

    monkeypatch.setattr(causal_models.TransformersModel, "use", full)
    assert row("flash")["logits_differ"] is None
    with pytest.raises(torch.OutOfMemoryError):
        row("eager")


@pytest.mark.parametrize(("model", "T"), [("gpt2", 2049), ("phi-small", 2049), ("mistral-small", 4097)])
def test_more_tokens_than_the_model_attends_to_are_refused(model, T):
    # a window that slides, or a prompt that is cropped, would be timed at fewer tokens than the row says
    with pytest.raises(UserError, match=f"{T} tokens are more"):
        row("flash", model, T)


def test_a_local_folder(tmp_path):
    model = causal_models.load("phi-small", "eager", 1, CPU, torch.float32).model
    model.save_pretrained(tmp_path)
    assert row("flash", str(tmp_path))["parameters"] == sum(p.numel() for p in model.parameters())
    with pytest.raises(UserError, match="cannot load"):
        row("flash", str(tmp_path / "none"))


def test_the_same_seed_draws_the_same_weights_and_one_model_is_kept():
    determinism.seed(5)
    weights = [
        causal_models.load(name, "eager", 1, CPU, torch.float32).model.state_dict()
        for name in ("phi-small", "gpt2", "phi-small")
    ]
    assert len(causal_models._loaded) == 1
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[2].values()))
    frequencies = causal_models.load("phi-small", "eager", 1, CPU, torch.float32).model.model.rotary_emb.inv_freq
    assert frequencies[0] == 1 and frequencies.size(0) == 16  # 0.4 of 80, in pairs: built on meta it would hold garbage


def test_plan(monkeypatch):
    monkeypatch.setattr(prefill.importlib.util, "find_spec", lambda name: None)
    rows = [tuple(spec.values()) for spec in prefill.plan(settings(models="phi-2,gpt2", lengths="512,1024"), CPU)]
    attentions = {"phi-2": ("eager", "flash", "ours, flash"), "gpt2": ("eager", "flash")}  # gpt2 is ours anyway
    assert rows == [(m, a, T) for m in attentions for T in (512, 1024) for a in attentions[m]]
    monkeypatch.setattr(prefill.importlib.util, "find_spec", lambda name: name == "flash_attn")
    attentions = [spec["attention"] for spec in prefill.plan(settings(models="phi-2,gpt2", lengths="512"), CPU)]
    assert attentions == ["eager", "flash", "flash_attention_2", "ours, flash", "eager", "flash"]


def test_a_package_that_cannot_run_here_is_a_refused_row():
    # transformers could take another implementation in its place
    with pytest.raises(UserError, match=r"[Ff]lash"):
        row("flash_attention_2")  # on a CPU it never can


def test_a_profile_is_written(tmp_path):
    spec = {"model": "gpt2", "attention": "flash", "T": 48}
    prefill.measure(spec, settings(profile=True), CPU, tmp_path)
    assert json.loads((tmp_path / "traces" / "gpt2-flash-48.json").read_text())


def test_the_table_has_the_devices_own_time():
    found = {"model": "gpt2", "attention": "flash", "T": 48, "status": "measured", **row("flash", "gpt2")}
    refused = {"model": "gpt2", "attention": "flash", "T": 96, "status": "refused"}
    head, _, *lines = prefill.table([found | {"device_busy_ms": 3.26, "peak_memory": 2**31}, refused])[:4]
    cells = [[cell.strip() for cell in line.split("|")] for line in (head, *lines)]
    for name, said in (("device busy, ms", ["3.3", ""]), ("peak memory", ["2.00 GiB", ""])):
        assert [line[cells[0].index(name)] for line in cells[1:]] == said


def test_the_title_is_the_finding_at_the_longest_prompt():
    def timed(model, attention, ms, T=64, **more):
        return dict(model=model, attention=attention, T=T, status="measured", median_ms=ms, p10_ms=ms, p90_ms=ms) | more

    def finding(*rows):
        return prefill.finding([timed("a", "eager", 1.0, 32), timed("a", "flash", 9.0, 32), *rows])

    eager, fast = timed("a", "eager", 100.0), timed("a", "flash", 50.0)
    assert finding(eager, fast) == "At 64 tokens flash is 2 times as fast as eager"
    others = timed("b", "eager", 100.0), timed("b", "flash", 40.0)
    assert finding(eager, fast, *others) == "At 64 tokens flash is 2 to 2.5 times as fast as eager, most in b"
    assert finding(eager, timed("a", "flash", 220.0)) == "At 64 tokens flash takes 2.2 times as long as eager"
    noisy = timed("a", "flash", 98.0, p90_ms=101.0)
    assert finding(eager, noisy) == "At 64 tokens flash shows no difference from eager beyond the noise"
    for rows in ([eager], [fast], [eager | {"disturbed": True}, fast]):
        assert finding(*rows) == "At 32 tokens flash takes 9 times as long as eager"
        assert prefill.finding(rows) == "Time to the first token: no ratio of flash to eager"


def test_ours_is_compared_with_the_fastest_of_transformers():
    def timed(attention, ms, T=64, **more):
        return dict(model="a", attention=attention, T=T, status="measured", median_ms=ms, p10_ms=ms, p90_ms=ms) | more

    rows = [timed("eager", 100.0), timed("flash", 50.0), timed("flash_attention_2", 40.0), timed("ours, flash", 32.0)]
    said = "our GPT is 1.25 times as fast as transformers' fastest"
    assert prefill.finding(rows) == f"At 64 tokens flash is 2 times as fast as eager; {said}"
    assert list(prefill.beside_ours(rows)) == [f"At 64 tokens {said}"]
    (claim,) = (claim for claim in prefill.claims(rows) if "our GPT" in claim.name)
    assert claim.value == pytest.approx(1.25)
    assert list(prefill.beside_ours([*rows[:3], rows[3] | {"disturbed": True}])) == []
    assert list(prefill.beside_ours(rows[3:])) == []
    # the fastest was disturbed and left out, and ours was 1.56 times as fast as "transformers' fastest"
    loud = [*rows[:2], rows[2] | {"disturbed": True, "reason": "loud"}, rows[3]]
    assert list(prefill.beside_ours(loud)) == [] and not [c for c in prefill.claims(loud) if "our GPT" in c.name]
    refused = [*rows[:2], dict(rows[2], status="refused", reason="GPUs only"), rows[3]]
    assert list(prefill.beside_ours(refused)) == ["At 64 tokens our GPT is 1.56 times as fast as transformers' fastest"]
