"""Write a run for other programs: as a model of transformers, as a GGUF file, or as a checkpoint of nanoGPT.

    python export.py RUN [FOLDER]
    python export.py RUN --format=gguf
    python export.py RUN --push=owner/name --license=mit

The model loses its vocabulary padding. Biases that it does not have become zeros, except for nanoGPT. The logits stay
the same, but for rounding; if the other program has only another form of GELU, the export says how far they are apart.
A model card is written beside the model.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import shutil
import sys
from typing import Literal

from configurator import answer_help, configure


@dataclasses.dataclass
class Settings:
    out_dir: str = "out"  # folder of the run
    folder: str = ""  # folder to write; empty: one in that of the run, named after the format
    # hf: for transformers, and for --init_from here; gguf: for llama.cpp and Ollama; nanogpt: for nanoGPT's sample.py
    format: Literal["hf", "gguf", "nanogpt"] = "hf"
    push: str = ""  # owner/name: upload the folder to the Hugging Face Hub too, where a new model is private
    license: str = ""  # licence that the model card names, by the Hub's name for it, such as mit; empty: none


PLACES = ("out_dir", "folder")  # what arguments without a name set

if __name__ == "__main__":
    answer_help(Settings(), sys.argv[1:], __doc__, places=PLACES)  # before PyTorch, which takes seconds to import

import torch
from safetensors import SafetensorError

from fusedgpt.data import dataset
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.home import ROOT
from fusedgpt.interchange import exported, families, gguf_file, nanogpt, tokenizer_json
from fusedgpt.interchange.pretrained import to_transformers
from fusedgpt.runs import checkpoint, run_folder
from fusedgpt.runs.metrics import losses_at, record_of, section
from model import GPT

CARD = """---
{head}
---

# {title}

A {family} that was trained with fusedGPT. {use}

| | |
|---|---|
{rows}
"""
HEAD = {"hf": ["library_name: transformers", "pipeline_tag: text-generation"]}  # of a card, by format
HEAD |= {"gguf": ["pipeline_tag: text-generation"], "nanogpt": []}
USE = {
    "hf": """To load it with transformers:

```python
from transformers import pipeline

generate = pipeline("text-generation", model="PATH_OR_HUB_ID")
print(generate("The", do_sample=True, top_k=200)[0]["generated_text"])
```""",
    "gguf": """To load it with llama.cpp or Ollama:

```
llama-completion -m model.gguf -no-cnv -p "The"
ollama create NAME -f Modelfile
```""",
    "nanogpt": """To sample it with nanoGPT, copy `meta.pkl`, if there is one, to `data/DATA` of nanoGPT. There:

```
python sample.py --out_dir=FOLDER
```""",
}
WORDS = {"gelu": "GELU exactly", "gelu_tanh": "GELU in GPT-2's tanh form"}
NANOGPTS_ACTIVATION = (
    "a nanoGPT checkpoint does not name its activation: it is exported with the exact GELU, nanoGPT's since May 2023."
    " For an older one, set activation_function to gelu_new in the config.json of --format=hf"
)
WITHIN_DOCUMENTS = "within documents in training, across them in {family}: give it one document at a time"
SAME = 2e-4  # of the largest logit: what rounding in another order may change


def model_card(out_dir: pathlib.Path, saved: dict, meta: dict | None, model: GPT, format: str, license: str) -> str:
    """README.md for `model`, of the checkpoint `saved` of the run in `out_dir`. meta: its data's, if known."""
    environment, c = section(record_of(out_dir), "environment"), model.config
    family = families.FAMILIES[families.of(c, "model_card (export.py)")].title
    alone = dataclasses.replace(c, vocab_multiple=1)  # without padding
    found = {
        "family": family,
        "data set": data_of(saved),
        "tokenizer": meta and f"{meta['tokenizer']}, {c.vocab_size:,} ids",
        "parameters": f"{alone.num_params:,}",
        "shape": f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, context of {c.block_size} tokens",
        "attention": c.packed and WITHIN_DOCUMENTS.format(family=family),
        "iterations": f"{saved['iter_num']:,}",
        **losses_at(out_dir, saved["iter_num"]),
        "trained on": environment.get("device"),
        "PyTorch": environment.get("torch"),
        "commit of fusedGPT": environment.get("commit"),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in found.items() if value)
    licence = [f"license: {license}"] * bool(license)
    head = "\n".join([*HEAD[format], *licence, exported.tags(family)])
    use = USE[format].replace("DATA", data_of(saved))
    return CARD.format(head=head, title=out_dir.resolve().name, family=family, use=use, rows=rows)


def data_of(saved: dict) -> str:
    """The name of the data that a checkpoint was trained on, without its path on this machine."""
    return pathlib.Path(str(saved["config"].get("dataset", ""))).name


def main(out_dir: str | os.PathLike, folder: str | os.PathLike, format="hf", push: str = "", license: str = "") -> None:
    """Export the run in `out_dir` to `folder`, and upload it if `push` names a model of the Hub.

    Raises UserError if there is no run, the folder cannot be written, or the format cannot hold the model.
    """
    out_dir, folder = pathlib.Path(out_dir), pathlib.Path(folder)
    if push:
        exported.require_upload(push)
    saved, _ = run_folder.load_best(out_dir)
    model, meta = GPT.from_checkpoint(saved), None
    try:
        meta = dataset.meta_of_checkpoint(ROOT, saved)
    except UserError as error:  # a nanoGPT checkpoint only names its data, which may not be here
        print(f"no tokenizer is written: {error}")
    with exported.replacing(folder) as new:
        WRITE[format](new, model, meta, saved)
        card = model_card(out_dir, saved, meta, model, format, license)
        (new / exported.CARD).write_text(card, encoding="utf-8", errors="backslashreplace")  # names may not be UTF-8
    if checkpoint.is_nanogpts(saved):
        print(NANOGPTS_ACTIVATION)
    use = USE[format].replace("PATH_OR_HUB_ID", str(folder)).replace("FOLDER", str(folder))
    print(f"wrote {folder}. {use.replace('DATA', data_of(saved))}")
    if push:
        print(f"uploaded to {exported.upload(folder, push)}")


