"""Exports, opened by the programs that they are for: they give the text that the model itself gives, and the same ids.

    TRANSFORMERS_4=PYTHON LLAMA_CPP=PYTHON NANOGPT=FOLDER python -m pytest -s tests/test_other_programs.py

PYTHON is an interpreter whose environment has transformers 4, or llama-cpp-python; FOLDER is a clone of nanoGPT. What
is not named is skipped. transformers 5 runs in the environment of the tests.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

import export
from fusedgpt.data import prepare
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.runs import run_folder
from model import GPT
from tests.conftest import ROOT, run
from tests.fusedgpt.data.test_tokenizer import TEXT, meta_of
from tests.fusedgpt.interchange.test_tokenizer_json import ORDINARY, random_texts

SONNETS = (ROOT / "eval" / "sonnets.txt").read_text() + 9 * TEXT
PROMPT = "Shall I"
NEW = 40  # tokens after the prompt; both fit into the context
SIZES = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=16)
SIZES |= dict(max_iters=300, lr_decay_iters=300, eval_interval=300, learning_rate=5e-3, warmup_iters=20)
PYTHONS = {"transformers 5": sys.executable, "transformers 4": os.environ.get("TRANSFORMERS_4")}
TRANSFORMERS = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
asked = json.load(sys.stdin)
folder, ids = asked["folder"], torch.tensor([asked["ids"]])
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
generate = pipeline("text-generation", model=folder, device="cpu")
with torch.no_grad():
    logits = model(ids).logits[0].tolist()
text = generate(asked["prompt"], max_new_tokens=asked["new"], do_sample=False)[0]["generated_text"]
encoded = [tokenizer(text).input_ids for text in asked["texts"]]
decoded = [tokenizer.decode(each) for each in encoded]
about = dict(version=transformers.__version__, end=tokenizer.eos_token_id)
json.dump(dict(text=text, logits=logits, encoded=encoded, decoded=decoded, **about), sys.stdout)
"""
LLAMA_CPP = """
import json, sys, llama_cpp
asked = json.load(sys.stdin)
exact = dict(type_k=0, type_v=0, flash_attn=False)  # keys and values are kept in float32
options = dict(n_ctx=asked["context"], logits_all=True, n_threads=1, verbose=False, **exact)
model = llama_cpp.Llama(asked["folder"] + "/model.gguf", **options)
def ids(text):
    return model.tokenize(text.encode(), add_bos=True, special=False)
encoded = [ids(text) for text in asked["texts"]]
decoded = [model.detokenize(each).decode() for each in encoded]
model.eval(asked["ids"])
logits = model.scores[: len(asked["ids"])].tolist()
greedy = dict(max_tokens=asked["new"], temperature=0.0, repeat_penalty=1.0)
text = asked["prompt"] + model(asked["prompt"], **greedy)["choices"][0]["text"]
about = dict(version=llama_cpp.__version__, end=model.token_eos())
json.dump(dict(text=text, logits=logits, encoded=encoded, decoded=decoded, **about), sys.stdout)
"""


def meta(kind):
    """The meta of a tokenizer whose ids SONNETS can be written in."""
    if kind.startswith("char"):
        itos = sorted({c for c in SONNETS + ORDINARY if kind == "char" or c.isascii()})
        itos += ["<|endoftext|>"] if kind == "char" else []
        return {"tokenizer": "char", "vocab_size": len(itos), "itos": itos} | (
            {"end_of_text": len(itos) - 1} if kind == "char" else {}
        )
    if kind == "byte without end":
        return {"tokenizer": "byte", "vocab_size": 256}
    return meta_of(kind)


