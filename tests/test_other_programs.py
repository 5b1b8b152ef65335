"""Exports, opened by the programs that they are for: they give the text that the model itself gives, and the same ids.

    TRANSFORMERS_4=PYTHON LLAMA_CPP=PYTHON NANOGPT=FOLDER python -m pytest -s tests/test_other_programs.py

PYTHON is an interpreter whose environment has transformers 4, or llama-cpp-python; FOLDER is a clone of nanoGPT. What
is not named is skipped. transformers 5 runs in the process of the tests.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import subprocess
import sys
import unicodedata
from unittest import mock

import numpy as np
import pytest
import torch

import export
from fusedgpt.data import prepare
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.runs import run_folder
from model import GPT
from tests.conftest import run, why_no_bpe
from tests.fusedgpt.data.test_tokenizer import TEXT, meta_of
from tests.fusedgpt.interchange.test_tokenizer_json import ORDINARY, random_texts
from tests.launch import ROOT

SONNETS = (ROOT / "eval" / "sonnets.txt").read_text() + 9 * TEXT
PROMPT = "Shall I"
LAST = 5  # positions at which logits are compared
NEW = 40  # tokens after the prompt; both fit into the context
SIZES = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=16)
SIZES |= dict(max_iters=300, lr_decay_iters=300, eval_interval=300, learning_rate=5e-3, warmup_iters=20)
GPT2S = [] if why_no_bpe() else ["gpt2"]  # its BPE files may not be here
OF_GPT2S = dict(batch_size=2, max_iters=200)  # 50257 ids are slow
ROTARY = dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_kv_head=1, n_inner=160, tie_embeddings=False)
FAMILIES = {  # the settings of a model, by its family
    "llama": ROTARY | dict(rope_theta=500.0, rope_scaling=4.0, rope_context=32),
    "mistral": ROTARY | dict(window=16),
    "qwen2": ROTARY | dict(attention_bias="qkv"),
    "qwen3": ROTARY | dict(qk_norm=True, head_size=48, tie_embeddings=True),
    "phi": dict(position="rotary", rope_fraction=0.5, parallel_block=True, output_bias=True, tie_embeddings=False),
}
HERE = "transformers 5"
PYTHONS = {HERE: sys.executable, "transformers 4": os.environ.get("TRANSFORMERS_4")}
TRANSFORMERS = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
def answer(asked):
    folder = asked["folder"]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    generate = pipeline("text-generation", model=folder, device="cpu")
    with torch.no_grad():
        logits = model(torch.tensor([asked["ids"]])).logits[0, -LAST:].tolist()
    text = generate(asked["prompt"], max_new_tokens=asked["new"], do_sample=False)[0]["generated_text"]
    encoded = [tokenizer(text).input_ids for text in asked["texts"]]
    decoded = [tokenizer.decode(each) for each in encoded]
    about = dict(version=transformers.__version__, end=tokenizer.eos_token_id)
    return dict(text=text, logits=logits, encoded=encoded, decoded=decoded, **about)
json.dump(list(map(answer, json.load(sys.stdin))), sys.stdout)
"""
LLAMA_CPP = """
import json, sys, llama_cpp
def answer(asked):
    exact = dict(type_k=0, type_v=0, flash_attn=False)  # keys and values are kept in float32
    options = dict(n_ctx=0, logits_all=True, n_threads=1, verbose=False, **exact)
    model = llama_cpp.Llama(asked["folder"] + "/model.gguf", **options)
    encoded = [model.tokenize(text.encode(), add_bos=True, special=False) for text in asked["texts"]]
    decoded = [model.detokenize(each).decode() for each in encoded]
    model.eval(asked["ids"])
    logits = model.scores[len(asked["ids"]) - LAST : len(asked["ids"])].tolist()
    greedy = dict(max_tokens=asked["new"], temperature=0.0, repeat_penalty=1.0)
    text = asked["prompt"] + model(asked["prompt"], **greedy)["choices"][0]["text"]
    model(asked["prompt"], **greedy | dict(max_tokens=asked["context"]))  # ended with a failed assertion
    about = dict(version=llama_cpp.__version__, end=model.token_eos())
    return dict(text=text, logits=logits, encoded=encoded, decoded=decoded, **about)
json.dump(list(map(answer, json.load(sys.stdin))), sys.stdout)
"""


