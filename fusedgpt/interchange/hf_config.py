"""What config.json says of each family of models in transformers, as fields of GPTConfig, and its names of weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fusedgpt import rotary
from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError, shown

# transformers' names for each activation; the first is written
ACTIVATIONS = {"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"), "gelu": ("gelu",)}
LETTERS = {"sliding_attention": "S", "full_attention": "L"}  # of window_pattern, for the words in layer_types

# our names of modules, and transformers'; queries, keys and values are one matrix here, and three there
SIDE_BY_SIDE = {"ln_1": "input_layernorm", "attn.c_attn": tuple(f"self_attn.{each}_proj" for each in "qkv")}
LLAMAS = SIDE_BY_SIDE | {"attn.c_proj": "self_attn.o_proj", "ln_2": "post_attention_layernorm"}
LLAMAS |= {"mlp.c_gate": "mlp.gate_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
LLAMAS |= {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
PHIS = SIDE_BY_SIDE | {"attn.c_proj": "self_attn.dense", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
PHIS |= {"attn.q_norm": "self_attn.q_layernorm", "attn.k_norm": "self_attn.k_layernorm"}

# keys of parts that a forward pass of transformers computes in some families, and a GPT does not
FOREIGN = {"add_cross_attention", "attention_chunk_size", "decoder", "full_attention", "generator", "head_dim"}
FOREIGN |= {"is_encoder_decoder", "kv_sharing_modes", "layer_types", "per_layer_config", "sliding_attention"}
FOREIGN |= {"sliding_window", "text_config"}


class Config:
    """What transformers has read from a config.json, with its defaults, and the keys that somebody has read here."""

    def __init__(self, values: dict):
        self.values, self.taken = values, set()

    def __getitem__(self, key: str) -> Any:
        self.taken.add(key)
        return self.values.get(key)

    def require(self, key: str, *wanted: Any) -> Any:
        """The value of `key`. Raises UserError if it is none of `wanted`."""
        if (found := self[key]) not in wanted:
            raise UserError(f"it has {key}={shown(found)} and not {' or '.join(map(repr, wanted))}")
        return found


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, as transformers has it."""

    title: str
    sizes: dict[str, str]  # fields of GPTConfig, and their keys in config.json
    modules: dict[str, str | tuple[str, ...]]  # of a block: our names, and transformers'
    ends: dict[str, str]  # the same outside of blocks
    blocks: str  # what the names of a block's modules begin with, up to its number
    read: Callable[[Config], dict[str, Any]]  # the other fields of GPTConfig
    write: Callable[[GPTConfig], dict[str, Any]]  # their keys in config.json


def _activation(config, key):
    known = {name: ours for ours, names in ACTIVATIONS.items() for name in names}
    return {"activation": known[config.require(key, *known)]}


def _rope(config):
    rope = Config(config["rope_parameters"])
    found = {"position": "rotary", "rope_theta": float(rope["rope_theta"])}
    if rope.require("rope_type", "default", "llama3") == "llama3":
        rope.require("low_freq_factor", rotary.LONG)
        rope.require("high_freq_factor", rotary.SHORT)
        found |= {"rope_scaling": rope["factor"], "rope_context": int(rope["original_max_position_embeddings"])}
    return found


