"""What config.json says of each family of models in transformers, as fields of GPTConfig, and its names of weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fusedgpt import rotary
from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError, shown

# transformers' names for each activation; the first is written
ACTIVATIONS = {"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"), "gelu": ("gelu",)}
GATES = ("silu", "swish")  # two names of one function
LARGEST = 10**6  # layers for which windows are read, so that a damaged config does not fill the memory

# our names of modules, and transformers'; queries, keys and values are one matrix here, and three there
SIDE_BY_SIDE = {"ln_1": "input_layernorm", "attn.c_attn": tuple(f"self_attn.{each}_proj" for each in "qkv")}
LLAMAS = SIDE_BY_SIDE | {"attn.c_proj": "self_attn.o_proj", "ln_2": "post_attention_layernorm"}
LLAMAS |= {"mlp.c_gate": "mlp.gate_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
LLAMAS |= {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
PHIS = SIDE_BY_SIDE | {"attn.c_proj": "self_attn.dense", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
PHIS |= {"attn.q_norm": "self_attn.q_layernorm", "attn.k_norm": "self_attn.k_layernorm"}

# keys that a forward pass of transformers reads for parts that a GPT, or most families, do not have, and what they mean
FOREIGN = dict.fromkeys(
    (
        *("add_cross_attention", "attention_chunk_size", "decoder", "full_attention", "generator", "head_dim"),
        *("is_encoder_decoder", "kv_sharing_modes", "layer_types", "per_layer_config", "sliding_attention"),
        *("sliding_window", "text_config"),
    ),
    "which is not computed here",
)
FOREIGN |= {"auto_map": "code of its own, which is never run here"}
FOREIGN |= {"quantization_config": "quantized weights: name the model that they were made of"}


class Config:
    """The content of a config.json, read key by key, so that what nobody has read is known."""

    def __init__(self, content: dict):
        self.content, self.taken = content, set()

    def take(self, key: str, kind: type, *default: Any) -> Any:
        """The value of `key`, which must be of this kind; null, or none at all, is the default, if there is one."""
        self.taken.add(key)
        value = self.content.get(key)
        if value is None and default:
            return default[0]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            words = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", dict: "an object"}
            raise UserError(f"its config.json has {key}={shown(value)}, which must be {words.get(kind, 'a list')}")
        return value

    def require(self, key: str, wanted: Any) -> None:
        """Raise UserError if `key` has another value than `wanted`, which it also has if it is not there."""
        if (found := self.take(key, type(wanted), wanted)) != wanted:
            raise UserError(f"it has {key}={found} and not {wanted}")

    def require_none_foreign(self) -> None:
        """Raise UserError if a key that transformers computes with is on, and nobody has taken it."""
        for key in FOREIGN.keys() & self.content.keys() - self.taken:
            if self.content[key]:
                raise UserError(f"its config.json has {key}={shown(self.content[key])}, {FOREIGN[key]}")


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
    requires: Callable[[GPTConfig], dict[str, Any]]  # what all models of the family have
    biases: Callable[[GPTConfig], dict[str, Any]]  # the fields of a model that has all biases of the family


def _activation(config, key):
    known = {name: ours for ours, names in ACTIVATIONS.items() for name in names}
    if (name := config.take(key, str, "gelu_new")) not in known:
        raise UserError(f"it has {key}={name} and not {', '.join(known)}")
    return {"activation": known[name]}


def _gate(config):
    if (name := config.take("hidden_act", str, "silu")) not in GATES:
        raise UserError(f"it has hidden_act={name} and not {' or '.join(GATES)}")


def _rope(config, fraction=1.0):
    """The fields of rotary positions: transformers 5 keeps all of them in rope_parameters, 4 beside rope_scaling."""
    inside = dict(config.take("rope_scaling", dict, {}))
    for key, value in config.take("rope_parameters", dict, {}).items():
        if inside.setdefault(key, value) != value:
            raise UserError(f"its config.json has rope_scaling and rope_parameters with another {key} each: mend it")
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if (beside := config.take(key, float, None)) is not None and inside.setdefault(key, beside) != beside:
            raise UserError(f"its config.json has {key}={beside}, and {inside[key]} in rope_parameters: mend it")
    rope = Config(inside)
    kinds = {rope.take(key, str, None) for key in ("rope_type", "type")} - {None}
    found = {"position": "rotary", "rope_theta": rope.take("rope_theta", float, 10000.0)}
    found["rope_fraction"] = rope.take("partial_rotary_factor", float, fraction)
    context = rope.take("original_max_position_embeddings", float, None)
    if kinds == {"llama3"}:
        context = config.take("max_position_embeddings", int) if context is None else context
        found |= {"rope_scaling": rope.take("factor", float), "rope_context": int(context)}
        for key, value in (("low_freq_factor", rotary.LONG), ("high_freq_factor", rotary.SHORT)):
            rope.require(key, float(value))
    elif kinds - {"default"}:
        raise UserError(f"it has rope_scaling of the kind {', '.join(sorted(kinds))}, which can be default or llama3")
    rope.require_none_foreign()
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
    _gate(config)
    found = dict(norm="rmsnorm", mlp="swiglu", bias=False, norm_eps=config.take("rms_norm_eps", float, 1e-6))
    found["tie_embeddings"] = config.take("tie_word_embeddings", bool, False)
    if (rope := _rope(config))["rope_fraction"] != 1:
        raise UserError(f"it has partial_rotary_factor={rope['rope_fraction']}, which must be 1 in this family")
    return found | rope | others


def _write_llamas(config, **others):
    own = {"hidden_act": "silu", "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tie_embeddings}
    return own | _write_rope(config) | {"attention_dropout": config.dropout} | others


def _biases(config, *keys):
    return {key: config.take(key, bool, False) or None for key in keys}


def _read_windows(config):
    """Qwen's windows: in the layers that layer_types names, or in those from max_window_layers on."""
    on, layers = config.take("use_sliding_window", bool, False), config.take("num_hidden_layers", int)
    window, first = config.take("sliding_window", int, None), config.take("max_window_layers", int, 28)
    kinds, window = config.take("layer_types", list, None), window if on else None
    if kinds is None:
        if window is None or first >= layers:
            return {}
        if layers > LARGEST:
            raise UserError(f"it has num_hidden_layers={layers}, which must be at most {LARGEST}")
        kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(layers)]
    letters = {"sliding_attention": "S", "full_attention": "L"}
    if other := [kind for kind in kinds if kind not in letters]:
        raise UserError(f"it has layer_types with {shown(other[0])}, which can be {' or '.join(letters)}")
    if len(kinds) != layers:
        raise UserError(f"it has {len(kinds)} layer_types for num_hidden_layers={layers}")
    pattern = "".join(letters[kind] for kind in kinds)
    if "S" not in pattern:
        return {}
    if window is None:
        raise UserError("it has layer_types with sliding_attention, but no sliding_window that is used")
    return {"window": window, "window_pattern": "S" if "L" not in pattern else pattern}


