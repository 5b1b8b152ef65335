"""GGUF files, read by the package gguf and tokenized as llama.cpp does; tests/test_other_programs.py asks llama.cpp."""

import itertools
import math
import sys

import pytest
import torch

from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.errors import UserError
from fusedgpt.interchange import gguf_file
from model import GPT, GPTConfig
from tests.fusedgpt.data.test_tokenizer import TEXT, meta_of
from tests.fusedgpt.interchange.test_tokenizer_json import ORDINARY, random_texts

SHAPE = dict(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_multiple=64)


def written(folder, meta, **shape):
    """The tensors and the fields of the file that was written of a random model, and the model."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=meta["vocab_size"], **{**SHAPE, **shape}))
    gguf_file.write(folder, model.config, model.state_dict(), meta, "sonnets")
    read = gguf.GGUFReader(folder / "model.gguf")
    fields = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in read.fields.items()}
    return {each.name: each.data for each in read.tensors}, fields, model


def ids_of_llama_cpp(fields, text):
    """The ids of `text`: words of GPT-2's pattern, bytes joined by merges, each piece looked up or dropped."""
    from tokenizers import pre_tokenizers

    ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(fields["merges"])}
    tokens = {token: id for id, token in enumerate(fields["tokens"])}
    found = []
    for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text):
        parts = list(word)
        while len(parts) > 1:
            rank, at = min((ranks.get(pair, math.inf), at) for at, pair in enumerate(itertools.pairwise(parts)))
            if rank == math.inf:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [tokens[part] for part in parts if part in tokens]
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_tensors_are_the_models_without_padding(bias, tmp_path):
    tensors, fields, model = written(tmp_path, meta_of("json"), bias=bias)
    state = model.state_dict()
    assert len(tensors) == 2 + 2 + 2 * 12 and all(tensor.dtype == "float32" for tensor in tensors.values())
    assert tensors["token_embd.weight"].shape == (300, 16) and model.config.padded_vocab_size == 320
    for theirs, ours in {
        "token_embd.weight": state["transformer.wte.weight"][:300],
        "output_norm.weight": state["transformer.ln_f.weight"],
        "blk.0.attn_qkv.weight": state["transformer.h.0.attn.c_attn.weight"],
        "blk.0.attn_norm.weight": state["transformer.h.0.ln_1.weight"],
        "blk.1.attn_output.weight": state["transformer.h.1.attn.c_proj.weight"],
        "blk.1.ffn_norm.weight": state["transformer.h.1.ln_2.weight"],
        "blk.1.ffn_up.weight": state["transformer.h.1.mlp.c_fc.weight"],
        "blk.1.ffn_down.weight": state["transformer.h.1.mlp.c_proj.weight"],
        "blk.1.ffn_down.bias": state.get("transformer.h.1.mlp.c_proj.bias", torch.zeros(16)),
    }.items():
        assert torch.equal(torch.tensor(tensors[theirs]), ours), theirs
    # llama.cpp gives a model at least 256 positions, and ended with a failed assertion at the ninth token
    positions = torch.tensor(tensors["position_embd.weight"])
    assert torch.equal(positions[:8], state["transformer.wpe.weight"]) and torch.equal(positions[255], positions[7])
    assert [fields[f"gpt2.{name}"] for name in ("context_length", "embedding_length", "block_count")] == [256, 16, 2]
    assert [fields[f"gpt2.{name}"] for name in ("feed_forward_length", "attention.head_count")] == [64, 2]
    assert fields["general.architecture"] == "gpt2" and fields["add_bos_token"] is False
    modelfile = (tmp_path / "Modelfile").read_text()
    assert "FROM ./model.gguf\n" in modelfile and "num_ctx 8\n" in modelfile and '"""{{ .Prompt }}"""' in modelfile


