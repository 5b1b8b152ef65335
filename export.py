"""Write a run as a Hugging Face GPT-2: config.json, model.safetensors, and meta.json with the tokenizer.

    python export.py OUT_DIR FOLDER

Vocabulary padding is stripped, biases that the run does not have become zeros, and the logits are the same.
"""

import json
import pathlib
import sys

import torch
from safetensors import SafetensorError

from fusedgpt import dataset, run_folder
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.files import atomic
from model import CONV1D, GPT, TRANSFORMERS_ACTIVATIONS

ROOT = pathlib.Path(__file__).resolve().parent


def to_transformers(model: GPT):
    """A GPT2LMHeadModel with the weights and the function of `model`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c, state = model.config, model.state_dict()
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.block_size,
            n_layer=c.n_layer,
            n_head=c.n_head,
            n_embd=c.n_embd,
            activation_function=TRANSFORMERS_ACTIVATIONS[c.activation][0],
            bos_token_id=min(50256, c.vocab_size - 1),
            eos_token_id=min(50256, c.vocab_size - 1),
        )
    )
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name.endswith(".bias") and not c.bias:
                p.zero_()
            else:
                w = state[name][: c.vocab_size if name == "transformer.wte.weight" else None]
                p.copy_(w.t() if name.endswith(CONV1D) else w)
    return theirs


def main(out_dir: str, folder: str) -> None:
    """Export the run in `out_dir` to `folder`. Raises UserError if there is no run, or the folder cannot be written."""
    saved, _ = run_folder.load_best(out_dir)
    folder = pathlib.Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder to write")
    try:
        to_transformers(GPT.from_checkpoint(saved)).save_pretrained(folder)
    except SafetensorError as error:  # safetensors' exception for a write that failed
        raise UserError(f"cannot write {folder}: {error}") from error
    try:
        meta = dataset.meta_of_checkpoint(ROOT, saved)
    except UserError as error:  # nanoGPT's checkpoint, without the data that it was trained on
        print(f"no meta.json, which would hold the tokenizer: {error}")
    else:
        with atomic(folder / "meta.json", "w") as file:  # what the ids mean, for sample.py
            json.dump(meta, file)
    print(f"wrote {folder}: load it with transformers, or with --init_from={folder}")


if __name__ == "__main__":
    with one_sentence():
        if "-h" in sys.argv or "--help" in sys.argv:
            sys.exit(print(__doc__))
        if len(sys.argv) != 3 or any(arg.startswith("-") for arg in sys.argv):
            raise UserError("name a run and a folder to write: python export.py OUT_DIR FOLDER")
        main(*sys.argv[1:])