def _write_rope(config, fraction=False):
    scaling = None
    if config.rope_scaling != 1:
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling}
        scaling |= {"low_freq_factor": float(rotary.LONG), "high_freq_factor": float(rotary.SHORT)}
        scaling |= {"original_max_position_embeddings": config.rope_context}
    found = {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    return found | ({"partial_rotary_factor": config.rope_fraction} if fraction else {})


def _read_llamas(config, **others):
    """What Llama, Mistral and Qwen share."""
    config.require("hidden_act", "silu", "swish")  # two names of one function
    Config(config["rope_parameters"]).require("partial_rotary_factor", None, 1.0)
    found = dict(norm="rmsnorm", mlp="swiglu", bias=False, norm_eps=config["rms_norm_eps"])
    return found | _rope(config) | {"tie_embeddings": config["tie_word_embeddings"]} | others


def _write_llamas(config, **others):
    own = {"hidden_act": "silu", "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tie_embeddings}
    return own | _write_rope(config) | {"attention_dropout": config.dropout} | others


def _read_windows(config):
    """Qwen's windows: those of the layers that layer_types names."""
    kinds, window = config["layer_types"], config["sliding_window"]
    if "sliding_attention" not in kinds:
        return {}
    pattern = "".join(LETTERS[kind] for kind in kinds)
    return {"window": window, "window_pattern": "S" if "L" not in pattern else pattern}


def _write_windows(config):
    window = next(filter(None, config.windows), None)
    kinds = ["sliding_attention" if each else "full_attention" for each in config.windows]
    return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}


def _read_gpt2(config):
    config.require("scale_attn_by_inverse_layer_idx", False)
    config.require("scale_attn_weights", True)
    found = _activation(config, "activation_function") | {"norm_eps": config["layer_norm_epsilon"]}
    return found | {"tie_embeddings": config["tie_word_embeddings"]}


def _write_gpt2(config):
    found = {"activation_function": ACTIVATIONS[config.activation][0], "layer_norm_epsilon": config.norm_eps}
    found |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    found |= {"n_ctx": config.block_size}  # llama.cpp and MLX read it; OpenAI's files have it
    found |= {"n_inner": None if config.inner == 4 * config.n_embd else config.inner}
    return found | {"tie_word_embeddings": config.tie_embeddings}


def _read_phi(config):
    found = _activation(config, "hidden_act") | _rope(config)
    found |= {"rope_fraction": config["rope_parameters"]["partial_rotary_factor"], "norm_eps": config["layer_norm_eps"]}
    found |= {"qk_norm": config["qk_layernorm"], "tie_embeddings": config["tie_word_embeddings"]}
    return found | dict(parallel_block=True, output_bias=True)


def _write_phi(config):
    found = {"hidden_act": ACTIVATIONS[config.activation][0], "layer_norm_eps": config.norm_eps}
    found |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), config.dropout)
    found |= {"qk_layernorm": config.qk_norm, "tie_word_embeddings": config.tie_embeddings}
    return found | _write_rope(config, fraction=True)


SIZES = {"vocab_size": "vocab_size", "block_size": "max_position_embeddings", "n_layer": "num_hidden_layers"}
SIZES |= {"n_head": "num_attention_heads", "n_embd": "hidden_size", "n_inner": "intermediate_size"}
SIZES |= {"n_kv_head": "num_key_value_heads"}
LLAMA = Family(
    title="Llama",
    sizes=SIZES | {"head_size": "head_dim"},
    modules=LLAMAS,
    ends={"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"},
    blocks="model.layers.",
    read=lambda config: _read_llamas(
        config, attention_bias=config["attention_bias"] or None, mlp_bias=config["mlp_bias"] or None
    ),
    write=lambda config: _write_llamas(config, attention_bias=config.biases["qkv"], mlp_bias=config.biases["mlp"]),
)
FAMILIES = {
    "gpt2": Family(
        title="GPT-2",
        sizes={"vocab_size": "vocab_size", "block_size": "n_positions", "n_inner": "n_inner"}
        | {name: name for name in ("n_layer", "n_head", "n_embd")},
        modules={name: name for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")},
        ends={name: name for name in ("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head")},
        blocks="transformer.h.",
        read=_read_gpt2,
        write=_write_gpt2,
    ),
    "llama": LLAMA,
    "mistral": dataclasses.replace(
        LLAMA,
        title="Mistral",
        read=lambda config: _read_llamas(config, window=config["sliding_window"]),
        write=lambda config: _write_llamas(config, sliding_window=next(filter(None, config.windows), None)),
    ),
    "qwen2": dataclasses.replace(
        LLAMA,
        title="Qwen2",
        read=lambda config: _read_llamas(config, attention_bias="qkv", **_read_windows(config)),
        write=lambda config: _write_llamas(config, **_write_windows(config)),
    ),
    "qwen3": dataclasses.replace(
        LLAMA,
        title="Qwen3",
        read=lambda config: _read_llamas(
            config, qk_norm=True, attention_bias=config["attention_bias"] or None, **_read_windows(config)
        ),
        write=lambda config: _write_llamas(config, attention_bias=config.biases["qkv"], **_write_windows(config)),
    ),
    "phi": Family(
        title="Phi",
        sizes=SIZES,
        modules=PHIS,
        ends=LLAMA.ends | {"transformer.ln_f": "model.final_layernorm"},
        blocks="model.layers.",
        read=_read_phi,
        write=_write_phi,
    ),
}
