"""Files of models: in parts, in bfloat16, as pickles, damaged; read without more memory than the model needs."""

import json
import os
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusedgpt.errors import UserError
from fusedgpt.interchange import pretrained
from model import GPT
from tests.conftest import assert_same_bytes, hugging_face
from tests.fusedgpt.interchange.test_families import GPT2, MODELS, SIZES

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def llama(tmp_path):
    """The folder of a Llama with an output layer of its own."""
    hugging_face(tmp_path / "llama", "llama", **SIZES)
    return tmp_path / "llama"


def in_parts(folder):
    """Write the weights as two files and an index."""
    weights = load_file(folder / WEIGHTS)
    names = [{name: f"model-0000{1 + n % 2}-of-00002.safetensors"} for n, name in enumerate(sorted(weights))]
    places = {name: file for each in names for name, file in each.items()}
    for file in set(places.values()):
        save_file({name: w for name, w in weights.items() if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / WEIGHTS).unlink()


def pickled(folder, **how):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin", **how)
    (folder / WEIGHTS).unlink()


def rewritten(folder, function):
    save_file(function(load_file(folder / WEIGHTS)), folder / WEIGHTS)


FORMS = {
    "in parts": in_parts,
    "a pickle": pickled,
    "a pickle as of 2020": lambda f: pickled(f, _use_new_zipfile_serialization=False),  # mmap refused it
    "float64": lambda f: rewritten(f, lambda w: {n: w[n].double() for n in w}),
    "frequencies": lambda f: rewritten(f, lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": w[Q] + 0}),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_file_is_the_same_model(llama, form):
    before = GPT.from_pretrained(llama).state_dict()
    FORMS[form](llama)
    assert_same_bytes(GPT.from_pretrained(llama).state_dict(), before)


def test_files_of_a_model_without_its_output_layer(tmp_path):
    # they leave out the beginning of each name, as those of openai-community/gpt2 do
    hugging_face(tmp_path, **GPT2)
    before = GPT.from_pretrained(tmp_path).state_dict()
    rewritten(tmp_path, lambda weights: {name.removeprefix("transformer."): w for name, w in weights.items()})
    assert_same_bytes(GPT.from_pretrained(tmp_path).state_dict(), before)


def test_an_output_layer_that_is_tied_may_be_in_the_file_if_it_is_the_embedding(tmp_path):
    hugging_face(tmp_path, "qwen3", **MODELS["qwen3"][1])
    embedding = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    before = GPT.from_pretrained(tmp_path).state_dict()
    rewritten(tmp_path, lambda weights: weights | {"lm_head.weight": embedding.clone()})
    assert_same_bytes(GPT.from_pretrained(tmp_path).state_dict(), before)
    # safetensors' save_model keeps one name of a shared tensor, and may keep this one
    shared = {"lm_head.weight": embedding.clone()}
    rewritten(tmp_path, lambda weights: {n: w for n, w in weights.items() if "embed_tokens" not in n} | shared)
    assert_same_bytes(GPT.from_pretrained(tmp_path).state_dict(), before)
    rewritten(
        tmp_path, lambda weights: weights | {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1}
    )
    with pytest.raises(UserError, match=r"have lm_head.weight and another model.embed_tokens.weight, but its tie_"):
        GPT.from_pretrained(tmp_path)


def test_bfloat16_is_kept_if_it_is_asked_for(llama):
    rewritten(llama, lambda weights: {name: w.bfloat16() for name, w in weights.items()})
    stored = load_file(llama / WEIGHTS)
    kept = GPT.from_pretrained(llama, {"vocab_multiple": 64}, dtype=torch.bfloat16)
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    wte = kept.transformer.wte.weight
    assert torch.equal(wte[:101], stored["model.embed_tokens.weight"])
    assert wte.shape == (128, 64) and not wte[101:].any()
    trained = GPT.from_pretrained(llama, {"vocab_multiple": 64})
    assert_same_bytes({n: w.bfloat16() for n, w in trained.state_dict().items()}, kept.state_dict())
    assert trained.lm_head.weight.dtype == torch.float32


def index(folder, weight_map):
    in_parts(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


REFUSED = {  # by what is said: what is done to the folder
    f"{Q} is (64, 64, 1), and not (64, 64)": lambda f: rewritten(f, lambda w: w | {Q: w[Q][..., None]}),
    "it has no absent.safetensors": lambda f: index(f, {Q: "absent.safetensors"}),
    "it has no config.json": lambda f: os.remove(f / "config.json"),
    "Expecting property name": lambda f: in_parts(f) or (f / INDEX).write_text("{"),
    "object has no attribute 'shape'": lambda f: (
        torch.save({"a": 1}, f / "pytorch_model.bin") or os.remove(f / WEIGHTS)
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_folder_that_is_damaged_is_one_sentence(llama, said):
    REFUSED[said](llama)
    with pytest.raises(UserError, match=r"is no GPT-2, Llama, .* or Phi that can be loaded") as refused:
        GPT.from_pretrained(llama)
    assert said in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_files_that_cannot_be_reached_are_not_said_to_be_absent(cached, llama):
    # it was "it has no model.safetensors" if only the network was down
    shutil.copy(llama / "config.json", cached.files)
    with pytest.raises(UserError, match=r"init_from='owner/name' is no .*couldn't connect.*; without a network, name"):
        GPT.from_pretrained("owner/name")
    shutil.copy(llama / WEIGHTS, cached.files)
    assert_same_bytes(GPT.from_pretrained("owner/name").state_dict(), GPT.from_pretrained(llama).state_dict())


def test_weights_are_read_one_at_a_time(llama, monkeypatch):
    # all weights of the file were in memory at once
    alive, read = weakref.WeakSet(), pretrained._read

    def watched(*args):
        assert not alive
        alive.add(tensor := read(*args))
        return tensor

    monkeypatch.setattr(pretrained, "_read", watched)
    GPT.from_pretrained(llama)


@pytest.mark.parametrize(
    ("generation", "own", "found"),
    [
        ({"eos_token_id": [2, 7]}, 3, {2, 7}),
        ({"eos_token_id": 2}, 3, {2}),
        (None, 3, {3}),
        ({}, 3, set()),
        (None, None, set()),
    ],
)
def test_a_text_ends_at_each_id_that_the_model_names(generation, own, found, tmp_path):
    # Qwen3 and Llama-3-instruct name several ends, and texts went on after all but one
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": own}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert pretrained.ends(tmp_path) == found
