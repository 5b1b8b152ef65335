"""Each family against transformers: logits, gradients, and back to the same bytes."""

import json

import pytest
import torch

from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError
from fusedgpt.interchange import families, hf_config
from fusedgpt.interchange.pretrained import to_transformers
from model import GPT
from tests.conftest import assert_same_bytes, hugging_face

V, CONTEXT = 101, 32
SIZES = dict(vocab_size=V, max_position_embeddings=CONTEXT, num_hidden_layers=3, hidden_size=64, intermediate_size=96)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2)
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 24, "rope_theta": 500.0}
ODD = SIZES | dict(hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=40)
GPT2 = dict(vocab_size=V, n_positions=CONTEXT, n_layer=3, n_embd=64, n_head=4)
WINDOWS = dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)
MODELS = {  # by name: the family, and its config
    "gpt2": ("gpt2", GPT2),
    "gpt2, other sizes": ("gpt2", GPT2 | dict(n_inner=80, layer_norm_epsilon=1e-3, tie_word_embeddings=False)),
    "gpt2, exact": ("gpt2", GPT2 | dict(activation_function="gelu")),
    "gpt2, another name": ("gpt2", GPT2 | dict(activation_function="gelu_pytorch_tanh")),
    "llama": ("llama", SIZES),
    "llama, all heads": ("llama", SIZES | dict(num_key_value_heads=4, intermediate_size=256)),
    "llama, scaled": ("llama", SIZES | dict(rope_parameters=SCALED, tie_word_embeddings=True)),
    "llama, odd": ("llama", ODD | dict(attention_bias=True, mlp_bias=True, rms_norm_eps=1e-4)),
    "mistral": ("mistral", SIZES | dict(sliding_window=6)),
    "mistral, odd": ("mistral", ODD | dict(sliding_window=6, num_attention_heads=5, num_key_value_heads=5)),
    "qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True)),
    "qwen2, odd": ("qwen2", ODD | WINDOWS),
    "qwen3": ("qwen3", SIZES | dict(head_dim=32, tie_word_embeddings=True)),
    "qwen3, odd": ("qwen3", ODD | WINDOWS | dict(attention_bias=True)),
    "phi": ("phi", SIZES),
    "phi, odd": ("phi", SIZES | dict(hidden_size=120, num_attention_heads=3, num_key_value_heads=1, hidden_act="gelu")),
    "phi, normed": ("phi", SIZES | dict(qk_layernorm=True, partial_rotary_factor=0.4, tie_word_embeddings=True)),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """Their model, ours with a padded vocabulary, the family, and the folder."""
    family, shape = MODELS[request.param]
    folder = tmp_path_factory.mktemp("theirs")
    theirs = hugging_face(folder, family, **shape)
    return theirs, GPT.from_pretrained(folder, {"vocab_multiple": 64}).eval(), family, folder


def test_logits_and_gradients_equal_those_of_transformers(pair):
    theirs, ours, family, _ = pair
    idx = torch.randint(0, V, (2, 30), generator=torch.Generator().manual_seed(1))
    logits, loss = ours(idx[:, :-1], idx[:, 1:])
    want = theirs(idx, labels=idx)
    torch.testing.assert_close(logits[..., :V], want.logits[:, :-1], rtol=1e-5, atol=1e-5)
    for model, found in ((theirs, want.loss), (ours, loss)):
        model.zero_grad()
        found.backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    for name, place in families.places(ours.config, family).items():
        found = place.theirs(gradients[place.ours])
        torch.testing.assert_close(found, theirs.get_parameter(name).grad, rtol=1e-5, atol=1e-5, msg=name)


def test_attention_weights_equal_those_of_transformers(pair):
    theirs, ours, *_ = pair
    idx = torch.randint(0, V, (1, 20), generator=torch.Generator().manual_seed(1))
    before, want = ours(idx)[0], torch.cat(theirs(idx, output_attentions=True).attentions)
    torch.testing.assert_close(ours.attention_weights(idx), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours(idx)[0], before)  # with its own kernel again


def test_an_export_is_the_same_model_to_the_bit(pair, tmp_path):
    # back into transformers, and from there into a GPT again
    from transformers import AutoModelForCausalLM

    theirs, ours, family, folder = pair
    to_transformers(ours.config, ours.state_dict()).save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert back.config.model_type == family
    assert_same_bytes(back.state_dict(), theirs.state_dict())
    again = GPT.from_pretrained(tmp_path, {"vocab_multiple": 64})
    assert again.config == ours.config
    assert_same_bytes(again.state_dict(), ours.state_dict())
    assert again.config == GPT.from_pretrained(folder, {"vocab_multiple": 64}).config


def content_of(name="llama", **changes):
    """A config.json as transformers 4 wrote it, with `changes`; those that are `...` are not in it."""
    common = dict(model_type=name, torch_dtype="bfloat16", transformers_version="4.31.0", use_cache=True)
    found = common | (GPT2 if name == "gpt2" else SIZES | {"hidden_act": "gelu_new" if name == "phi" else "silu"})
    return {key: value for key, value in (found | changes).items() if value is not ...}


def test_a_config_of_before_transformers_5_is_read():
    # rope_theta beside rope_scaling, and what a version did not have yet is not there
    old = {key: value for key, value in SCALED.items() if key not in ("rope_theta", "rope_type")} | {"type": "llama3"}
    config = families.read(content_of(rope_theta=500, rope_scaling=old, num_key_value_heads=..., rms_norm_eps=1e-5))[1]
    assert (config.rope_theta, config.rope_scaling, config.rope_context, config.norm_eps) == (500.0, 8.0, 24, 1e-5)
    assert (config.n_kv_head, config.head_size, config.tie_embeddings, config.n_inner) == (None, None, False, 96)
    assert families.read(content_of("phi", partial_rotary_factor=0.25))[1].rope_fraction == 0.25
    assert families.read(content_of("mistral"))[1].window == 4096  # as transformers takes it
    assert families.read(content_of("mistral", sliding_window=None))[1].window is None
    assert families.read({"model_type": "gpt2"})[1] == GPTConfig(vocab_size=50257)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_of_qwen(name):
    # Qwen2 names a window that no layer uses; older configs count the layers before the first with one
    usual = dict(sliding_window=8, max_window_layers=2, head_dim=16)
    assert families.read(content_of(name, use_sliding_window=False, **usual))[1].windows == [None] * 3
    config = families.read(content_of(name, use_sliding_window=True, **usual))[1]
    assert config.windows == [None, None, 8] and config.window_pattern == "LLS"
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = families.read(content_of(name, use_sliding_window=True, layer_types=kinds, **usual))[1]
    assert config.windows == [8, None, 8]
    assert families.content(config, name)["layer_types"] == kinds


REFUSED = {  # by what is said: what is not as it should be
    "it has model_type='mixtral', which can be gpt2, llama, mistral, qwen2, qwen3, phi": dict(model_type="mixtral"),
    "has quantization_config={'bits': 4}, quantized weights": dict(quantization_config={"bits": 4}),
    "'mine.Model'}, code of its own, which is never run": dict(auto_map={"AutoModelForCausalLM": "mine.Model"}),
    "it has rope_type='yarn' and not 'default' or 'llama3'": dict(rope_scaling={"type": "yarn", "factor": 2.0}),
    "it has low_freq_factor=2.0 and not 1": dict(rope_scaling=SCALED | {"low_freq_factor": 2.0}),
    "it has partial_rotary_factor=0.5 and not None or 1.0": dict(partial_rotary_factor=0.5),
    "has attention_chunk_size=8, which is not computed here": dict(attention_chunk_size=8),
    "has sliding_window=8, which is not computed here": dict(sliding_window=8),
    "it has hidden_act='gelu' and not 'silu' or 'swish'": dict(hidden_act="gelu"),
    "n_head=4 cannot be split over n_kv_head=3": dict(num_key_value_heads=3),
    "window=0 must be 1 or more": dict(model_type="mistral", sliding_window=0),
    "it has scale_attn_by_inverse_layer_idx=True": dict(name="gpt2", scale_attn_by_inverse_layer_idx=True),
    "has add_cross_attention=True, which is not computed": dict(name="gpt2", add_cross_attention=True),
    # it was taken for a part that is off, and the model was read as a causal one
    "it has is_causal=False and not True": dict(is_causal=False),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_a_gpt_does_not_have_is_refused_by_its_name(said):
    with pytest.raises(UserError) as refused:
        families.read(content_of(**REFUSED[said]))
    assert said in str(refused.value) and len(str(refused.value)) < 400


PUBLISHED_GPT2 = dict(activation_function="gelu_new", architectures=["GPT2LMHeadModel"], bos_token_id=50256)
PUBLISHED_GPT2 |= dict(attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, eos_token_id=50256, initializer_range=0.02)
PUBLISHED_GPT2 |= dict(layer_norm_epsilon=1e-05, n_ctx=1024, summary_activation=None, summary_first_dropout=0.1)
PUBLISHED_GPT2 |= dict(summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True)
PUBLISHED_GPT2 |= dict(task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}})
PUBLISHED_GPT2 |= dict(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, _num_labels=1, n_special=0, output_past=True)
TINYLLAMA = dict(attention_bias=False, hidden_act="silu", initializer_range=0.02, pretraining_tp=1, rms_norm_eps=1e-05)
TINYLLAMA |= dict(rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="float32")
SCALED_LLAMA = TINYLLAMA | dict(rope_scaling=SCALED | dict(attention_factor=1.2), rope_theta=500.0, num_local_experts=8)
QWEN = dict(hidden_act="silu", max_window_layers=24, rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=32768)
QWEN |= dict(tie_word_embeddings=True, torch_dtype="bfloat16", use_mrope=False, use_sliding_window=False)
# what the config.json of models has, as it is published, with small sizes
PUBLISHED = {
    "gpt2": ("gpt2", PUBLISHED_GPT2),
    "TinyLlama": ("llama", TINYLLAMA),
    "Llama 3": ("llama", SCALED_LLAMA),
    "Qwen2.5": ("qwen2", QWEN),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_computes_what_transformers_does(name, tmp_path):
    # OpenAI's own weights were refused: n_special, output_past and _num_labels were "unknown"
    from transformers import AutoModelForCausalLM

    family, published = PUBLISHED[name]
    sizes = GPT2 if family == "gpt2" else SIZES
    tied = {"tie_word_embeddings": published["tie_word_embeddings"]} if "tie_word_embeddings" in published else {}
    hugging_face(tmp_path, family, **sizes | tied)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | published | sizes))
    ours = GPT.from_pretrained(tmp_path).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    idx = torch.randint(0, V, (1, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(idx, idx)[0], theirs(idx).logits, rtol=1e-5, atol=1e-5)
    drawn = theirs.generate(idx, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
    assert ours.generate(idx, 12, temperature=0.0).tolist() == drawn.tolist()


# what transformers reads of each config, although it changes no logits of a model that is evaluated
NEUTRAL = {"attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range", "dtype", "use_cache"}
NEUTRAL |= {"output_attentions", "output_hidden_states", "output_cross_attentions", "return_dict", "name_or_path"}
NEUTRAL |= {"pad_token_id", "reorder_and_upcast_attn", "gradient_checkpointing", "sub_configs", "is_heterogeneous"}
NEUTRAL |= {f"base_model_{kind}_plan" for kind in ("ep", "fsdp", "pp", "tp")}
NEUTRAL |= {f"vision_{kind}" for kind in ("aspect_ratio", "feature_layer", "feature_select_strategy")}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_each_key_that_transformers_computes_with_is_taken_or_refused(name, monkeypatch):
    # what is neither is ignored: a part that a new version adds to a family would be left out in silence
    from transformers import AutoConfig, AutoModelForCausalLM

    config, read = AutoConfig.for_model(name, **(GPT2 if name == "gpt2" else SIZES)), set()
    plain = type(config).__getattribute__
    monkeypatch.setattr(type(config), "__getattribute__", lambda self, key: (read.add(key), plain(self, key))[1])
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs(torch.zeros(1, 4, dtype=torch.long))
    monkeypatch.undo()
    values = {key for key in read if not (key.startswith("_") or callable(getattr(config, key, None)))}
    taken = hf_config.Config(config.to_dict())
    families.FAMILIES[name].read(taken)
    ours = taken.taken | set(families.FAMILIES[name].sizes.values()) | {"is_causal", *type(config).attribute_map}
    assert values - ours - hf_config.FOREIGN - families.REFUSED.keys() - NEUTRAL == set()
    assert {"vocab_size", "tie_word_embeddings"} <= values  # the watch works


ROTARY = dict(position="rotary", norm="rmsnorm", mlp="swiglu", bias=False, n_layer=2, n_head=2, n_embd=16, block_size=8)
WRITTEN = {  # by the family that is written: the fields of a model
    "gpt2": dict(position="learned", norm="layernorm", mlp="gelu"),
    "llama": {},
    "mistral": dict(window=4),
    "qwen2": dict(window=4, window_pattern="SL"),  # Mistral has no pattern; biases of Qwen2 become zeros
    "qwen3": dict(qk_norm=True, attention_bias="qkv"),
    "phi": dict(norm="layernorm", mlp="gelu", parallel_block=True, rope_fraction=0.5),
}


@pytest.mark.parametrize("family", WRITTEN)
def test_the_family_follows_from_the_config_and_biases_that_are_missing_become_zeros(family):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=20, vocab_multiple=8, **ROTARY | WRITTEN[family])).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
        theirs = to_transformers(model.config, model.state_dict()).eval()
        idx = torch.randint(0, 20, (2, 8))
        torch.testing.assert_close(theirs(idx).logits, model(idx, idx)[0][..., :20], rtol=1e-5, atol=1e-5)
    assert theirs.config.model_type == family and theirs.get_input_embeddings().weight.shape == (20, 16)


