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
from tests.conftest import Evil, assert_same_bytes, flags, hugging_face, small
from tests.launch import ROOT, fails

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
    "10**12 positions": (lambda f: change(f, n_positions=10**12), "its config means 32,000,000,027,552 weights"),
    "10**9 channels": (lambda f: change(f, n_embd=10**9), "its config means 24,000,000,125,000,000,000 weights"),
    "no layers": (lambda f: change(f, n_layer=-1), "n_layer=-1 must be 1 or more"),
    "no heads": (lambda f: change(f, n_head=0), "n_head=0 must be 1 or more"),
    "layers in words": (lambda f: change(f, n_layer="two"), "n_layer"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "must be a mapping, not list"),
    "deep": (lambda f: (f / CONFIG).write_text('{"a":' * 10**5 + "1" + "}" * 10**5), "maximum recursion depth"),
    "50 MB": (lambda f: change(f, x=["a"] * 10**7), "its config.json has 50,000,"),  # took a minute
    "no text": (lambda f: (f / CONFIG).write_bytes(b"\xff\xfe"), "not a valid JSON file"),
    "config loop": (lambda f: loop(f, CONFIG), "it has no config.json"),
    "weights loop": (lambda f: loop(f, WEIGHTS), "it has no model.safetensors, "),
    "tokenizer loop": (lambda f: loop(f, "tokenizer.json"), "tokenizer.json is a link that leads nowhere"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "it has no model.safetensors, "),
    "cut short": (lambda f: os.truncate(f / WEIGHTS, 10**5), "incomplete metadata, file not fully covered"),
    "a long header": (lambda f: replace(f, struct.pack("<Q", 2**62) * 10**5, WEIGHTS), "header too large"),
    "other shapes": (lambda f: reweigh(f, lambda w: w | {ONE: w[ONE].t().contiguous()}), "have other shapes than"),
    # missing weights were drawn at random
    "one lacking": (lambda f: reweigh(f, lambda w: {n: w[n] for n in w if n != ONE}), "weights, but its files have "),
    "another name": (
        lambda f: reweigh(f, lambda w: {n: w[n] for n in w if n != ONE} | {"x": w[ONE]}),
        f"they lack {ONE}",
    ),
    # the other weights were left out, for a model of one of two layers
    "fewer layers": (lambda f: change(f, n_layer=1), "they have transformer.h.1.attn.c_attn.bias too"),
    "an extra": (lambda f: reweigh(f, lambda w: w | {"lora": torch.ones(9)}), "they have lora too"),
    "int8": (lambda f: reweigh(f, lambda w: {n: w[n].char() for n in w}), "its weights are no floating-point numbers"),
    "NaN": (lambda f: reweigh(f, lambda w: w | {ONE: w[ONE].log()}), f"weights that are not finite: {ONE}"),
    "a pickle": (lambda f: replace(f, pickle.dumps(["x" * 10**5, Evil()])), "Weights only load failed"),
    "torch's pickle": (lambda f: torch.save(["x" * 10**5, Evil()], pickled(f)), "Weights only load failed"),
    "outside": (elsewhere, "names '../outside.safetensors', which is not beside it"),
}


def pickled(folder):
    """The file that torch.save may write in place of the weights."""
    (folder / WEIGHTS).unlink()
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "50 MB")) for n in REFUSED])
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
    "float64": lambda f: reweigh(f, lambda w: {name: each.double() for name, each in w.items()}),
    "masks": lambda f: reweigh(f, with_masks),
    "a pickle of weights": lambda f: torch.save(dict(load_file(f / WEIGHTS)), pickled(f)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_harmless_is_loaded_and_runs_no_code(trap, good, name):
    TAKEN[name](trap)
    found = GPT.from_pretrained(str(trap)).state_dict()
    tokenizer_json.read(str(trap))
    assert_same_bytes(found, GPT.from_pretrained(str(good)).state_dict())
    assert not os.path.exists("pwned")


def test_the_scripts_end_in_one_sentence(trap, tmp_path, data):
    change(trap, n_layer=10**9)
    settings = flags(small(tmp_path / "out", data, init_from=str(trap)))
    for error in (fails("train.py", *settings), fails("sample.py", f"--init_from={trap}", "--device=cpu")):
        assert "its config means 12,704,000,003,168 weights" in error
    assert not list((tmp_path / "out").glob("*.pt"))
    shutil.copytree(trap, tmp_path / "hub")
    with_code(tmp_path / "hub")
    fails("sample.py", f"--init_from={tmp_path / 'hub'}", "--device=cpu")
    assert not (ROOT / "pwned").exists()
