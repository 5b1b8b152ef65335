"""Models of transformers as ours, read tensor by tensor, and ours as theirs. Training from scratch does not need it."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import textwrap
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedgpt import eager
from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError, shown
from fusedgpt.interchange import families

SAFETENSORS, PICKLES = "model.safetensors", "pytorch_model.bin"
FILES = tuple(f"{name}{end}" for name in (SAFETENSORS, PICKLES) for end in ("", ".index.json"))
# what older files store beside the weights: causal masks, and the frequencies of rotary positions
DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
TIED = "lm_head.weight"
# weights do not decide these
OVERRIDES = ("dropout", "attention", "activation", "loss", "recompute", "vocab_multiple", "document_start")


class Stored(NamedTuple):
    """A tensor in a file, which is read by `read()`."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def load(
    model_type: str | os.PathLike, changes: dict[str, Any]
) -> tuple[GPTConfig, list[tuple[str, slice, Callable[[], Tensor]]]]:
    """A model by its hub id or from a local folder: its config with `changes`, and its weights, not read yet.

    Each is the name of a parameter in model.py, some of its rows, and a function that reads what they hold, in the
    dtype of the file. No code of the folder runs. Raises UserError if `changes` has settings that are not in OVERRIDES,
    or if the model cannot be loaded; reading a weight does if it is not finite.
    """
    if unknown := changes.keys() - set(OVERRIDES):
        why = f"the weights decide {', '.join(sorted(unknown))} (model.crop_block_size shortens block_size)"
        raise UserError(f"override_args={changes} may set {', '.join(OVERRIDES)}: {why}")
    with _refused(model_type):
        name, config = families.read(_json(_file(model_type, "config.json")))
        stored = _stored(model_type)
        held = sum(math.prod(each.shape) for each in stored.values())
        if held < config.num_params:  # before anything of the size that the config asks for is built
            raise UserError(f"its config means {config.num_params:,} weights, but its files have {held:,}")
        wanted = families.places(config, name)
        found = _matched(stored, wanted)
    reads = [
        (place.ours, place.rows, functools.partial(_read, model_type, name, found[name], place))
        for name, place in wanted.items()
    ]
    return dataclasses.replace(config, **changes), reads


@torch.no_grad()
def fill(model: nn.Module, weights: list[tuple[str, slice, Callable[[], Tensor]]]) -> None:
    """Read `weights`, as `load` returns them, into a GPT on the meta device. Rows that pad the vocabulary become 0."""
    eager.to_empty(model)
    model.tie_weights()
    for p in (model.transformer.wte.weight, *model.lm_head.parameters()):
        p[model.config.vocab_size :] = 0
    for name, rows, read in weights:  # one at a time: beside the model, memory holds one tensor
        model.get_parameter(name)[rows] = read()


def to_transformers(config: GPTConfig, state: dict[str, Tensor], **changes):
    """A model of transformers, of the family that fits, that computes the same as a GPT with `config` and `state`.

    Vocabulary padding is stripped, and missing biases become zeros. `changes` go to its config. It attends across
    documents, also if the GPT does not. Raises UserError if no family computes what the GPT computes.
    """
    name = families.of(config, "to_transformers (fusedgpt/interchange/pretrained.py)")
    found = families.weights(config, state, name)
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    attention = {key: changes.pop(key) for key in ("attn_implementation",) if key in changes}
    own = AutoConfig.for_model(**families.content(config, name) | families.NO_ENDS | changes)
    theirs = AutoModelForCausalLM.from_config(own, dtype=found["transformer.wte.weight"].dtype, **attention)
    with torch.no_grad():
        for each, place in families.places(families.completed(config, name), name).items():
            theirs.get_parameter(each).copy_(place.theirs(found[place.ours]))
    return theirs


@contextlib.contextmanager
def _refused(model_type):
    """Errors in a `with` statement become one sentence that names the model: a damaged file can raise anything."""
    try:
        yield
    except Exception as error:
        *known, last = (family.title for family in families.FAMILIES.values())
        what = f"{', '.join(known)} or {last} that can be loaded, from the hub or a folder"
        how = f"{textwrap.shorten(str(error), 300)}. Name another model; without a network, name a folder"
        raise UserError(f"init_from={str(model_type)!r} is no {what}: {how}") from error


