"""Exports, opened by transformers 4: the same logits, the same greedy text and the same ids as here.

make other-programs                                 # transformers 4 into a folder of its own
TRANSFORMERS_4=FOLDER python -m pytest -m '' tests/test_transformers_4.py
"""

import json
import os
import subprocess
import sys

import pytest
import torch

import export
from fusedgpt.data import tokenizer
from fusedgpt.runs import run_folder
from model import GPT
from tests.conftest import random_data, run, why_no_bpe
from tests.fusedgpt.data.test_tokenizer import TEXT, meta_of

TRANSFORMERS_4 = os.environ.get("TRANSFORMERS_4")
IDS = [*range(8)]
ROTARY = dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_kv_head=1, n_inner=40, tie_embeddings=False)
FAMILIES = {  # the settings of a model, by its family
    "gpt2": {},
    "llama": ROTARY | dict(rope_theta=500.0, rope_scaling=4.0, rope_context=8),
    "mistral": ROTARY | dict(window=4),
    "qwen2": ROTARY | dict(attention_bias="qkv"),
    "qwen3": ROTARY | dict(qk_norm=True, head_size=32, tie_embeddings=True),
    "phi": dict(position="rotary", rope_fraction=0.5, parallel_block=True, output_bias=True, tie_embeddings=False),
}
EXPORTS = [("byte", family) for family in FAMILIES]
EXPORTS += [(kind, "gpt2") for kind in ("char", "json", "gpt2") if kind != "gpt2" or not why_no_bpe()]
PROGRAM = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
def answer(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].tolist()
    drawn = model.generate(torch.tensor([IDS]), max_new_tokens=8, do_sample=False)[0].tolist()
    ids = tokenizer(TEXT).input_ids
    return transformers.__version__, logits, drawn, ids, tokenizer.decode(ids)
print(json.dumps(list(map(answer, sys.argv[1:]))))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TRANSFORMERS_4, reason="TRANSFORMERS_4 names no folder that has transformers 4")
def test_exports_open_in_transformers_4(tmp_path):
    # transformers 4.57 did not know the tokenizer's class, "TokenizersBackend"
    for n, (kind, family) in enumerate(EXPORTS):
        data = random_data(tmp_path / f"data-{n}", **meta_of(kind))
        export.main(run(tmp_path / f"run-{n}", data, max_iters=5, **FAMILIES[family]), tmp_path / f"hf-{n}")
    program = f"IDS, TEXT = {IDS}, {TEXT!r}\n{PROGRAM}"
    command = [sys.executable, "-c", program, *(tmp_path / f"hf-{n}" for n in range(len(EXPORTS)))]
    env = os.environ | {"PYTHONPATH": os.path.abspath(TRANSFORMERS_4)}
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env, check=True).stdout
    for n, (version, logits, drawn, ids, text) in enumerate(json.loads(said)):
        assert version.startswith("4.")
        model, idx = GPT.from_checkpoint(run_folder.load_best(tmp_path / f"run-{n}")[0]).eval(), torch.tensor([IDS])
        own = tokenizer.Tokenizer(meta_of(EXPORTS[n][0]))
        with torch.no_grad():
            ours = model(idx, idx)[0][0, :, : own.vocab_size]
        torch.testing.assert_close(torch.tensor(logits)[:, : own.vocab_size], ours, rtol=0, atol=1e-4)
        greedy = model.generate(idx, 8, temperature=0.0)[0].tolist()  # theirs ends with a text
        assert drawn == greedy[: len(drawn)] and (drawn == greedy or drawn[-1] == own.end_of_text), EXPORTS[n]
        assert ids == own.encode(TEXT) and text == TEXT, EXPORTS[n]
