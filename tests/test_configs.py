"""The config files: published models have their published sizes, and a script accepts each file."""

import inspect
import runpy

import pytest
import torch

import sample
import train
from configurator import configure
from fusedgpt.bench import kinds
from fusedgpt.dimensions import NAMES, GPTConfig
from fusedgpt.interchange import families
from fusedgpt.settings import Settings
from model import GPT
from tests.launch import ROOT

# the keys of each config.json that decide what the model computes, and how many parameters transformers counts
LLAMA = dict(model_type="llama", hidden_act="silu", rms_norm_eps=1e-5, attention_bias=False, num_hidden_layers=32)
LLAMA |= dict(num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, intermediate_size=14336)
LLAMA |= dict(tie_word_embeddings=False, rope_theta=10000.0)
GPT2 = dict(model_type="gpt2", activation_function="gelu_new", layer_norm_epsilon=1e-5, vocab_size=50257)
PUBLISHED = {
    "gpt2-medium": GPT2 | dict(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2 | dict(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2 | dict(n_layer=48, n_head=25, n_embd=1600),
    "llama-3-8b": LLAMA | dict(vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0),
    "mistral-7b": LLAMA
    | dict(model_type="mistral", vocab_size=32000, max_position_embeddings=32768, sliding_window=4096),
    "phi-2": dict(model_type="phi", hidden_act="gelu_new", layer_norm_eps=1e-5, partial_rotary_factor=0.4)
    | dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, num_attention_heads=32)
    | dict(num_key_value_heads=32, vocab_size=51200, max_position_embeddings=2048, rope_theta=10000.0)
    | dict(qk_layernorm=False, tie_word_embeddings=False),
    "qwen3-0.6b": LLAMA
    | dict(model_type="qwen3", rms_norm_eps=1e-6, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
    | dict(num_attention_heads=16, head_dim=128, vocab_size=151936, max_position_embeddings=40960, rope_theta=1000000)
    | dict(max_window_layers=28, use_sliding_window=False, sliding_window=None, tie_word_embeddings=True),
    "smollm-135m": LLAMA
    | dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
    | dict(vocab_size=49152, max_position_embeddings=2048, tie_word_embeddings=True),
}
PARAMETERS = {"llama-3-8b": 8_030_261_248, "mistral-7b": 7_241_732_096, "phi-2": 2_779_683_840}
PARAMETERS |= {"gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
PARAMETERS |= {"qwen3-0.6b": 596_049_920, "smollm-135m": 134_515_008}
FILES = sorted((ROOT / "config").glob("*.py")) + sorted((ROOT / "config" / "model").glob("*.py"))


def of(file):
    """The settings that a config file assigns to."""
    assigned = runpy.run_path(str(file)).items()
    return {name: value for name, value in assigned if not (name.startswith("_") or inspect.ismodule(value))}


def preset(name):
    return of(ROOT / "config" / "model" / f"{name}.py")


@pytest.mark.parametrize("name", [file.stem for file in (ROOT / "config" / "model").glob("*.py")])
def test_a_preset_is_the_published_model(name):
    _, config = families.read(PUBLISHED[name])
    ours = GPTConfig(**preset(name))
    assert preset(name).keys() <= set(NAMES), "it sets more than the model"
    assert vars(ours) | {"n_inner": ours.inner} == vars(config) | {"n_inner": config.inner}
    with torch.device("meta"):  # 8 billion parameters without storage
        assert GPT(ours).get_num_params(non_embedding=False) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in (ROOT / "config" / "model" / f"{name}.py").read_text()


def test_a_llama_of_124m_costs_what_gpt2_costs():
    # "equal FLOPs" in the docs; its file says that three matrices have as many weights as GPT-2's two
    gpt2, llama = (of(ROOT / "config" / f"train_{name}.py") for name in ("gpt2", "llama_124M"))
    with torch.device("meta"):
        a, b = (GPT(GPTConfig.of(Settings(**each), vocab_size=50257)) for each in (gpt2, gpt2 | llama))
    assert a.get_num_params() == b.get_num_params() == 123_587_328
    assert a.config.flops_per_token == b.config.flops_per_token


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_script_takes_each_file(file):
    pytest.importorskip("tyro")  # reads the command line
    found = of(file)
    kind = next((kind for kind in kinds.KINDS if f"bench.py {kind} config/{file.name}" in file.read_text()), None)
    if kind:
        s, _ = kinds.read_settings(kind, [str(file), "--device=cpu"])
    else:
        train.validate(s := train.read_settings([str(file)]))
    found.pop("wandb_run_name", None)  # it may have the time in it
    assert {name: getattr(s, name) for name in found} == found
    if not kind:
        # as in nanoGPT, sample.py takes it too: it used to refuse settings that only training has
        sampling = vars(configure(sample.Settings(), [str(file)], "", sample.ONLY_TRAINING))
        assert sampling == vars(sample.Settings()) | {name: found[name] for name in found.keys() & sampling}
        config = GPTConfig.of(s, vocab_size=s.vocab_size or 50257)
        with torch.device("meta"):
            assert GPT(config).get_num_params(non_embedding=False) == config.num_params