def ends(model_type: str | os.PathLike) -> set[int]:
    """The ids at which the model's texts end, as its generation_config.json says, or else its config.json."""
    with _refused(model_type):
        file = find_file(model_type, "generation_config.json") or _file(model_type, "config.json")
        found = _json(file).get("eos_token_id")
        return {each for each in (found if isinstance(found, list) else [found]) if each is not None}


def find_file(model_type: str | os.PathLike, name: str) -> str | None:
    """The path of a file of the model, downloaded if it has to be; None if the model has none.

    Raises an error, of the network or of the disk, if it cannot be reached.
    """
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
    from transformers import logging
    from transformers.utils import cached_file

    logging.disable_progress_bar()  # one progress bar per rank would garble the log
    try:
        return cached_file(model_type, name)
    except OSError as error:
        # transformers raises one without a cause if there is none; without a network, the cache may know that
        if (error.__cause__ or error.errno) and try_to_load_from_cache(str(model_type), name) is not _CACHED_NO_EXIST:
            raise
        return None


def _file(model_type, name):
    """As find_file, but raises FileNotFoundError if the model has none."""
    if (found := find_file(model_type, name)) is None:
        raise FileNotFoundError(f"it has no {name}")
    return found


def _json(file):
    return json.loads(pathlib.Path(file).read_text(encoding="utf-8"))


def _stored(model_type):
    """The tensors in the files of the model, by their names there. Only the files' headers are read."""
    for name in FILES:
        if (file := find_file(model_type, name)) is None:
            continue
        files = [file]
        if name.endswith(".json"):
            files = [_file(model_type, each) for each in _shards(_json(file), name)]
        headers = map(_of_safetensors if name.startswith(SAFETENSORS) else _of_pickle, files)
        return {each: tensor for header in headers for each, tensor in header.items()}
    raise FileNotFoundError(f"it has no {', '.join(FILES[:-1])} or {FILES[-1]}")


def _shards(index, name):
    found = sorted(set(index["weight_map"].values()))
    if outside := [each for each in found if os.path.basename(each) != each]:
        raise ValueError(f"its {name} names {shown(outside[0])}, which is not beside it")
    return found


def _of_safetensors(file):
    from safetensors import safe_open

    opened = safe_open(file, "pt")
    shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (no dict)
    return {name: Stored(shape, functools.partial(opened.get_tensor, name)) for name, shape in shapes.items()}


def _of_pickle(file):
    opened = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    return {str(name): Stored(tuple(each.shape), functools.partial(opened.get, name)) for name, each in opened.items()}


def _matched(stored, wanted):
    """The `stored` tensors by the names in `wanted`. Raises ValueError unless they are the same and have its shapes."""
    embedding, found = next(iter(wanted)), {}
    prefix = embedding.partition(".")[0]
    for name, each in stored.items():
        if name.endswith(DERIVED):
            continue
        whole = f"{prefix}.{name}"  # files of a model without its output layer leave the prefix out
        name = whole if name not in wanted and whole in wanted else name
        found[name] = each
    if TIED in found and TIED not in wanted:
        if not torch.equal(found.setdefault(embedding, found[TIED]).read(), found[TIED].read()):
            raise ValueError(f"its weights have {TIED} and another {embedding}, but its tie_word_embeddings ties them")
        del found[TIED]
    if other := sorted(wanted.keys() ^ found.keys()):
        raise ValueError(f"its weights are not those of its config: {other[0]} is in only one of the two")
    for name, place in wanted.items():
        if found[name].shape != place.shape:
            shapes = f"{name} is {found[name].shape}, and not {place.shape}"
            raise ValueError(f"its weights have other shapes than its config asks for: {shapes}")
    return found


def _read(model_type, name, tensor, place):
    with _refused(model_type):
        w = tensor.read()
        # the largest value, which is NaN if any is: unlike a sum, it is in range if all are
        if not w.is_floating_point() or not torch.linalg.vector_norm(w, math.inf).isfinite():
            raise ValueError(f"it has weights that are not finite floating-point numbers: {name}")
    return w.t() if place.transposed else w
