"""Convert GPT-2s from and to transformers. Training from scratch does not need this module."""

import dataclasses
import os
import pathlib
from typing import Any

import torch
from torch import Tensor

from fusedgpt.dimensions import OVERRIDES, GPTConfig, require_known
from fusedgpt.errors import UserError, first_line

# transformers' names for each activation; to_transformers writes the first
ACTIVATIONS = {"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"), "gelu": ("gelu",)}
LARGEST_CONFIG = 2**20  # bytes of a config.json that is not refused
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks that older files store beside the weights
# linear layers that transformers' GPT-2 stores transposed, because OpenAI's code had them as 1-D convolutions
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def load(model_type: str | os.PathLike, changes: dict[str, Any]) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Load a GPT-2 by its hub id or from a local folder: its config with `changes`, and its float32 weights.

    Weights have the names of model.py. No code of the folder runs. Raises UserError if `changes` has settings that are
    not in OVERRIDES, if the model cannot be loaded, if it has another architecture, or if its weights do not match its
    config.
    """
    if unknown := changes.keys() - set(OVERRIDES):
        raise UserError(
            f"override_args={changes} may set {', '.join(OVERRIDES)}, not {', '.join(sorted(unknown))}: the weights"
            " decide that (model.crop_block_size shortens block_size)"
        )
    from transformers import GPT2Config, GPT2LMHeadModel, logging
    from transformers.utils import cached_file

    logging.disable_progress_bar()  # one progress bar per rank would garble the log
    # "eager", because a config could name an attention on the hub, which transformers would download and run
    how = dict(dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, output_loading_info=True)
    try:
        if not (file := cached_file(model_type, "config.json")):
            raise ValueError("it has no config.json")
        if (size := os.path.getsize(file)) > LARGEST_CONFIG:
            raise ValueError(f"its config.json has {size:,} bytes, but a GPT-2's has about a thousand")
        theirs = GPT2Config.from_pretrained(model_type)
        config = GPTConfig(**_fields(theirs, model_type))
        _require_room(config.num_params, pathlib.Path(model_type))
        model, found = GPT2LMHeadModel.from_pretrained(model_type, config=theirs, **how)
        lacking = sorted(found["missing_keys"])
        foreign = sorted(name for name in found["unexpected_keys"] if not name.endswith(MASKS))
        if lacking or foreign:  # transformers would initialise or drop them in silence
            what = f"lack {lacking[0]}" if lacking else f"have {foreign[0]} too"
            raise ValueError(f"its weights are not those of its config: they {what}")
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything
        why = first_line(error)
        why = "its weights have other shapes than its config asks for" if "mismatched" in why else why
        raise UserError(
            f"init_from={str(model_type)!r} is no GPT-2 that can be loaded, from the hub or a folder: {why:.300}."
            " Without a network, name a folder"
        ) from error
    weights = {name: w.t() if name.endswith(CONV1D) else w for name, w in model.state_dict().items()}
    if bad := [name for name, w in weights.items() if not w.sum().isfinite()]:
        raise UserError(f"init_from={str(model_type)!r} has weights that are not finite: {bad[0]}. Name another")
    return dataclasses.replace(config, **changes), weights


def to_transformers(config: GPTConfig, state: dict[str, Tensor], **changes):
    """A GPT2LMHeadModel that computes the same as a GPT with `config` and `state`. `changes` go to its GPT2Config.

    Vocabulary padding is stripped, and missing biases become zeros. The result attends across documents, so it computes
    a text of several documents differently from a GPT with `document_start`. Raises UserError if the GPT computes
    something else that GPT-2 does not.
    """
    found = weights(config, state, "to_transformers (fusedgpt/interchange/gpt2.py), which makes a GPT-2,")
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.disable_progress_bar()
    own = dict(
        vocab_size=config.vocab_size,
        n_positions=config.block_size,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        activation_function=ACTIVATIONS[config.activation][0],
        bos_token_id=None,  # the default would be GPT-2's
        eos_token_id=None,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    )
    theirs = GPT2LMHeadModel(GPT2Config(**own | changes))
    with torch.no_grad():
        for name, w in found.items():
            theirs.get_parameter(name).copy_(w.t() if name.endswith(CONV1D) else w)
    return theirs


def weights(config: GPTConfig, state: dict[str, Tensor], writer: str) -> dict[str, Tensor]:
    """The weights of a GPT with `config` and `state`, without padding, and with zeros for biases that it does not have.

    writer: what asks for them, for the error. Raises UserError if the GPT computes something that GPT-2 does not.
    """
    require_known(config, writer, ("document_start",))
    C = config.n_embd
    block = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
    block |= {"ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    shapes = {f"h.{n}.{name}": shape for n in range(config.n_layer) for name, shape in block.items()} | {"ln_f": (C,)}
    biases = {f"transformer.{name}.bias": shape[:1] for name, shape in shapes.items()}
    shapes |= {"wte": (config.vocab_size, C), "wpe": (config.block_size, C)}
    shapes = {f"transformer.{name}.weight": shape for name, shape in shapes.items()} | biases
    own = shapes.keys() if config.bias else shapes.keys() - biases.keys()
    if other := sorted(own ^ (state.keys() - {"lm_head.weight"})):  # lm_head.weight is tied to wte
        raise UserError(f"the model is no GPT-2 and cannot be written as one: {other[0]} is in only one of the two")
    found = {name: state[name] if name in own else torch.zeros(shape) for name, shape in shapes.items()}
    found["transformer.wte.weight"] = found["transformer.wte.weight"][: config.vocab_size]
    for name, w in found.items():
        if w.shape != shapes[name]:
            both = f"{tuple(w.shape)}, and in a GPT-2 {shapes[name]}"
            raise UserError(f"the model is no GPT-2 and cannot be written as one: {name} is {both}")
    return found


def _require_room(num_params, folder):
    """Raise ValueError if the files of a local `folder` are too small for `num_params` weights of 2 bytes.

    Otherwise transformers would build a model of any size that a config asks for.
    """
    files = [file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind) if file.is_file()]
    held = sum(file.stat().st_size for file in files)
    if folder.is_dir() and held < 2 * num_params:
        raise ValueError(f"its config means {num_params:,} weights, but its .safetensors and .bin have {held:,} bytes")


def _fields(c, model_type):
    """The fields of GPTConfig for `c`, a GPT2Config. Raises UserError if the model is not built as OpenAI's GPT-2."""
    named = {name: ours for ours, names in ACTIVATIONS.items() for name in names}
    openais = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    openais |= {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True}
    found = {name: getattr(c, name) for name in openais} | {"n_inner": c.n_inner or 4 * c.n_embd}
    openais["n_inner"] = 4 * c.n_embd
    other = [f"{name}={found[name]} and not {value}" for name, value in openais.items() if found[name] != value]
    if getattr(c, "quantization_config", None):
        other.append("quantized weights")
    if c.activation_function not in named:
        other.append(f"activation_function={c.activation_function} and not {', '.join(named)}")
    if other:
        raise UserError(f"{model_type} is no GPT-2 as OpenAI built it: it has {'; '.join(other)}. Name another model")
    dimensions = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, block_size=c.n_positions)
    return {**dimensions, "vocab_size": c.vocab_size, "activation": named[c.activation_function]}
