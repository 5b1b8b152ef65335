"""Write a run as a Hugging Face GPT-2: the model, its tokenizer, a model card, and meta.json for sample.py.

    python export.py RUN [FOLDER]

AutoModelForCausalLM, AutoTokenizer and pipeline("text-generation") of transformers load the folder. The export strips
vocabulary padding and writes zeros for biases that the run does not have. The logits stay the same.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import sys
from typing import Any

from configurator import answer_help, configure


@dataclasses.dataclass
class Settings:
    out_dir: str = "out"  # folder of the run
    folder: str = ""  # folder to write; empty: hf in that of the run


PLACES = ("out_dir", "folder")  # what arguments without a name set

if __name__ == "__main__":
    answer_help(Settings(), sys.argv[1:], __doc__, places=PLACES)  # before PyTorch, which takes seconds to import

from safetensors import SafetensorError

from fusedgpt.data import dataset
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.home import ROOT
from fusedgpt.interchange import tokenizer_json
from fusedgpt.interchange.gpt2 import to_transformers
from fusedgpt.machine.files import lock
from fusedgpt.runs import checkpoint, run_folder
from fusedgpt.runs.metrics import losses_at, record_of, section
from model import GPT

TAGS = "tags: [gpt2, fusedgpt]"  # marks a folder as an earlier export
CARD_FILE = "README.md"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # transformers writes one file, or parts and an index
WRITTEN = (CARD_FILE, "config.json", "generation_config.json", "model*.safetensors*")
WRITTEN += ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "meta.json")
CARD = """---
library_name: transformers
pipeline_tag: text-generation
{tags}
---

# {title}

A GPT-2 that was trained with fusedGPT and can be loaded with transformers:

```python
from transformers import pipeline

generate = pipeline("text-generation", model="PATH_OR_HUB_ID")
print(generate("The", do_sample=True, top_k=200)[0]["generated_text"])
```

| | |
|---|---|
{rows}
"""

WITHIN_DOCUMENTS = "within documents in training, across them in GPT-2: give it one document at a time"
NANOGPTS_ACTIVATION = (
    "a nanoGPT checkpoint does not name its activation: it is exported with the exact GELU, nanoGPT's since May 2023."
    " For an older one, set activation_function to gelu_new in {folder}/config.json"
)


def model_card(out_dir: pathlib.Path, saved: dict, meta: dict | None, theirs: Any) -> str:
    """README.md for `theirs`, made from the checkpoint `saved` of the run in `out_dir`. meta: its data's, if known."""
    environment, c = section(record_of(out_dir), "environment"), theirs.config
    packed = saved["extra_model_args"].get("document_start") is not None
    shape = f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, context of {c.n_positions} tokens"
    found = {
        "data set": pathlib.Path(str(saved["config"].get("dataset", ""))).name,  # without the path on this machine
        "tokenizer": meta and f"{meta['tokenizer']}, {c.vocab_size:,} ids",
        "parameters": f"{theirs.num_parameters():,}",
        "shape": shape,
        "attention": WITHIN_DOCUMENTS if packed else None,
        "iterations": f"{saved['iter_num']:,}",
        **losses_at(out_dir, saved["iter_num"]),
        "trained on": environment.get("device"),
        "PyTorch": environment.get("torch"),
        "commit of fusedGPT": environment.get("commit"),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in found.items() if value)
    return CARD.format(tags=TAGS, title=out_dir.resolve().name, rows=rows)


def main(out_dir: str | os.PathLike, folder: str | os.PathLike) -> None:
    """Export the run in `out_dir` to `folder`. Raises UserError if there is no run, or the folder cannot be written."""
    saved, _ = run_folder.load_best(out_dir)
    folder = pathlib.Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder to write")
    _require_ours(folder)
    model = GPT.from_checkpoint(saved)
    if checkpoint.is_nanogpts(saved):
        print(NANOGPTS_ACTIVATION.format(folder=folder))
    meta = tokenizer = end = None
    try:
        meta = dataset.meta_of_checkpoint(ROOT, saved)
        tokenizer = tokenizer_json.tokenizer(meta, model.config.block_size)
        end = tokenizer.eos_token_id
    except UserError as error:  # a nanoGPT checkpoint only names its data, which may not be here
        print(f"no tokenizer is written: {error}")
    if model.config.packed:
        print("attention within documents is not exported: GPT-2 attends across them. Give it one document at a time")
    theirs = to_transformers(model.config, model.state_dict(), bos_token_id=end, eos_token_id=end)
    # by default transformers generates 256 more tokens, but the model has no positions beyond its context
    theirs.generation_config.max_length = model.config.block_size
    work = folder / ".export"  # on the disk of `folder`, so that files can be renamed into place
    with lock(work):
        try:
            for left in _in(work):  # left by an export that was killed
                left.unlink()
            with contextlib.chdir(work):  # the package tokenizers takes only paths in UTF-8
                theirs.save_pretrained(".")
                if tokenizer is not None:
                    tokenizer.save_pretrained(".")
            if meta is not None:  # sample.py needs it to know what the ids mean
                (work / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            card = model_card(pathlib.Path(out_dir), saved, meta, theirs)
            (work / CARD_FILE).write_text(card, encoding="utf-8", errors="backslashreplace")  # names may not be UTF-8
            _move(work, folder)
        except SafetensorError as error:  # a write failed
            raise UserError(f"cannot write {folder}: {error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    print(f"wrote {folder}: load it with transformers, or with --init_from={folder}")


def _move(work, folder):
    """Move all files in `work` to `folder`, in place of an earlier export.

    If the process is killed on the way, `folder` has no weights, so that nobody loads a mixture of two models. It does
    have a card, which tells the next export that it may replace the files.
    """
    names = {file.name for file in _in(work)}
    for name in names:
        with open(work / name, "rb") as file:
            os.fsync(file.fileno())  # otherwise a power cut could leave the new name without content
    for name in WEIGHTS:
        (folder / name).unlink(missing_ok=True)
    os.replace(work / CARD_FILE, folder / CARD_FILE)
    for old in _written(folder):
        if old.name not in names:
            old.unlink()
    for name in sorted(names - {CARD_FILE}, key=lambda name: name in WEIGHTS):
        os.replace(work / name, folder / name)


def _in(work):
    return [file for file in work.iterdir() if file.name != ".lock"]


def _written(folder):
    """The files in `folder` whose names an export writes."""
    return [file for pattern in WRITTEN for file in folder.glob(pattern)]


def _require_ours(folder):
    """Raise UserError if the export would replace a file in `folder` that no export wrote."""
    there, card = sorted(file.name for file in _written(folder)), folder / CARD_FILE
    if there and not (card.is_file() and TAGS in card.read_text(encoding="utf-8", errors="replace")):
        raise UserError(f"{folder} has files that no export wrote, such as {there[0]}: name another folder")


if __name__ == "__main__":
    with one_sentence():
        s = configure(Settings(), sys.argv[1:], __doc__, places=PLACES)
        main(s.out_dir, s.folder or pathlib.Path(s.out_dir) / "hf")
