"""Write a GPT as a GGUF file, which llama.cpp and the programs built on it (Ollama, LM Studio) load."""

import dataclasses
import json
import os
import pathlib
import re

import torch
from torch import Tensor

from fusedgpt import rotary
from fusedgpt.data.tokenizer import END_OF_TEXT, Tokenizer
from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError
from fusedgpt.interchange import families, tokenizer_json
from fusedgpt.interchange.tokenizer_json import byte_level_name

FILE = "model.gguf"
ACTIVATION = "gelu_tanh"  # llama.cpp computes this form in any GPT-2 and Phi
ARCHITECTURES = {"mistral": "llama", "phi": "phi2"}  # GGUF's names of architectures, if not those of the families
# GGUF's names of our modules
NAMES = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}
NAMES |= {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
NAMES |= {"attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"}
NAMES |= {"mlp.c_gate": "ffn_gate", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
JOINED = ("gpt2", "phi2")  # architectures that have queries, keys and values in one matrix
POSITIONS = "transformer.wpe.weight"
GPT2S_BPES = ("gpt2", "r50k_base")  # tiktoken's, which split a text into words as GPT-2 does
# the steps in which a tokenizer.json splits a text into words, and whether it looks up whole words before it merges; by
# llama.cpp's names. The patterns are those of the tokenizers of Llama 3 and Qwen
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLITS = {
    "gpt-2": ([LEVEL | {"use_regex": True}], False),
    "smollm": ([DIGITS, LEVEL | {"use_regex": True}], False),
    "llama-bpe": ([SPLIT | {"pattern": {"Regex": WORDS % r"\p{N}{1,3}"}}, LEVEL], True),
    "qwen2": ([SPLIT | {"pattern": {"Regex": WORDS % r"\p{N}"}}, LEVEL], False),
}
INSTEAD = "name --format=hf, or prepare the data with --tokenizer=gpt2, byte or train:2048"
# llama.cpp refuses a BPE without merges; this one joins no text in UTF-8
NO_MERGE = " ".join(2 * [byte_level_name(b"\xff")])
STEP = 256  # llama.cpp rounds contexts up to a multiple of this
# num_predict leaves the other half of the context for a prompt, because a GPT-2 has no position beyond
MODELFILE = '''FROM ./{file}
TEMPLATE """{{{{ .Prompt }}}}"""
PARAMETER num_ctx {context}
PARAMETER num_predict {half}
'''


def write(folder: pathlib.Path, config: GPTConfig, state: dict[str, Tensor], meta: dict, name: str) -> None:
    """Write model.gguf, and a Modelfile for `ollama create`, for a GPT with `config` and `state`.

    meta: of its data, which has the tokenizer. Weights are in float32, without vocabulary padding. Raises UserError if
    the package gguf is missing, or if llama.cpp has no such model or tokenizer.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError("--format=gguf needs the package gguf: pip install gguf") from error
    family = families.of(config, "gguf_file.write (fusedgpt/interchange/gguf_file.py)")
    architecture = ARCHITECTURES.get(family, family)
    _require_computed(config, architecture)
    weights = families.weights(config, state, family)
    tokenizer = _tokenizer(meta, config.vocab_size, gguf.TokenType)
    context = -(-config.block_size // STEP) * STEP
    if POSITIONS in weights:
        # otherwise llama.cpp would abort at the first token beyond the context
        weights[POSITIONS] = torch.cat([w := weights[POSITIONS], w[-1:].expand(context - len(w), -1)])
    file = gguf.GGUFWriter(os.path.join(folder, FILE), architecture)
    file.add_name(name)
    _add_dimensions(file, config, context)
    file.add_file_type(gguf.LlamaFileType.ALL_F32)
    file.add_tokenizer_model(tokenizer["model"])
    file.add_tokenizer_pre(tokenizer["pre"])
    file.add_token_list(tokenizer["tokens"])
    file.add_token_types(tokenizer["types"])
    if tokenizer["merges"]:
        file.add_token_merges(tokenizer["merges"])
    file.add_add_bos_token(False)  # training put none before a text
    if tokenizer["end"] is not None:
        file.add_bos_token_id(tokenizer["end"])
        file.add_eos_token_id(tokenizer["end"])
    for theirs, w in _tensors(config, weights, architecture):
        file.add_tensor(theirs, w.float().contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    modelfile = MODELFILE.format(file=FILE, context=config.block_size, half=max(1, config.block_size // 2))
    (folder / "Modelfile").write_text(modelfile, encoding="utf-8")


def _require_computed(config, architecture):
    window = min(filter(None, config.windows), default=config.block_size)
    lacking = {
        f"window={config.window}, which is less than block_size={config.block_size}": window < config.block_size,
        f"rope_scaling={config.rope_scaling}": config.rope_scaling != 1 and architecture != "llama",
        f"qk_norm={config.qk_norm}": config.qk_norm and architecture == "phi2",
        "attention_bias": config.biases["qkv"] and architecture == "qwen3",
    }
    if found := [what for what, there in lacking.items() if there]:
        raise UserError(f"llama.cpp computes no {architecture} with {found[0]}: name --format=hf")


def _add_dimensions(file, config, context):
    file.add_context_length(context)
    file.add_embedding_length(config.n_embd)
    file.add_block_count(config.n_layer)
    file.add_feed_forward_length(config.inner)
    file.add_head_count(config.n_head)
    if config.norm == "rmsnorm":
        file.add_layer_norm_rms_eps(config.norm_eps)
    else:
        file.add_layer_norm_eps(config.norm_eps)
    if config.position == "rotary":
        file.add_head_count_kv(config.kv_heads)
        file.add_key_length(config.head_channels)
        file.add_value_length(config.head_channels)
        file.add_vocab_size(config.vocab_size)
        file.add_rope_dimension_count(config.rotated)
        file.add_rope_freq_base(config.rope_theta)


def _tensors(config, weights, architecture):
    """The tensors of a GGUF file by name, in the layout of llama.cpp."""
    heads = dict(q=config.n_head, k=config.kv_heads, v=config.kv_heads)
    for ours, w in weights.items():
        name = _name(ours)
        if "attn_qkv" in name and architecture not in JOINED:
            parts = w.split([number * config.head_channels for number in heads.values()])
            for (each, number), part in zip(heads.items(), parts):
                # in a llama, llama.cpp rotates channel 2 i with 2 i + 1, and not i with i + R / 2
                paired = part.unflatten(0, (number, 2, -1)).transpose(1, 2).flatten(0, 2)
                yield name.replace("qkv", each), paired if architecture == "llama" and each != "v" else part
        else:
            yield name, w
    if architecture == "phi2" and config.tie_embeddings:
        yield "output.weight", weights["transformer.wte.weight"]
    if config.rope_scaling != 1:  # by how much each frequency is divided
        plain = rotary.frequencies(dataclasses.replace(config, rope_scaling=1.0))
        yield "rope_freqs.weight", plain / rotary.frequencies(config)


def _name(ours):
    """'blk.3.attn_qkv.bias' for 'transformer.h.3.attn.c_attn.bias'."""
    layer, module, kind = re.fullmatch(r"(?:transformer\.)?(?:h\.(\d+)\.)?(.+)\.(weight|bias)", ours).groups()
    return f"{f'blk.{layer}.' if layer else ''}{NAMES[module]}.{kind}"


def _tokenizer(meta, size, types):
    """The fields of a GGUF file for the tokenizer of `meta`, and a model of `size` ids."""
    ours = Tokenizer(meta)
    found = {"pre": "gpt-2"} | (_one_id_each(ours) if ours.kind in ("byte", "char") else _bpe(ours))
    texts = [*ours.tokens, *[None] * (size - len(ours.tokens))]
    # no token of a text has a blank in its name, so these stay apart
    tokens = [f"[unused {id}]" if text is None else found["name"](text) for id, text in enumerate(texts)]
    kinds = [types.UNUSED if text is None else types.NORMAL for text in texts]
    for each in meta["tokenizer_json"].get("added_tokens") or [] if ours.kind == "json" else ():
        tokens[each["id"]] = each["content"]
        kinds[each["id"]] = types.CONTROL if each["special"] else types.USER_DEFINED
    if (end := ours.end_of_text) is not None:
        tokens[end], kinds[end] = END_OF_TEXT if texts[end] is None else texts[end].decode(), types.CONTROL
    return found | dict(tokens=tokens, types=kinds, end=end)


def _one_id_each(ours):
    if ours.end_of_text is None:
        # llama.cpp's BPEs must have an id that ends a text: without one, it takes the id 11. Its tokenizer for RWKV
        # needs none. It takes the longest token that fits, and never ends if only a part of a character is known
        if any(len(text or b"") > 1 for text in ours.tokens):
            raise UserError(f"llama.cpp has characters beyond ASCII only in data with an end of text: {INSTEAD}")
        return dict(model="rwkv", name=lambda text: "".join(f"\\x{byte:02x}" for byte in text), merges=[])
    merges = {}  # of the bytes of a character, from the first on; a dict, because characters share some
    for text in filter(None, ours.tokens):
        symbols = byte_level_name(text)
        if text != END_OF_TEXT.encode():
            merges |= {f"{symbols[:n]} {symbols[n]}": None for n in range(1, len(symbols))}
    return dict(model="gpt2", name=byte_level_name, merges=[*merges] or [NO_MERGE])


def _bpe(ours):
    """A byte-level BPE that splits a text into words in a way that llama.cpp knows."""
    if ours.kind != "json" and ours.kind not in GPT2S_BPES:
        raise UserError(f"the tokenizer {ours.kind} cannot be written as GGUF, only {', '.join(GPT2S_BPES)}: {INSTEAD}")
    if ours.end_of_text is None:  # llama.cpp would take the id 11, and end a text at it
        raise UserError(f"llama.cpp can have a BPE only if an id ends a text, and this data has none: {INSTEAD}")
    content = json.loads(tokenizer_json.tokenizer(ours.meta, 1).backend_tokenizer.to_str())
    model, pre = content["model"], "gpt-2"
    if ours.kind == "json" and (pre := _words(content)) is None:
        raise UserError(f"the tokenizer.json of the data splits texts as llama.cpp does not: {INSTEAD}")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return dict(model="gpt2", pre=pre, name=byte_level_name, merges=merges or [NO_MERGE])


def _words(content):
    """llama.cpp's name for how a tokenizer.json splits a text into words; None if it does not know it."""
    split = content["pre_tokenizer"] or {}
    steps = [step | {"trim_offsets": None} for step in split.get("pretokenizers", [split])]
    # llama.cpp has no NFC, but nearly all texts are in it
    if content["model"]["type"] != "BPE" or content["normalizer"] not in (None, {"type": "NFC"}):
        return None
    for name, (known, ignores_merges) in SPLITS.items():
        same = steps == [step | {"trim_offsets": None} for step in known]
        if same and ignores_merges == bool(content["model"].get("ignore_merges")):
            return name
    return None