@pytest.mark.parametrize("kind", ["byte", "char", "json", "r50k_base"])
def test_ids_are_ours(kind, tmp_path, shorter):
    if kind == "r50k_base":  # GPT-2's, by its other name
        shorter(kind, special_tokens={"<|endoftext|>": 400})
        meta = {"tokenizer": kind, "vocab_size": 440, "end_of_text": 400}  # nanoGPT pads GPT-2's ids
    else:
        meta = meta_of(kind)
    _, fields, _ = written(tmp_path, meta)
    ours = Tokenizer(meta)
    for text in (TEXT, ORDINARY, *random_texts(30)):
        text = "".join(c for c in text if c in meta["itos"]) if kind == "char" else text
        assert ids_of_llama_cpp(fields, text) == ours.encode_text(text).tolist()
    assert fields["model"] == "gpt2" and fields["pre"] == "gpt-2" and len(fields["tokens"]) == meta["vocab_size"]
    assert fields["eos_token_id"] == fields["bos_token_id"] == ours.end_of_text
    assert fields["tokens"][ours.end_of_text] == "<|endoftext|>" and fields["token_type"][ours.end_of_text] == 3
    assert all(each == 5 for each in fields["token_type"][ours.vocab_size :])  # unused


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_without_an_end_of_text_no_id_ends_one(kind, tmp_path):
    # llama.cpp's BPEs would take id 11: in Shakespeare's characters that is a 3, and no text would go on after one
    itos = [chr(code) for code in range(32, 127)]
    alone = {"byte": {"vocab_size": 256}, "char": {"vocab_size": len(itos), "itos": itos}}
    meta = {"tokenizer": kind} | alone[kind]
    _, fields, _ = written(tmp_path, meta)
    assert fields["model"] == "rwkv" and "eos_token_id" not in fields and "merges" not in fields
    read = [bytes.fromhex(token.removeprefix("\\x")) for token in fields["tokens"]]
    assert read == Tokenizer(meta).tokens


def test_ids_without_text_have_names_of_their_own(tmp_path):
    # llama.cpp ends with a failed assertion if two tokens have one name
    meta = {"tokenizer": "char", "vocab_size": 5, "itos": ["a", None, "b", None, None], "end_of_text": 4}
    tokens = written(tmp_path, meta)[1]["tokens"]
    assert tokens == ["a", "[unused 1]", "b", "[unused 3]", "<|endoftext|>"]


LLAMA = dict(position="rotary", norm="rmsnorm", mlp="swiglu", bias=False, n_kv_head=1, tie_embeddings=False)
PHI = dict(position="rotary", rope_fraction=0.5, parallel_block=True, output_bias=True)


def test_a_llama_has_its_pairs_side_by_side(tmp_path):
    # llama.cpp rotates channels 2 i and 2 i + 1 of a llama together, a GPT i and i + 4
    tensors, fields, model = written(tmp_path, meta_of("byte"), **LLAMA, rope_scaling=4.0, rope_context=16)
    q = model.transformer.h[1].attn.c_attn.weight[:16].view(2, 8, 16)
    paired = torch.tensor(tensors["blk.1.attn_q.weight"]).view(2, 8, 16)
    for i in range(4):
        assert torch.equal(paired[:, 2 * i], q[:, i]) and torch.equal(paired[:, 2 * i + 1], q[:, i + 4])
    k, its = model.transformer.h[1].attn.c_attn.weight[16:24], torch.tensor(tensors["blk.1.attn_k.weight"])
    assert torch.equal(its[::2], k[:4]) and torch.equal(its[1::2], k[4:])
    assert torch.equal(torch.tensor(tensors["blk.1.attn_v.weight"]), model.transformer.h[1].attn.c_attn.weight[24:])
    assert torch.equal(torch.tensor(tensors["output.weight"]), model.lm_head.weight[:257])
    assert torch.equal(torch.tensor(tensors["blk.0.ffn_gate.weight"]), model.transformer.h[0].mlp.c_gate.weight)
    # wavelengths of 6, 63, 628 and 6283 tokens: below a quarter of 16 none is stretched, above 16 all are
    assert tensors["rope_freqs.weight"][1:].tolist() == [4.0, 4.0, 4.0] and 1 < tensors["rope_freqs.weight"][0] < 4
    own = {"attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 8, "context_length": 256}
    assert {name: fields[f"llama.{name}"] for name in own} == own and fields["general.architecture"] == "llama"
    assert fields["llama.rope.freq_base"] == 10000 and fields["llama.rope.dimension_count"] == 8


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("qwen2", LLAMA | dict(attention_bias="qkv")), ("qwen3", LLAMA | dict(qk_norm=True)), ("phi2", PHI)],
)
def test_other_families_have_the_rows_of_a_gpt(architecture, shape, tmp_path):
    tensors, fields, model = written(tmp_path, meta_of("byte"), **shape)
    names = ["attn_qkv"] if architecture == "phi2" else ["attn_q", "attn_k", "attn_v"]
    rows = torch.cat([torch.tensor(tensors[f"blk.0.{name}.weight"]) for name in names])
    assert torch.equal(rows, model.transformer.h[0].attn.c_attn.weight)
    assert fields["general.architecture"] == architecture
    assert ("output.bias" in tensors) == (architecture == "phi2") and "output.weight" in tensors  # which Phi must have
    if architecture == "phi2":
        assert fields["phi2.rope.dimension_count"] == 4
        assert torch.equal(torch.tensor(tensors["output.weight"]), model.transformer.wte.weight[:257])


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (LLAMA | dict(window=4), "computes no llama with window=4, which is less than block_size=8"),
        (LLAMA | dict(qk_norm=True, rope_scaling=2.0), "computes no qwen3 with rope_scaling=2.0"),
        (LLAMA | dict(qk_norm=True, attention_bias=True), "computes no qwen3 with attention_bias"),
        (PHI | dict(qk_norm=True), "computes no phi2 with qk_norm=True"),
        (LLAMA | dict(norm="layernorm"), "Llama, which is nearest, has norm='rmsnorm', and not 'layernorm'"),
    ],
)
def test_a_part_that_llama_cpp_does_not_have_is_refused(shape, said, tmp_path):
    with pytest.raises(UserError, match=said):
        written(tmp_path, meta_of("byte"), **shape)


