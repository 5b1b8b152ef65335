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


def elsewhere(folder):
    """An index that names a file outside of the folder."""
    names = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))


def code_of_a_tokenizer(folder):
    (folder / "evil.py").write_text(f"{EVIL}class X: pass\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({**MODULES, "tokenizer_class": "X"}))


def code(folder):
    """A config.json that names code, which may compute something else than the family of its model_type."""
    code_of_a_tokenizer(folder)
    change(folder, **MODULES)


def pickled(folder):
    """The file that torch.save may write in place of the weights."""
    (folder / WEIGHTS).unlink()
    return folder / "pytorch_model.bin"


REFUSED = {
    "code": (code, "has auto_map=.*, code of its own, which is never run here"),
    "10**9 layers": (lambda f: change(f, n_layer=10**9), "its config means 12,704,000,003,168 weights"),
    "cut short": (lambda f: os.truncate(f / WEIGHTS, 10**5), "incomplete metadata, file not fully covered"),
    "a long header": (lambda f: (f / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) * 10**5), "header too large"),
    # missing weights were drawn at random
    "another name": (lambda f: reweigh(f, lambda w: {n: w[n] for n in w if n != ONE} | {"x": w[ONE]}), ONE),
    # the other weights were left out, for a model of one of two layers
    "fewer layers": (lambda f: change(f, n_layer=1), "transformer.h.1.attn.c_attn.bias"),
    "NaN": (lambda f: reweigh(f, lambda w: w | {ONE: w[ONE].log()}), f"not finite floating-point numbers: {ONE}"),
    "a pickle": (lambda f: pickled(f).write_bytes(pickle.dumps(["x" * 10**5, Evil()])), "Weights only load failed"),
    "torch's pickle": (lambda f: torch.save(["x" * 10**5, Evil()], pickled(f)), "Weights only load failed"),
    "outside": (elsewhere, "names '../outside.safetensors', which is not beside it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_trap_is_refused(trap, name):
    spring, said = REFUSED[name]
    spring(trap)
    with pytest.raises(UserError, match=said) as refused:
        GPT.from_pretrained(str(trap))
    assert len(str(refused.value)) < 600
    assert not os.path.exists("pwned")


def with_masks(weights):
    """As OpenAI's own files have them."""
    masks = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 32, 32) for n in range(2)}
    return weights | masks | {f"transformer.h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}


TAKEN = {
    "custom code of a tokenizer": code_of_a_tokenizer,
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
