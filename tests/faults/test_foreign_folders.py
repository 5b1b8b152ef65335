"""Folders in Hugging Face's format with traps are refused in one sentence, or loaded whole. Their code never runs."""

import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusedgpt.errors import UserError
from fusedgpt.interchange import tokenizer_json
from model import GPT
from tests.conftest import Evil, assert_same_bytes, hugging_face

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
ONE = "transformer.h.0.attn.c_attn.weight"
EVIL = "import os; os.system('touch pwned')\n"
MODULES = {"auto_map": {name: ["evil.X", "evil.X"] for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    hugging_face(folder, n_layer=2, n_head=2, n_embd=32, vocab_size=65, n_positions=32)
    return folder


@pytest.fixture
def trap(good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(good, tmp_path / "trap")


def change(folder, **config):
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | config))


def reweigh(folder, function):
    """Write what `function` makes of the weights."""
    save_file(function(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def replace(folder, content, name="pytorch_model.bin"):
    """Replace the weights by `content`."""
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(content)


def elsewhere(folder):
    """An index that names a file outside of the folder."""
    names = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))


def loop(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)


def code_alone(folder):
    (folder / "evil.py").write_text(f"{EVIL}class X: pass\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({**MODULES, "tokenizer_class": "X"}))


def with_code(folder):
    """A config.json that names code, which may compute something else than the family of its model_type."""
    code_alone(folder)
    change(folder, **MODULES)


REFUSED = {
    "code": (with_code, "has auto_map=.*, code of its own, which is never run here"),
    "another architecture": (lambda f: change(f, model_type="bert"), "model_type='bert', which can be gpt2, llama, "),
    "quantized": (
        lambda f: change(f, quantization_config={"quant_method": "gptq"}),
        "has quantization_config=.*, quantized weights",
    ),
    "10**9 layers": (lambda f: change(f, n_layer=10**9), "its config means 12,704,000,003,168 weights"),
    "10**12 ids": (lambda f: change(f, vocab_size=10**12), "its config means 32,000,000,026,496 weights"),
    "no layers": (lambda f: change(f, n_layer=-1), "n_layer=-1 must be 1 or more"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "has no attribute"),
    "deep": (lambda f: (f / CONFIG).write_text('{"a":' * 10**5 + "1" + "}" * 10**5), "maximum recursion depth"),
    "config loop": (lambda f: loop(f, CONFIG), "it has no config.json"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "it has no model.safetensors, "),
    "cut short": (lambda f: os.truncate(f / WEIGHTS, 10**5), "incomplete metadata, file not fully covered"),
    "a long header": (lambda f: replace(f, struct.pack("<Q", 2**62) * 10**5, WEIGHTS), "header too large"),
    "other shapes": (lambda f: reweigh(f, lambda w: w | {ONE: w[ONE].t().contiguous()}), "have other shapes than"),
    # missing weights were drawn at random
    "another name": (
        lambda f: reweigh(f, lambda w: {n: w[n] for n in w if n != ONE} | {"x": w[ONE]}),
        f"{ONE} is in only one of the two",
    ),
    # the other weights were left out, for a model of one of two layers
    "fewer layers": (lambda f: change(f, n_layer=1), "transformer.h.1.attn.c_attn.bias is in only one of the two"),
    "an extra": (lambda f: reweigh(f, lambda w: w | {"lora": torch.ones(9)}), "lora is in only one of the two"),
    "int8": (lambda f: reweigh(f, lambda w: {n: w[n].char() for n in w}), "not finite floating-point numbers"),
    "NaN": (lambda f: reweigh(f, lambda w: w | {ONE: w[ONE].log()}), f"not finite floating-point numbers: {ONE}"),
    "a pickle": (lambda f: replace(f, pickle.dumps(["x" * 10**5, Evil()])), "mmap can only be used with files"),
    "torch's pickle": (lambda f: torch.save(["x" * 10**5, Evil()], pickled(f)), "Weights only load failed"),
    "outside": (elsewhere, "names '../outside.safetensors', which is not beside it"),
}


def pickled(folder):
    """The file that torch.save may write in place of the weights."""
    (folder / WEIGHTS).unlink()
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize("name", REFUSED)
def test_a_trap_is_refused(trap, name):
    spring, said = REFUSED[name]
    spring(trap)
    with pytest.raises(UserError, match=said) as refused:
        GPT.from_pretrained(str(trap))
        tokenizer_json.read(str(trap))
    assert len(str(refused.value)) < 600
    assert not os.path.exists("pwned")


def with_masks(weights):
    masks = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 32, 32) for n in range(2)}
    return weights | masks | {f"transformer.h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}


TAKEN = {
    "custom code of a tokenizer": code_alone,
    "a kernel of the hub": lambda f: change(f, attn_implementation="evil/kernel", _attn_implementation="evil/kernel"),
    "masks": lambda f: reweigh(f, with_masks),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_harmless_is_loaded_and_runs_no_code(trap, good, name):
    TAKEN[name](trap)
    found = GPT.from_pretrained(str(trap)).state_dict()
    tokenizer_json.read(str(trap))
    assert_same_bytes(found, GPT.from_pretrained(str(good)).state_dict())
    assert not os.path.exists("pwned")