def meta(kind):
    """The meta of a tokenizer whose ids SONNETS can be written in."""
    if kind.startswith("char"):
        ends = kind == "char"
        itos = sorted({c for c in SONNETS + ORDINARY if ends or c.isascii()}) + ["<|endoftext|>"] * ends
        end = {"end_of_text": len(itos) - 1} if ends else {}
        return {"tokenizer": "char", "vocab_size": len(itos), "itos": itos} | end
    if kind == "byte without end":
        return {"tokenizer": "byte", "vocab_size": 256}
    return meta_of(kind)


class Trained:
    """A run on SONNETS in a tokenizer, and what its model says. family: None: GPT-2."""

    def __init__(self, folder, kind, activation, family=None, **settings):
        self.name, self.run, data = f"{family or 'gpt2'}, {kind}, {activation}", folder / "run", folder / "data"
        self.tokenizer = Tokenizer(meta(kind))
        ids = self.tokenizer.encode_text(self.known(SONNETS))
        prepare.write(data, {"train": [ids], "val": [ids]}, "sonnets", **meta(kind))
        with contextlib.redirect_stdout(io.StringIO()):
            how = SIZES | (OF_GPT2S if kind == "gpt2" else {}) | FAMILIES.get(family, {}) | settings
            run(self.run, data, activation=activation, **how)
        self.saved, self.activation = run_folder.load_best(self.run)[0], activation
        self.model = GPT.from_checkpoint(self.saved).eval()
        self.ids = self.tokenizer.encode_text(self.known(SONNETS))[:60].tolist()
        # programs know different versions of Unicode, and split a text before a letter that they do not know
        random = ("".join(c for c in text if unicodedata.ucd_3_2_0.category(c) != "Cn") for text in random_texts(30))
        self.texts = list(map(self.known, (TEXT, ORDINARY, SONNETS[:500], f"{TEXT}<|endoftext|>", *random)))

    def known(self, text):
        """`text` without the characters that the tokenizer does not know."""
        return "".join(c for c in text if c in self.tokenizer.itos) if self.tokenizer.kind == "char" else text

    def text(self, errors="replace"):
        """The prompt and what the model finds likeliest after it, up to the end of a text. errors: of UTF-8."""
        ids = self.model.generate(torch.tensor([self.tokenizer.encode(PROMPT)]), NEW, temperature=0.0)[0].tolist()
        end = self.tokenizer.end_of_text
        return self.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids).decode(errors=errors)

    @torch.no_grad()
    def gap(self, logits, activation):
        """The largest difference of a program's last logits, which may have more ids, from those with `activation`."""
        model, ids = GPT.from_checkpoint(self.saved, activation=activation).eval(), torch.tensor([self.ids])
        ours = model(ids, ids)[0][0, -LAST:, : self.tokenizer.vocab_size]
        return np.abs(np.array(logits)[:, : self.tokenizer.vocab_size] - ours.numpy()).max()