NO_FAMILY = {  # by what is said: the fields of a model
    "Llama, which is nearest, has norm='rmsnorm', and not 'layernorm'": dict(norm="layernorm"),
    "GPT-2, which is nearest, has n_kv_head=2, and not 1": WRITTEN["gpt2"] | dict(n_kv_head=1),
    "Qwen3, which is nearest, has no biases in mlp": dict(qk_norm=True, attention_bias="qkv", mlp_bias=True),
    "Phi, which is nearest, has windows=[None, None], and not [4, 4]": WRITTEN["phi"] | dict(window=4),
    "Llama, which is nearest, has no biases in output": dict(output_bias=True),
    "Llama, which is nearest, has bigrams=None, and not 9": dict(bigrams=9),
}


@pytest.mark.parametrize("said", NO_FAMILY)
def test_a_model_of_no_family_is_refused_by_its_field(said):
    config = GPTConfig(vocab_size=20, **ROTARY | NO_FAMILY[said])
    with pytest.raises(UserError, match="no family of transformers has all that this model has: ") as refused:
        to_transformers(config, {})
    assert said in str(refused.value)


def test_weights_that_are_not_of_the_config_are_not_written():
    # F17: a part that only model.py knows was left out, without a word
    config = GPTConfig(vocab_size=20, **ROTARY)
    state = GPT(config).state_dict()
    with pytest.raises(UserError, match=r"no Llama and cannot be written as one: extra is in only one"):
        families.weights(config, state | {"extra": torch.ones(1)}, "llama")
    with pytest.raises(UserError, match=r"transformer.ln_f.weight is \(8,\), and in a Llama \(16,\)"):
        families.weights(config, state | {"transformer.ln_f.weight": torch.ones(8)}, "llama")
    assert families.shapes(config) == {name: w.shape for name, w in state.items() if name != "lm_head.weight"}