def write_hf(folder, model, meta, saved):
    """Write the files of transformers, and meta.json for sample.py."""
    tokenizer = end = None
    if meta is not None:
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        try:
            tokenizer = tokenizer_json.tokenizer(meta, model.config.block_size)
            end = tokenizer.eos_token_id
        except UserError as error:
            print(f"no tokenizer is written: {error}")
    theirs = to_transformers(model.config, model.state_dict(), bos_token_id=end, eos_token_id=end)
    require_same_logits(model, theirs)
    # by default transformers generates 256 more tokens, but the model has no positions beyond its context
    theirs.generation_config.max_length = model.config.block_size
    with contextlib.chdir(folder):  # the package tokenizers takes only paths in UTF-8
        try:
            theirs.save_pretrained(".")
        except SafetensorError as error:  # a write failed
            raise UserError(f"cannot write {folder}: {error}") from error
        _tell_transformers_4(model.config)
        for weights in pathlib.Path().glob("*.safetensors"):
            shutil.copymode("config.json", weights)  # safetensors lets only the owner read them
        if tokenizer is not None:
            tokenizer_json.save(tokenizer, ".")
    if theirs.config.model_type == "qwen2":
        print("AutoTokenizer of transformers 5 splits texts as Qwen2 does: load PreTrainedTokenizerFast instead")


def _tell_transformers_4(config):
    """Write rotary positions into config.json with the keys of transformers 4 too, which does not read those of 5."""
    file = pathlib.Path("config.json")
    known = families.content(config, families.of(config, "write_hf (export.py)"))
    rope = {key: value for key, value in known.items() if key.startswith("rope_") or key == "partial_rotary_factor"}
    content = json.loads(file.read_text(encoding="utf-8")) | rope
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def require_same_logits(model, theirs):
    """Raise UserError if transformers' model of the same family computes other logits: model.py may be another now."""
    c = model.config
    ids = torch.randint(c.vocab_size, (1, min(32, c.block_size)), generator=torch.Generator().manual_seed(0))
    if c.packed:  # theirs attends across documents
        ids[ids == c.document_start] = (c.document_start + 1) % c.vocab_size
    with torch.no_grad():
        ours, other = model.eval()(ids, ids)[0][..., : c.vocab_size], theirs.eval()(ids).logits
    gap = (ours - other).abs().max()
    if not gap <= SAME * ours.abs().max():
        raise UserError(
            f"the logits of {families.FAMILIES[theirs.config.model_type].title} in transformers differ from those of"
            f" this model by up to {gap:.2g}: model.py computes something that it does not, so no other program would"
            " compute this model"
        )


def write_gguf(folder, model, meta, saved):
    if meta is None:
        raise UserError("a GGUF file needs the tokenizer of the data: put the data where the checkpoint names it")
    require_same_logits(model, to_transformers(model.config, model.state_dict()))
    gguf_file.write(folder, model.config, model.state_dict(), meta, data_of(saved))
    if (context := model.config.block_size) % gguf_file.STEP:
        print(f"llama.cpp does not stop at {context} tokens, where the model's context ends: ask for fewer, with -n")
    say_gap(model, saved, "llama.cpp", gguf_file.ACTIVATION)


def write_nanogpt(folder, model, meta, saved):
    require_same_logits(model, to_transformers(model.config, model.state_dict()))
    if meta is not None and (ids := nanogpt.characters(meta)):
        (folder / "meta.pkl").write_bytes(pickle.dumps(ids))
    checkpoint.save(folder / "ckpt.pt", nanogpt.checkpoint(model.config, model.state_dict(), saved, data_of(saved)))
    say_gap(model, saved, "nanoGPT", nanogpt.ACTIVATION)


def say_gap(model, saved, program, activation):
    """Say how far the logits of `program`, which only has this `activation`, are from those of the model."""
    c = model.config
    if c.activation == activation or c.mlp == "swiglu":  # which has no GELU
        return
    ids = torch.randint(c.vocab_size, (1, c.block_size), generator=torch.Generator().manual_seed(0))
    other = GPT.from_checkpoint(saved, activation=activation).eval()
    with torch.no_grad():  # logits of the padding are -inf
        gap = (model.eval()(ids, ids)[0] - other(ids, ids)[0])[..., : c.vocab_size].abs().max()
    print(
        f"{program} computes {WORDS[activation]}, and this model was trained with {WORDS[c.activation]}: on random ids,"
        f" logits differ by up to {gap:.1g}, so its texts may differ"
    )


WRITE = {"hf": write_hf, "gguf": write_gguf, "nanogpt": write_nanogpt}

if __name__ == "__main__":
    with one_sentence():
        s = configure(Settings(), sys.argv[1:], __doc__, places=PLACES)
        folder = s.folder or os.path.join(s.out_dir, s.format)
        if not s.folder and os.path.islink(folder):  # of a run from elsewhere: it could lead to any export
            raise UserError(f"{folder} is a link to {os.path.realpath(folder)}: remove it, or name a folder to write")
        main(s.out_dir, folder, s.format, s.push, s.license)
