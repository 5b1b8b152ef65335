"""Write a run for other programs: as a model of transformers, or as a checkpoint of nanoGPT.

    python export.py RUN [FOLDER]
    python export.py RUN --format=nanogpt

The model loses its vocabulary padding. Biases that it does not have become zeros, except for nanoGPT. The logits stay
the same, but for rounding; if the other program has only another form of GELU, the export says so. A model card is
written beside the model.
"""

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
    # hf: for transformers, and for --init_from here; nanogpt: for nanoGPT's sample.py
    format: Literal["hf", "nanogpt"] = "hf"


PLACES = ("out_dir", "folder")  # what arguments without a name set

if __name__ == "__main__":
    answer_help(Settings(), sys.argv[1:], __doc__, places=PLACES)  # before PyTorch, which takes seconds to import

import torch
from safetensors import SafetensorError

from fusedgpt.data import dataset
from fusedgpt.data.tokenizer import end_of_text
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.interchange import families, nanogpt, tokenizer_json
from fusedgpt.interchange.pretrained import to_transformers
from fusedgpt.machine import files
from fusedgpt.runs import checkpoint, run_folder
from fusedgpt.runs.metrics import losses_at, record_of, section
from model import GPT

CARD = """---
pipeline_tag: text-generation
{head}
---

# {title}

A {family} that was trained with fusedGPT. {use}

| | |
|---|---|
{rows}
"""
USE = {
    "hf": """To load it with transformers:

```python
from transformers import pipeline

generate = pipeline("text-generation", model="PATH_OR_HUB_ID")
print(generate("The", do_sample=True, top_k=200)[0]["generated_text"])
```""",
    "nanogpt": """To sample it with nanoGPT, copy `meta.pkl`, if there is one, to `data/DATA` of nanoGPT. There:

```
python sample.py --out_dir=FOLDER
```""",
}
SAME = 2e-4  # of the largest logit: what rounding in another order may change


def model_card(out_dir: pathlib.Path, saved: dict, meta: dict | None, model: GPT, family: str, format: str) -> str:
    """README.md for `model`, of the checkpoint `saved` of the run in `out_dir`. meta: its data's, if known."""
    environment, c = section(record_of(out_dir), "environment"), model.config
    alone = dataclasses.replace(c, vocab_multiple=1)  # without padding
    found = {
        "family": family,
        "data set": data_of(saved),
        "tokenizer": meta and f"{meta['tokenizer']}, {c.vocab_size:,} ids",
        "parameters": f"{alone.num_params:,}",
        "shape": f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, context of {c.block_size} tokens",
        "attention": c.packed and f"within documents in training, across them in {family}: give it one at a time",
        "iterations": f"{saved['iter_num']:,}",
        **losses_at(out_dir, saved["iter_num"]),
        "trained on": environment.get("device"),
        "PyTorch": environment.get("torch"),
        "commit of fusedGPT": environment.get("commit"),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in found.items() if value)
    tags = f"tags: [{family.lower().replace('-', '')}, fusedgpt]"  # the Hub finds it by them
    head = "\n".join([*["library_name: transformers"] * (format == "hf"), tags])
    use = USE[format].replace("DATA", data_of(saved))
    return CARD.format(head=head, title=out_dir.resolve().name, family=family, use=use, rows=rows)


def data_of(saved: dict) -> str:
    """The name of the data that a checkpoint was trained on, without its path on this machine."""
    return pathlib.Path(str(saved["config"].get("dataset", ""))).name


def main(out_dir: str | os.PathLike, folder: str | os.PathLike, format="hf") -> None:
    """Export the run in `out_dir` to `folder`.

    Raises UserError if there is no run, the folder cannot be written, or the format cannot hold the model.
    """
    out_dir, folder = pathlib.Path(out_dir), pathlib.Path(folder)
    saved, _ = run_folder.load_best(out_dir)
    model, meta = GPT.from_checkpoint(saved), None
    try:
        meta = dataset.meta_of_checkpoint(saved)
    except UserError as error:  # a nanoGPT checkpoint only names its data, which may not be here
        print(f"no tokenizer is written: {error}")
    with files.new_folder(folder) as new:
        end = meta and end_of_text(meta)
        theirs = to_transformers(model.config, model.state_dict(), bos_token_id=end, eos_token_id=end)
        require_same_logits(model, theirs)
        WRITE[format](new, model, theirs, meta, saved)
        family = families.FAMILIES[theirs.config.model_type].title
        card = model_card(out_dir, saved, meta, model, family, format)
        (new / "README.md").write_text(card, encoding="utf-8")
    if checkpoint.is_nanogpts(saved):
        print(checkpoint.NANOGPTS_ACTIVATION)
    use = USE[format].replace("DATA", data_of(saved)).replace("PATH_OR_HUB_ID", str(folder))
    print(f"wrote {folder}. {use.replace('FOLDER', str(folder.absolute()))}")


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
        title = families.FAMILIES[theirs.config.model_type].title
        why = "model.py computes something that it does not, so no other program would compute this model"
        what = f"the logits of {title} in transformers differ from those of this model by up to {gap:.2g}"
        raise UserError(f"{what}: {why}")


def write_hf(folder, model, theirs, meta, saved):
    """Write the files of transformers, and meta.json for sample.py."""
    if meta is not None:
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        try:
            tokenizer_json.save(tokenizer_json.tokenizer(meta, model.config.block_size), folder)
        except UserError as error:
            print(f"no tokenizer is written: {error}")
    # by default transformers generates 256 more tokens, but the model has no positions beyond its context
    theirs.generation_config.max_length = model.config.block_size
    try:
        theirs.save_pretrained(folder)
    except SafetensorError as error:  # a write failed
        raise UserError(f"cannot write {folder}: {error}") from error
    file = folder / "config.json"
    # transformers 4 does not read the keys that 5 writes for rotary positions
    content = json.loads(file.read_text(encoding="utf-8")) | families.content(model.config, theirs.config.model_type)
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(file, weights)  # safetensors lets only the owner read them


def write_nanogpt(folder, model, theirs, meta, saved):
    checkpoint.save(folder / "ckpt.pt", nanogpt.checkpoint(model.config, model.state_dict(), saved, data_of(saved)))
    if meta is not None and meta["tokenizer"] != "unknown" and (ids := nanogpt.characters(meta)):
        (folder / "meta.pkl").write_bytes(pickle.dumps(ids))
    if model.config.activation != nanogpt.ACTIVATION:
        trained = f"this model was trained with {model.config.activation}: its logits and texts may differ"
        print(f"nanoGPT computes activation={nanogpt.ACTIVATION}, and {trained}")


WRITE = {"hf": write_hf, "nanogpt": write_nanogpt}

if __name__ == "__main__":
    with one_sentence():
        s = configure(Settings(), sys.argv[1:], __doc__, places=PLACES)
        main(s.out_dir, s.folder or os.path.join(s.out_dir, s.format), s.format)
