"""Exports, opened by the programs that they are for: they give the text that the model itself gives, and the same ids.

    make other-programs                                 # transformers 4, into a folder of its own
    TRANSFORMERS_4=FOLDER NANOGPT=FOLDER python -m pytest -m '' -s tests/test_other_programs.py

TRANSFORMERS_4 has what `pip install --target` put there; nanoGPT's is a clone. What is not named is skipped.
transformers 5 runs in the process of the tests.
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
HERE = "transformers 5"
FOLDERS = {HERE: "", "transformers 4": os.environ.get("TRANSFORMERS_4")}
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

    def __init__(self, folder, kind, activation, family=None, **settings):
        self.name, self.run, data = f"{family or 'gpt2'}, {kind}, {activation}", folder / "run", folder / "data"
        self.tokenizer = Tokenizer(meta(kind))
        ids = self.tokenizer.encode_text(self.known(SONNETS))
        prepare.write(data, {"train": [ids], "val": [ids]}, "sonnets", **meta(kind))
        with contextlib.redirect_stdout(io.StringIO()):
            how = SIZES | (OF_GPT2S if kind == "gpt2" else {}) | FAMILIES.get(family, {}) | settings
            run(self.run, data, activation=activation, **how)
        self.model = GPT.from_checkpoint(run_folder.load_best(self.run)[0]).eval()
        self.ids = self.tokenizer.encode_text(self.known(SONNETS))[:60].tolist()
        # programs know different versions of Unicode, and split a text before a letter that they do not know
        random = ("".join(c for c in text if unicodedata.ucd_3_2_0.category(c) != "Cn") for text in random_texts(30))
        self.texts = list(map(self.known, (TEXT, ORDINARY, SONNETS[:500], f"{TEXT}<|endoftext|>", *random)))

    def known(self, text):
        """`text` without the characters that the tokenizer does not know."""
        return "".join(c for c in text if c in self.tokenizer.itos) if self.tokenizer.kind == "char" else text

    def text(self):
        """The prompt and what the model finds likeliest after it, up to the end of a text."""
        prompt, end = torch.tensor([self.tokenizer.encode(PROMPT)]), self.tokenizer.end_of_text
        ids = self.model.generate(prompt, NEW, temperature=0.0)[0].tolist()
        return self.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids).decode(errors="replace")

    @torch.no_grad()
    def logits(self):
        """The logits (LAST, V) of the last ids."""
        ids = torch.tensor([self.ids])
        return self.model(ids, ids)[0][0, -LAST:, : self.tokenizer.vocab_size]


def opened(packages, runs, folder):
    """Export each of the `runs`, and ask transformers about all of them. The answers, in this order.

    packages: the folder with transformers; empty: that of this process.
    """
    asked = []
    for number, one in enumerate(runs):
        export.main(one.run, folder / str(number))
        asked.append(dict(folder=str(folder / str(number)), prompt=PROMPT, new=NEW, ids=one.ids, texts=one.texts))
    program = f"LAST = {LAST}\n{TRANSFORMERS}"
    if not packages:
        said = io.StringIO()
        with mock.patch.object(sys, "stdin", io.StringIO(json.dumps(asked))), contextlib.redirect_stdout(said):
            exec(program, {})
        return json.loads(said.getvalue())
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(packages).resolve())}
    how = dict(input=json.dumps(asked), text=True, stdout=subprocess.PIPE, cwd=folder, env=env, timeout=1800)
    return json.loads(subprocess.run([sys.executable, "-c", program], check=True, **how).stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`Trained` by tokenizer, activation and family; each is trained once."""
    return functools.cache(lambda *what: Trained(tmp_path_factory.mktemp("trained"), *what))


def compare_with_transformers(version, runs, folder):
    """Texts, logits and ids of the `runs`, as this transformers has them and as the models have them."""
    pytest.importorskip("transformers", minversion="5")
    for one, found in zip(runs, opened(FOLDERS[version], runs, folder), strict=True):
        ours = one.logits().numpy()
        gap = np.abs(np.array(found["logits"])[:, : ours.shape[1]] - ours).max()  # theirs may have more ids
        assert found["version"].startswith(version[-1])
        assert found["text"] == one.text() and gap < 1e-4, one.name
        for text, encoded, decoded in zip(one.texts, found["encoded"], found["decoded"], strict=True):
            # for any qwen2, AutoTokenizer of transformers 5 normalizes and splits texts as Qwen does
            if not (version == HERE and one.name.startswith("qwen2")):
                assert encoded == one.tokenizer.encode(text) and decoded == text
        assert found["end"] == one.tokenizer.end_of_text


def test_transformers_5_says_what_the_model_says(tmp_path):
    quick = dict(max_iters=20, eval_interval=20, batch_size=4)
    compare_with_transformers(HERE, [Trained(tmp_path / "trained", "byte", "gelu_tanh", "llama", **quick)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", FOLDERS)
def test_transformers(version, trained, tmp_path):
    # transformers 4.57 did not know the tokenizer's class, "TokenizersBackend"
    if FOLDERS[version] is None:
        pytest.skip("TRANSFORMERS_4 names no folder that has transformers 4")
    runs = [trained(kind, "gelu") for kind in ("byte", "char", "char without end", "json", *GPT2S)]
    runs += [trained("byte", "gelu_tanh", family) for family in FAMILIES]
    compare_with_transformers(version, runs, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "activation"),
    [("char", "gelu"), ("char", "gelu_tanh"), *((each, "gelu") for each in GPT2S)],
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
    assert text.partition("<|endoftext|>")[0] == one.text()