def opened(python, program, format, runs, folder):
    """Export each of the `runs`, and ask `program` about all of them. The answers, in this order."""
    asked = []
    for number, one in enumerate(runs):
        export.main(one.run, folder / str(number), format)
        asked.append(dict(folder=str(folder / str(number)), prompt=PROMPT, new=NEW, ids=one.ids, texts=one.texts))
        asked[-1] |= dict(context=one.model.config.block_size)
    program = f"LAST = {LAST}\n{program}"
    if python == sys.executable:
        said = io.StringIO()
        with mock.patch.object(sys, "stdin", io.StringIO(json.dumps(asked))), contextlib.redirect_stdout(said):
            exec(program, {})
        return json.loads(said.getvalue())
    how = dict(input=json.dumps(asked), text=True, stdout=subprocess.PIPE, cwd=folder, timeout=1800)
    return json.loads(subprocess.run([python, "-c", program], check=True, **how).stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`Trained` by tokenizer, activation and family; each is trained once."""
    return functools.cache(lambda *what: Trained(tmp_path_factory.mktemp("trained"), *what))


def compare_with_transformers(python, runs, folder):
    """Texts, logits and ids of the `runs`, as this transformers has them and as the models have them."""
    pytest.importorskip("transformers", minversion="5")
    for one, found in zip(runs, opened(PYTHONS[python], TRANSFORMERS, "hf", runs, folder), strict=True):
        gap = one.gap(found["logits"], one.activation)
        print(f"transformers {found['version']}, {one.name}: logits within {gap:.1g}")
        print(f"    {found['text']!r}")
        assert found["version"].startswith(python[-1])
        assert found["text"] == one.text() and gap < 1e-4
        for text, encoded, decoded in zip(one.texts, found["encoded"], found["decoded"], strict=True):
            # for any qwen2, AutoTokenizer of transformers 5 normalizes and splits texts as Qwen does
            if not (python == HERE and one.name.startswith("qwen2")):
                assert encoded == one.tokenizer.encode(text) and decoded == text
        assert found["end"] == one.tokenizer.end_of_text


def test_transformers_5_says_what_the_model_says(tmp_path):
    quick = dict(max_iters=20, eval_interval=20, batch_size=4)
    compare_with_transformers(HERE, [Trained(tmp_path / "trained", "byte", "gelu_tanh", "llama", **quick)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", PYTHONS)
def test_transformers(python, trained, tmp_path):
    # transformers 4.57 did not know the tokenizer's class, "TokenizersBackend"
    if not PYTHONS[python]:
        pytest.skip("TRANSFORMERS_4 names no interpreter that has transformers 4")
    runs = [trained(kind, "gelu") for kind in ("byte", "byte without end", "char", "json", *GPT2S)]
    runs += [trained("byte", "gelu_tanh", family) for family in FAMILIES]
    compare_with_transformers(python, runs, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_llama_cpp(trained, tmp_path):
    if not (python := os.environ.get("LLAMA_CPP")):
        pytest.skip("LLAMA_CPP names no interpreter that has llama-cpp-python")
    kinds = ("byte", "byte without end", "char", "char without end", "json", *GPT2S)
    runs = [trained(kind, "gelu") for kind in kinds] + [trained("byte", "gelu_tanh")]
    # llama.cpp has no window in a Llama, and Mistral is one there
    runs += [trained("byte", "gelu_tanh", family) for family in FAMILIES if family != "mistral"]
    for one, found in zip(runs, opened(python, LLAMA_CPP, "gguf", runs, tmp_path), strict=True):
        gap, form = (one.gap(found["logits"], activation) for activation in (one.activation, "gelu_tanh"))
        within = f"logits within {gap:.1g}, and {form:.1g} of GELU in the tanh form"
        print(f"llama-cpp-python {found['version']}, {one.name}: {within}")
        print(f"    {found['text']!r}")
        for text, encoded, decoded in zip(one.texts, found["encoded"], found["decoded"], strict=True):
            assert encoded == one.tokenizer.encode_text(text).tolist() and decoded == text
        assert found["end"] == (-1 if one.tokenizer.end_of_text is None else one.tokenizer.end_of_text)
        assert found["text"] == one.text("ignore")
        assert form < 5e-3  # llama.cpp reads GELU from a table of float16


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "activation"),
    [("byte", "gelu"), ("byte", "gelu_tanh"), ("char", "gelu"), *((each, "gelu") for each in GPT2S)],
)
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
    print(f"nanoGPT, {one.name}:\n    {text!r}")
    assert text.partition("<|endoftext|>")[0] == one.text()
