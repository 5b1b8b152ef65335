"""The families of models: a config.json read as a GPTConfig and written, and where the weights of each lie in a GPT.

GPT-2, Llama, Mistral, Qwen2, Qwen3 and Phi, as transformers has them; docs/models.md says which has what.
"""

import contextlib
import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from fusedgpt import dimensions
from fusedgpt.dimensions import GPTConfig, require_known
from fusedgpt.errors import UserError, shown
from fusedgpt.interchange.hf_config import FAMILIES, FOREIGN, Config

WRITTEN = (*dimensions.FAMILIES, "document_start")  # fields beyond GPT-2's that are written, or refused by name
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}  # by default they are of the family's first model
BIASES = ("bias", "attention_bias", "mlp_bias", "output_bias")
REFUSED = {"auto_map": "code of its own, which is never run here"}
REFUSED |= {"quantization_config": "quantized weights: name the model that they were made of"}


def read(content: Any) -> tuple[str, GPTConfig]:
    """The family and the config of a model with this config.json, as transformers reads it.

    Keys that transformers does not know either are ignored. Raises UserError if the family is unknown, or if the model
    has something that a GPT does not have.
    """
    name = content.get("model_type", "gpt2")
    if name not in FAMILIES:
        raise UserError(f"it has model_type={shown(name)}, which can be {', '.join(FAMILIES)}")
    for key, what in REFUSED.items():
        if content.get(key):
            raise UserError(f"its config.json has {key}={shown(content[key])}, {what}")
    from transformers import CONFIG_MAPPING

    kind, family = CONFIG_MAPPING[name], FAMILIES[name]  # `kind` changes what it reads
    config = Config({"is_causal": True} | kind.from_dict(NO_ENDS | copy.deepcopy(content)).to_dict())
    config.require("is_causal", True)  # otherwise each token attends to later ones too
    found = GPTConfig(**{ours: config[theirs] for ours, theirs in family.sizes.items()} | family.read(config))
    for key in FOREIGN & content.keys() - config.taken:
        if content[key]:
            raise UserError(f"its config.json has {key}={shown(content[key])}, which is not computed here")
    same = {"n_kv_head": found.n_head, "head_size": found.n_embd / found.n_head, "n_inner": 4 * found.n_embd}
    usual = {field: None for field, value in same.items() if getattr(found, field) == value}
    return name, dataclasses.replace(found, **usual)


def of(config: GPTConfig, writer: str) -> str:
    """The family that a model of this config belongs to.

    writer: what asks, for the error. Raises UserError if no family computes what the model computes.
    """
    require_known(config, writer, WRITTEN)
    from huggingface_hub.errors import StrictDataclassError

    own, lacking, biases = _parts(config), {}, {}
    for name in FAMILIES:
        with contextlib.suppress(StrictDataclassError, UserError):  # transformers' Llama, for one, refuses some sizes
            theirs = read(content(config, name))[1]
            has = _parts(theirs)
            other = [f"{part}={shown(has[part])}, and not {shown(own[part])}" for part in own if has[part] != own[part]]
            other += [f"no biases in {place}" for place in config.biases if config.biases[place] > theirs.biases[place]]
            lacking[name], biases[name] = other, sum(theirs.biases.values())
    nearest = min(lacking, key=lambda name: (len(lacking[name]), biases[name]))
    if lacking[nearest]:
        why = f"{FAMILIES[nearest].title}, which is nearest, has {lacking[nearest][0]}"
        raise UserError(f"no family of transformers has all that this model has: {why}")
    return nearest


def _parts(config):
    """What a config and the family it is written as must have in common."""
    same = ("position", "rope_fraction", "norm", "mlp", "qk_norm", "parallel_block", "tie_embeddings", "windows")
    sizes = dict(bigrams=config.bigrams, n_kv_head=config.kv_heads, head_size=config.head_channels)
    return {part: getattr(config, part) for part in same} | sizes


def content(config: GPTConfig, name: str) -> dict[str, Any]:
    """What the config.json of a model of this family says, with the keys of transformers 4, which 5 reads too."""
    family, own = FAMILIES[name], {"n_kv_head": config.kv_heads, "head_size": config.head_channels}
    own = vars(config) | own | {"n_inner": config.inner}
    sizes = {theirs: own[ours] for ours, theirs in family.sizes.items()}
    return {"model_type": name} | sizes | family.write(config)


def shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a GPT of this config, without padding: what model.py builds, or has to."""
    C, V, inner, biases = config.n_embd, config.vocab_size, config.inner, config.biases
    nh, nkv, hs = config.n_head, config.kv_heads, config.head_channels
    matrices = {"attn.c_attn": ((nh + 2 * nkv) * hs, C), "attn.c_proj": (C, nh * hs)}
    matrices |= {"mlp.c_gate": (inner, C)} if config.mlp == "swiglu" else {}
    matrices |= {"mlp.c_fc": (inner, C), "mlp.c_proj": (C, inner)}
    norms = {"ln_1": (C,)} | ({} if config.parallel_block else {"ln_2": (C,)})
    norms |= {"attn.q_norm": (hs,), "attn.k_norm": (hs,)} if config.qk_norm else {}
    found = {"transformer.wte.weight": (V, C)}
    found |= {"transformer.wpe.weight": (config.block_size, C)} if config.position == "learned" else {}
    in_norms = config.bias and config.norm == "layernorm"
    for n in range(config.n_layer):
        for module, shape in (norms | matrices).items():
            found[f"transformer.h.{n}.{module}.weight"] = shape
            place = {"attn.c_attn": "qkv", "attn.c_proj": "proj"}.get(module, "mlp")
            if in_norms if module in norms else biases[place]:
                found[f"transformer.h.{n}.{module}.bias"] = shape[:1]
    found |= {"transformer.ln_f.weight": (C,)} | ({"transformer.ln_f.bias": (C,)} if in_norms else {})
    found |= {} if config.tie_embeddings else {"lm_head.weight": (V, C)}
    return found | ({"lm_head.bias": (V,)} if config.output_bias else {})


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor of transformers lies in a GPT: in some rows of one of its parameters."""

    ours: str
    rows: slice
    shape: tuple[int, ...]  # of theirs
    transposed: bool  # theirs is

    def theirs(self, parameter: Tensor) -> Tensor:
        """The tensor of transformers, as a view of our `parameter`."""
        return parameter[self.rows].t() if self.transposed else parameter[self.rows]


def places(config: GPTConfig, name: str) -> dict[str, Place]:
    """The tensors of a model of this family, by transformers' names. `config` has all biases that the family has."""
    family, found = FAMILIES[name], {}
    q, k = config.n_head * config.head_channels, config.kv_heads * config.head_channels
    thirds = (slice(0, q), slice(q, q + k), slice(q + k, q + 2 * k))
    for ours, shape in shapes(config).items():
        path, kind = ours.rsplit(".", 1)
        if path.startswith("transformer.h."):
            number, module = path.removeprefix("transformer.h.").split(".", 1)
            theirs, prefix = family.modules[module], f"{family.blocks}{number}."
        else:
            theirs, prefix = family.ends[path], ""
        # GPT-2's linear layers are stored transposed, because OpenAI's code had them as 1-D convolutions
        transposed = name == "gpt2" and path.startswith("transformer.h.") and len(shape) == 2
        parts = zip(theirs, thirds) if isinstance(theirs, tuple) else [(theirs, slice(0, shape[0]))]
        for each, rows in parts:
            size = (rows.stop - rows.start, *shape[1:])
            found[f"{prefix}{each}.{kind}"] = Place(ours, rows, size[::-1] if transposed else size, transposed)
    return found


def completed(config: GPTConfig, name: str) -> GPTConfig:
    """`config`, with all biases that the family has."""
    theirs = read(content(config, name))[1]
    return dataclasses.replace(config, **{field: getattr(theirs, field) for field in BIASES})


def weights(config: GPTConfig, state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights of a GPT of this family, with our names, without padding; biases that it does not have are zeros.

    Raises UserError if `state` has other parameters than a GPT of this config, which would be written wrongly.
    """
    own, title = shapes(config), FAMILIES[name].title
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    if other := sorted(own.keys() ^ (state.keys() - tied)):
        raise UserError(f"the model is no {title} and cannot be written as one: {other[0]} is in only one of the two")
    found = {}
    for each, shape in shapes(completed(config, name)).items():
        w = state[each] if each in own else torch.zeros(shape, dtype=state["transformer.wte.weight"].dtype)
        if each in ("transformer.wte.weight", "lm_head.weight", "lm_head.bias"):
            w = w[: config.vocab_size]
        if w.shape != shape:
            both = f"{tuple(w.shape)}, and in a {title} {shape}"
            raise UserError(f"the model is no {title} and cannot be written as one: {each} is {both}")
        found[each] = w
    return found