def _write_windows(config):
    window = next(filter(None, config.windows), None)
    kinds = ["sliding_attention" if each else "full_attention" for each in config.windows]
    found = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}
    # transformers before 4.53 knows only windows from a layer on
    return found | {"max_window_layers": kinds.index("sliding_attention") if window else config.n_layer}


def _read_gpt2(config):
    for key, value in (("scale_attn_by_inverse_layer_idx", False), ("scale_attn_weights", True)):
        config.require(key, value)
    for size, key in OTHER_NAMES.items():
        config.require(size, config.take(key, int))
    found = _activation(config, "activation_function")
    found["norm_eps"] = config.take("layer_norm_epsilon", float, 1e-5)
    return found | {"tie_embeddings": config.take("tie_word_embeddings", bool, True)}


def _write_gpt2(config):
    found = {"activation_function": ACTIVATIONS[config.activation][0], "layer_norm_epsilon": config.norm_eps}
    found |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    found |= {"n_inner": None if config.inner == 4 * config.n_embd else config.inner}
    return found | {"tie_word_embeddings": config.tie_embeddings}


def _read_phi(config):
    found = _activation(config, "hidden_act") | _rope(config, fraction=0.5)
    found |= dict(norm_eps=config.take("layer_norm_eps", float, 1e-5), qk_norm=config.take("qk_layernorm", bool, False))
    found["tie_embeddings"] = config.take("tie_word_embeddings", bool, False)
    return found | dict(parallel_block=True, output_bias=True)


def _write_phi(config):
    found = {"hidden_act": ACTIVATIONS[config.activation][0], "layer_norm_eps": config.norm_eps}
    found |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), config.dropout)
    found |= {"qk_layernorm": config.qk_norm, "tie_word_embeddings": config.tie_embeddings}
    return found | _write_rope(config, fraction=True)