@pytest.mark.parametrize(
    ("number", "ignore_merges", "pre"), [(r"\p{N}{1,3}", True, "llama-bpe"), (r"\p{N}", False, "qwen2")]
)
def test_the_words_of_llama_3_and_qwen_have_their_names(number, ignore_merges, pre, tmp_path):
    content = meta_of("json")["tokenizer_json"]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": gguf_file.WORDS % number}, "behavior": "Isolated", "invert": False}
    size = len(content["model"]["vocab"])
    special = content["added_tokens"][0] | {"id": size, "content": "<|im_start|>"}
    plain = special | {"id": size + 1, "content": "<tool>", "special": False}
    content = content | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}
    content |= {"added_tokens": [*content["added_tokens"], special, plain]}
    content |= {"model": content["model"] | {"ignore_merges": ignore_merges}}
    meta = meta_of("json") | {"tokenizer_json": content, "vocab_size": size + 2}
    fields = written(tmp_path, meta)[1]
    assert fields["pre"] == pre and fields["tokens"][size:] == ["<|im_start|>", "<tool>"]
    assert fields["token_type"][size:] == [3, 4]  # control, and written by users
    content["model"]["ignore_merges"] = not ignore_merges
    assert "splits texts as llama.cpp does not" in refused(tmp_path, meta)


def refused(folder, meta):
    with pytest.raises(UserError) as error:
        written(folder, meta)
    return str(error.value)


def test_what_llama_cpp_cannot_have_is_refused(tmp_path, monkeypatch):
    chars = {"tokenizer": "char", "vocab_size": 2, "itos": ["a", "é"]}
    assert "characters beyond ASCII only in data with an end of text" in refused(tmp_path, chars)
    # it was written without one, so that llama.cpp ended each text at the id 11, which is a comma in GPT-2's
    no_end = {name: value for name, value in meta_of("json").items() if name != "end_of_text"}
    assert "a BPE only if an id ends a text, and this data has none: name --format=hf" in refused(tmp_path, no_end)
    other = {"tokenizer": "cl100k_base", "vocab_size": 100277, "end_of_text": 100257}
    assert "the tokenizer cl100k_base cannot be written as GGUF, only gpt2, r50k_base" in refused(tmp_path, other)
    content = meta_of("json")["tokenizer_json"]
    split = content["pre_tokenizer"] | {"use_regex": False}
    json = meta_of("json") | {"tokenizer_json": content | {"pre_tokenizer": split}}
    assert "splits texts as llama.cpp does not: name --format=hf" in refused(tmp_path, json)
    assert "meta.pkl has no itos" in refused(tmp_path, {"tokenizer": "unknown", "vocab_size": 5})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="needs the package gguf: pip install gguf"):
        gguf_file.write(tmp_path, GPTConfig(vocab_size=5, **SHAPE), {}, {}, "sonnets")
