"""Write a GPT as a GGUF file, which llama.cpp and the programs built on it (Ollama, LM Studio) load."""

import json
import os
import pathlib
import re
from typing import Any

import torch
from torch import Tensor

from fusedgpt.data.tokenizer import END_OF_TEXT, Tokenizer, byte_characters
from fusedgpt.dimensions import GPTConfig, require_known
from fusedgpt.errors import UserError
from fusedgpt.interchange import families, tokenizer_json

FILE = "model.gguf"
ACTIVATION = "gelu_tanh"  # llama.cpp computes this form in any GPT-2
# GGUF's names of GPT-2's modules
NAMES = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
NAMES |= {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"}
NAMES |= {"ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
POSITIONS = "transformer.wpe.weight"
BYTES = byte_characters()
GPT2S_BPES = ("gpt2", "r50k_base")  # tiktoken's, which split a text into words as GPT-2 does
INSTEAD = "name --format=hf, or prepare the data with --tokenizer=gpt2, byte or train:2048"
# llama.cpp refuses a BPE without merges. This one joins no text, because no text in UTF-8 has the byte 255
NO_MERGE = f"{BYTES[255]} {BYTES[255]}"
STEP = 256  # llama.cpp rounds contexts up to a multiple of this
# num_predict leaves the other half of the context for a prompt, because a GPT-2 has no position beyond
MODELFILE = '''FROM ./{file}
TEMPLATE """{{{{ .Prompt }}}}"""
PARAMETER num_ctx {context}
PARAMETER num_predict {half}
'''


def write(folder: pathlib.Path, config: GPTConfig, state: dict[str, Tensor], meta: dict, name: str) -> None:
    """Write model.gguf, and a Modelfile for `ollama create`, for a GPT with `config` and `state`.

    meta: of its data, which has the tokenizer. Weights are written in float32, without vocabulary padding; missing
    biases become zeros, and the last position is repeated up to a context that llama.cpp can have. Raises UserError if
    the package gguf is missing, if llama.cpp cannot compute the model, or if it cannot have the ids of the tokenizer.
    """
    gguf = package()
    require_known(
        config, "gguf_file.write (fusedgpt/interchange/gguf_file.py), which makes a GPT-2,", ("document_start",)
    )
    weights = families.weights(config, state, "gpt2")
    tokenizer = _tokenizer(meta, config.vocab_size, gguf.TokenType)
    context = -(-config.block_size // STEP) * STEP
    # otherwise llama.cpp would abort at the first token beyond the context
    weights[POSITIONS] = torch.cat([w := weights[POSITIONS], w[-1:].expand(context - len(w), -1)])
    file = gguf.GGUFWriter(os.path.join(folder, FILE), "gpt2")
    file.add_name(name)
    file.add_context_length(context)
    file.add_embedding_length(config.n_embd)
    file.add_block_count(config.n_layer)
    file.add_feed_forward_length(4 * config.n_embd)
    file.add_head_count(config.n_head)
    file.add_layer_norm_eps(1e-5)
    file.add_file_type(gguf.LlamaFileType.ALL_F32)
    file.add_tokenizer_model(tokenizer["model"])
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(tokenizer["tokens"])
    file.add_token_types(tokenizer["types"])
    if tokenizer["merges"]:
        file.add_token_merges(tokenizer["merges"])
    file.add_add_bos_token(False)  # training put none before a text
    if tokenizer["end"] is not None:
        file.add_bos_token_id(tokenizer["end"])
        file.add_eos_token_id(tokenizer["end"])
    for ours, w in weights.items():
        file.add_tensor(_name(ours), w.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    modelfile = MODELFILE.format(file=FILE, context=config.block_size, half=max(1, config.block_size // 2))
    (folder / "Modelfile").write_text(modelfile, encoding="utf-8")


def package() -> Any:
    """The package gguf. Raises UserError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UserError("--format=gguf needs the package gguf: pip install gguf") from error
    return gguf


def _name(ours):
    """'blk.3.attn_qkv.bias' for 'transformer.h.3.attn.c_attn.bias'."""
    layer, module, kind = re.fullmatch(r"transformer\.(?:h\.(\d+)\.)?(.+)\.(weight|bias)", ours).groups()
    return f"{f'blk.{layer}.' if layer else ''}{NAMES[module]}.{kind}"


def _tokenizer(meta, size, types):
    """The fields of a GGUF file for the tokenizer of `meta`, and a model of `size` ids."""
    ours = Tokenizer(meta)
    found = _one_id_each(ours) if ours.kind in ("byte", "char") else _bpe(ours)
    texts = [*ours.tokens, *[None] * (size - len(ours.tokens))]
    # no token of a text has a blank in its name, so these stay apart
    tokens = [f"[unused {id}]" if text is None else found["name"](text) for id, text in enumerate(texts)]
    kinds = [types.UNUSED if text is None else types.NORMAL for text in texts]
    if ours.end_of_text is not None:
        tokens[ours.end_of_text], kinds[ours.end_of_text] = END_OF_TEXT, types.CONTROL
    if len(set(tokens)) < len(tokens):
        twice = next(token for id, token in enumerate(tokens) if token in tokens[:id])
        raise UserError(f"two ids of the tokenizer have the text {twice!r}, which GGUF cannot hold: {INSTEAD}")
    return dict(model=found["model"], tokens=tokens, types=kinds, merges=found["merges"], end=ours.end_of_text)


def _byte_level(text):
    return "".join(BYTES[byte] for byte in text)


def _one_id_each(ours):
    """Bytes, or characters."""
    if ours.end_of_text is None:
        # llama.cpp's BPEs must have an id that ends a text: without one, it takes the id 11. Its tokenizer for RWKV
        # needs none. It takes the longest token that fits, and never ends if only a part of a character is known
        if any(len(text or b"") > 1 for text in ours.tokens):
            raise UserError(
                "llama.cpp can have characters beyond ASCII only if an id ends a text, and this data has none:"
                f" {INSTEAD}"
            )
        return dict(model="rwkv", name=lambda text: "".join(f"\\x{byte:02x}" for byte in text), merges=[])
    merges = {}  # of the bytes of a character, from the first on; a dict, because characters share some
    for text in ours.tokens if ours.kind == "char" else ():
        symbols = _byte_level(text) if text is not None and len(text.decode()) == 1 else ""
        merges |= {f"{symbols[:n]} {symbols[n]}": None for n in range(1, len(symbols))}
    return dict(model="gpt2", name=_byte_level, merges=[*merges] or [NO_MERGE])


def _bpe(ours):
    """A byte-level BPE that splits a text into words as GPT-2 does."""
    if ours.kind != "json" and ours.kind not in GPT2S_BPES:
        raise UserError(f"the tokenizer {ours.kind} cannot be written as GGUF, only {', '.join(GPT2S_BPES)}: {INSTEAD}")
    content = json.loads(tokenizer_json.tokenizer(ours.meta, 1).backend_tokenizer.to_str())
    model, split = content["model"], content["pre_tokenizer"]
    if ours.kind == "json":
        others = [each["content"] for each in content["added_tokens"] if each["id"] != ours.end_of_text]
        wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        is_gpt2s = isinstance(split, dict) and wanted.items() <= split.items() and content["normalizer"] is None
        if not is_gpt2s or model["type"] != "BPE" or model.get("ignore_merges") or others:
            raise UserError(f"the tokenizer.json of the data does not split texts as GPT-2 does: {INSTEAD}")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return dict(model="gpt2", name=_byte_level, merges=merges or [NO_MERGE])