class Trained:
    """A run on SONNETS in a tokenizer, and what its model says."""

    def __init__(self, folder, kind, activation):
        self.kind, self.run, data = kind, folder / "run", folder / "data"
        self.tokenizer = Tokenizer(meta(kind))
        ids = self.tokenizer.encode_text(self.known(SONNETS))
        prepare.write(data, {"train": [ids], "val": [ids]}, "sonnets", **meta(kind))
        with contextlib.redirect_stdout(io.StringIO()):
            run(self.run, data, activation=activation, **SIZES)
        self.model = GPT.from_checkpoint(run_folder.load_best(self.run)[0]).eval()
        self.ids = self.tokenizer.encode_text(self.known(SONNETS))[:60].tolist()
        self.texts = list(map(self.known, (TEXT, ORDINARY, SONNETS[:500], f"{TEXT}<|endoftext|>", *random_texts(30))))

    def known(self, text):
        """`text` without the characters that the tokenizer does not know."""
        return "".join(c for c in text if c in self.tokenizer.itos) if self.tokenizer.kind == "char" else text

    @torch.no_grad()
    def logits(self):
        return self.model(torch.tensor([self.ids]), torch.tensor([self.ids]))[0][0, :, : self.tokenizer.vocab_size]

    def text(self):
        """The prompt and what the model finds likeliest after it, up to the end of a text."""
        ids = self.model.generate(torch.tensor([self.tokenizer.encode(PROMPT)]), NEW, temperature=0.0)[0].tolist()
        end = self.tokenizer.end_of_text
        return self.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids).decode(errors="replace")

    def opened(self, python, program, folder):
        """What a program says of the export in `folder`."""
        asked = dict(folder=str(folder), prompt=PROMPT, new=NEW, ids=self.ids, texts=self.texts)
        asked |= dict(context=self.model.config.block_size)
        how = dict(input=json.dumps(asked), text=True, stdout=subprocess.PIPE, cwd=folder, timeout=500)
        found = json.loads(subprocess.run([python, "-c", program], check=True, **how).stdout)
        gap = np.abs(np.array(found["logits"])[:, : self.tokenizer.vocab_size] - self.logits().numpy()).max()
        return found | {"gap": gap}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`Trained` by tokenizer and activation; each is trained once."""
    return functools.cache(lambda kind, activation: Trained(tmp_path_factory.mktemp("trained"), kind, activation))


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", ["byte", "byte without end", "char", "json", "gpt2"])
def test_transformers(kind, python, trained, tmp_path):
    # transformers 4.57 did not know the tokenizer's class, "TokenizersBackend"
    if not PYTHONS[python]:
        pytest.skip("TRANSFORMERS_4 names no interpreter that has transformers 4")
    one = trained(kind, "gelu")
    export.main(one.run, tmp_path / "hf")
    found = one.opened(PYTHONS[python], TRANSFORMERS, tmp_path / "hf")
    print(f"transformers {found['version']}, {kind}: logits within {found['gap']:.1g}; {found['text']!r}")
    assert found["version"].startswith(python[-1])
    assert found["text"] == one.text() and found["gap"] < 1e-4
    texts = one.texts if kind != "char" else one.texts[:1]
    for text, encoded, decoded in zip(texts, found["encoded"], found["decoded"]):
        assert encoded == one.tokenizer.encode(text) and decoded == text
    assert found["end"] == one.tokenizer.end_of_text


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize("kind", ["byte", "byte without end", "char", "char without end", "json", "gpt2"])
def test_llama_cpp(kind, activation, trained, tmp_path):
    if not (python := os.environ.get("LLAMA_CPP")):
        pytest.skip("LLAMA_CPP names no interpreter that has llama-cpp-python")
    one = trained(kind, activation)
    export.main(one.run, tmp_path / "gguf", "gguf")
    found = one.opened(python, LLAMA_CPP, tmp_path / "gguf")
    print(f"llama-cpp-python {found['version']}, {kind}, {activation}: logits within {found['gap']:.1g}")
    for text, encoded, decoded in zip(one.texts, found["encoded"], found["decoded"]):
        assert encoded == one.tokenizer.encode_text(text).tolist() and decoded == text
    assert found["end"] == (-1 if one.tokenizer.end_of_text is None else one.tokenizer.end_of_text)
    assert found["text"] == one.text()
    assert found["gap"] < 5e-3  # llama.cpp reads GELU from a table of float16


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("kind", ["byte", "char", "gpt2"])
def test_nanogpts_sample_py(kind, activation, trained, tmp_path):
    if not (nanogpt := os.environ.get("NANOGPT")):
        pytest.skip("NANOGPT names no clone of nanoGPT")
    one = trained(kind, activation)
    export.main(one.run, tmp_path / "out", "nanogpt")
    # nanoGPT looks for meta.pkl in data/ of the folder where it runs
    for name in ("model.py", "sample.py", "configurator.py"):
        (tmp_path / name).symlink_to(pathlib.Path(nanogpt).resolve() / name)
    if kind != "gpt2":
        (tmp_path / "data" / "data").mkdir(parents=True)
        (tmp_path / "out" / "meta.pkl").rename(tmp_path / "data" / "data" / "meta.pkl")
    flags = ["--out_dir=out", "--device=cpu", "--top_k=1", "--num_samples=1", f"--max_new_tokens={NEW}"]
    command = [sys.executable, "sample.py", *flags, f"--start={PROMPT}"]
    said = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True, timeout=500).stdout
    text = said.partition("...\n")[2].removesuffix("\n---------------\n")
    print(f"nanoGPT, {kind}, {activation}: {text!r}")
    assert text.partition("<|endoftext|>")[0] == one.text()