# what all models of a family have, beside what a size decides
OF_GPT2 = dict(norm="layernorm", mlp="gelu", qk_norm=False, window=None, parallel_block=False, output_bias=False)
OF_LLAMAS = dict(rope_fraction=1.0, norm="rmsnorm", mlp="swiglu", qk_norm=False, output_bias=False)
OF_PHI = dict(norm="layernorm", mlp="gelu", window=None)
ALL_BIASES = {"bias": True, "attention_bias": None, "mlp_bias": None}
SIZES = {"vocab_size": "vocab_size", "block_size": "max_position_embeddings", "n_layer": "num_hidden_layers"}
SIZES |= {"n_head": "num_attention_heads", "n_embd": "hidden_size", "n_inner": "intermediate_size"}
SIZES |= {"n_kv_head": "num_key_value_heads"}
OPTIONAL = dict.fromkeys(("n_inner", "num_key_value_heads", "head_dim"), (None,))  # keys that may be null
OTHER_NAMES = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
OTHER_NAMES |= {"max_position_embeddings": "n_positions"}  # which transformers takes for a GPT-2 too
# what transformers takes for a key that is not there, if that is not what null means
DEFAULTS = {
    "gpt2": dict(vocab_size=50257, n_positions=1024, n_layer=12, n_head=12, n_embd=768),
    "mistral": dict(num_key_value_heads=8, sliding_window=4096),
    "qwen2": dict(num_key_value_heads=32, sliding_window=4096),
    "qwen3": dict(num_key_value_heads=32, head_dim=128, sliding_window=4096),
}
LLAMA = Family(
    title="Llama",
    sizes=SIZES | {"head_size": "head_dim"},
    modules=LLAMAS,
    ends={"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"},
    blocks="model.layers.",
    read=lambda config: _read_llamas(config, **_biases(config, "attention_bias", "mlp_bias")),
    write=lambda config: _write_llamas(config, attention_bias=config.biases["qkv"], mlp_bias=config.biases["mlp"]),
    requires=lambda config: OF_LLAMAS,
    biases=lambda config: {},
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
        requires=lambda config: OF_GPT2 | {"n_kv_head": config.n_head, "head_size": config.n_embd // config.n_head},
        biases=lambda config: ALL_BIASES,
    ),
    "llama": LLAMA,
    "mistral": dataclasses.replace(
        LLAMA,
        title="Mistral",
        read=lambda config: _read_llamas(config, window=config.take("sliding_window", int, None)),
        write=lambda config: _write_llamas(config, sliding_window=next(filter(None, config.windows), None)),
        biases=lambda config: ALL_BIASES | {"bias": False},
    ),
    "qwen2": dataclasses.replace(
        LLAMA,
        title="Qwen2",
        read=lambda config: _read_llamas(config, attention_bias="qkv", **_read_windows(config)),
        write=lambda config: _write_llamas(config, **_write_windows(config)),
        biases=lambda config: ALL_BIASES | {"bias": False, "attention_bias": "qkv"},
    ),
    "qwen3": dataclasses.replace(
        LLAMA,
        title="Qwen3",
        read=lambda config: _read_llamas(
            config, qk_norm=True, **_biases(config, "attention_bias"), **_read_windows(config)
        ),
        write=lambda config: _write_llamas(config, attention_bias=config.biases["qkv"], **_write_windows(config)),
        requires=lambda config: OF_LLAMAS | {"qk_norm": True},
        biases=lambda config: {"attention_bias": config.biases["qkv"], "mlp_bias": False},
    ),
    "phi": Family(
        title="Phi",
        sizes=SIZES,
        modules=PHIS,
        ends=LLAMA.ends | {"transformer.ln_f": "model.final_layernorm"},
        blocks="model.layers.",
        read=_read_phi,
        write=_write_phi,
        requires=lambda config: OF_PHI | {"head_size": config.n_embd // config.n_head},
        biases=lambda config: ALL_BIASES | {"output_bias": True},
    ),
}


def declared(name: str) -> set[str]:
    """The keys that transformers' own class of this family writes into a config.json."""
    from transformers import CONFIG_MAPPING

    return {*CONFIG_MAPPING[name]().to_dict(), "torch_dtype"}  # transformers 4's name of dtype
