"""Exports, opened by llama.cpp: they give the text that the model itself gives, and the same ids.

    make other-programs                                 # llama.cpp, as xllamacpp, into a folder of its own
    LLAMA_CPP=FOLDER python -m pytest -m '' -s tests/test_other_programs.py

It is skipped if no folder is named.
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
SIZES |= dict(max_iters=40, lr_decay_iters=40, eval_interval=40, learning_rate=5e-3, warmup_iters=10)
GPT2S = [] if why_no_bpe() else ["gpt2"]  # its BPE files may not be here
OF_GPT2S = dict(batch_size=2, max_iters=20)  # 50257 ids are slow
ROTARY = dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_kv_head=1, n_inner=160, tie_embeddings=False)
FAMILIES = {  # the settings of a model, by its family
    "llama": ROTARY | dict(rope_theta=500.0, rope_scaling=4.0, rope_context=32),
    "mistral": ROTARY | dict(window=16),
    "qwen2": ROTARY | dict(attention_bias="qkv"),
    "qwen3": ROTARY | dict(qk_norm=True, head_size=48, tie_embeddings=True),
    "phi": dict(position="rotary", rope_fraction=0.5, parallel_block=True, output_bias=True, tie_embeddings=False),
}
LLAMA_CPP = """
import json, sys, urllib.request, xllamacpp
def answer(asked):
    params = xllamacpp.CommonParams()
    params.model.path = asked["folder"] + "/model.gguf"
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_parallel = params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    def ask(where, **what):
        request = urllib.request.Request(server.listening_address + where, json.dumps(what).encode())
        return json.load(urllib.request.urlopen(request))
    def likeliest(ids):
        said = ask("/completion", prompt=ids, n_predict=1, n_probs=500, cache_prompt=False)
        found = said.get("completion_probabilities")  # none if the likeliest id ends the text
        return {each["id"]: each["logprob"] for each in found[0]["top_logprobs"]} if found else {}
    letters = dict(add_special=True, parse_special=False)  # "<|endoftext|>" in a text is text
    encoded = [ask("/tokenize", content=text, **letters)["tokens"] for text in asked["texts"]]
    decoded = [ask("/detokenize", tokens=ids)["content"] for ids in encoded]
    n = len(asked["ids"])
    likely = [likeliest(asked["ids"][:end]) for end in range(n - LAST + 1, n + 1)]
    greedy = dict(prompt=asked["prompt"], samplers=["top_k"], top_k=1)
    said = ask("/completion", n_predict=asked["new"], **greedy)
    ask("/completion", n_predict=asked["context"], **greedy)  # ended with a failed assertion
    ended = said["stop_type"] == "eos"
    return dict(text=asked["prompt"] + said["content"], likely=likely, encoded=encoded, decoded=decoded, ended=ended)
json.dump(list(map(answer, json.load(sys.stdin))), sys.stdout)
"""


def meta(kind):
    """The meta of a tokenizer whose ids SONNETS can be written in."""
    if kind.startswith("char"):
        ends = kind == "char"
        itos = sorted({c for c in SONNETS + ORDINARY if ends or c.isascii()}) + ["<|endoftext|>"] * ends
        end = {"end_of_text": len(itos) - 1} if ends else {}
        return {"tokenizer": "char", "vocab_size": len(itos), "itos": itos} | end
    return meta_of(kind)


class Trained:
    """A run on SONNETS in a tokenizer, and what its model says. family: None: GPT-2."""

    def __init__(self, folder, kind, activation, family=None):
        self.name, self.run, data = f"{family or 'gpt2'}, {kind}, {activation}", folder / "run", folder / "data"
        self.tokenizer = Tokenizer(meta(kind))
        ids = self.tokenizer.encode_text(self.known(SONNETS))
        prepare.write(data, {"train": [ids], "val": [ids]}, "sonnets", **meta(kind))
        with contextlib.redirect_stdout(io.StringIO()):
            how = SIZES | (OF_GPT2S if kind == "gpt2" else {}) | FAMILIES.get(family, {})
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

    def likeliest(self):
        """The ids of the prompt and of what the model finds likeliest after it."""
        return self.model.generate(torch.tensor([self.tokenizer.encode(PROMPT)]), NEW, temperature=0.0)[0].tolist()

    def text(self, errors="replace"):
        """The prompt and what the model finds likeliest after it, up to the end of a text. errors: of UTF-8."""
        ids, end = self.likeliest(), self.tokenizer.end_of_text
        return self.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids).decode(errors=errors)

    @torch.no_grad()
    def logits(self, activation):
        """The logits (LAST, V) of the last ids, of a model with `activation`."""
        model, ids = GPT.from_checkpoint(self.saved, activation=activation).eval(), torch.tensor([self.ids])
        return model(ids, ids)[0][0, -LAST:, : self.tokenizer.vocab_size]


def opened(packages, program, format, runs, folder):
    """Export each of the `runs`, and ask `program` about all of them. The answers, in this order.

    packages: the folder with those that the program needs.
    """
    asked = []
    for number, one in enumerate(runs):
        export.main(one.run, folder / str(number), format)
        asked.append(dict(folder=str(folder / str(number)), prompt=PROMPT, new=NEW, ids=one.ids, texts=one.texts))
        asked[-1] |= dict(context=one.model.config.block_size)
    program = f"LAST = {LAST}\n{program}"
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(packages).resolve())}
    how = dict(input=json.dumps(asked), text=True, stdout=subprocess.PIPE, cwd=folder, env=env, timeout=1800)
    return json.loads(subprocess.run([sys.executable, "-c", program], check=True, **how).stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`Trained` by tokenizer, activation and family; each is trained once."""
    return functools.cache(lambda *what: Trained(tmp_path_factory.mktemp("trained"), *what))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_llama_cpp(trained, tmp_path):
    if not (packages := os.environ.get("LLAMA_CPP")):
        pytest.skip("LLAMA_CPP names no folder that has xllamacpp")
    kinds = ("byte", "char", "char without end", "json", *GPT2S)
    runs = [trained(kind, "gelu") for kind in kinds] + [trained("byte", "gelu_tanh")]
    # llama.cpp has no window in a Llama, and Mistral is one there
    runs += [trained("byte", "gelu_tanh", family) for family in FAMILIES if family != "mistral"]
    for one, found in zip(runs, opened(packages, LLAMA_CPP, "gguf", runs, tmp_path), strict=True):
        # llama.cpp computes the tanh form, whatever the model was trained with
        ours = one.logits("gelu_tanh").log_softmax(-1)
        gap = max(
            abs(ours[at, int(id)].item() - logprob)
            for at, likely in enumerate(found["likely"])
            for id, logprob in likely.items()
            if int(id) < ours.size(1)
        )
        for text, encoded, decoded in zip(one.texts, found["encoded"], found["decoded"], strict=True):
            assert encoded == one.tokenizer.encode_text(text).tolist() and decoded == text
        assert found["ended"] == (one.tokenizer.end_of_text in one.likeliest())
        assert found["text"] == one.text("ignore"), one.name
        assert gap < 5e-3, one.name  # llama.cpp reads GELU from a table of float16
