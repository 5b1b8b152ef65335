"""A run as a Hugging Face GPT-2: `python -m parts.export OUT_DIR FOLDER` writes config.json and model.safetensors.

Padding is stripped, biases that the run did not have are zeros, and the logits are the same.
"""

import json
import pathlib
import sys

import torch
from safetensors import SafetensorError

from parts import checkpoint
from parts.errors import UserError, one_sentence
from parts.files import atomic

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # which Hugging Face stores transposed


def to_transformers(state, args):
    """A GPT2LMHeadModel with the weights of a checkpoint: its state dict `state`, its `model_args` `args`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    vocab_size = args["vocab_size"]
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=args["block_size"],
            n_layer=args["n_layer"],
            n_head=args["n_head"],
            n_embd=args["n_embd"],
            bos_token_id=min(50256, vocab_size - 1),
            eos_token_id=min(50256, vocab_size - 1),
        )
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".bias") and not args["bias"]:
                p.zero_()
            elif name not in state:
                raise UserError(f"the checkpoint has no {name}")
            else:
                w = state[name][: vocab_size if name == "transformer.wte.weight" else None]
                p.copy_(w.t() if name.endswith(CONV1D) else w)
    return model


def main(out_dir, folder):
    """Write the run in `out_dir` to `folder`. Raises UserError where either is no such thing, or the disk is full."""
    saved = checkpoint.load(checkpoint.of_run(out_dir))
    folder = pathlib.Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder to write")
    try:
        to_transformers(saved["model"], saved["model_args"]).save_pretrained(folder)
    except SafetensorError as error:  # what safetensors makes of a write that failed
        raise UserError(f"cannot write {folder}: {error}") from error
    if saved.get("meta"):  # what its ids mean: sample.py reads it
        with atomic(folder / "meta.json", "w") as file:
            json.dump(saved["meta"], file)
    print(f"wrote {folder}: load it with transformers, or with --init_from={folder}")


if __name__ == "__main__":
    with one_sentence():
        if len(sys.argv) != 3:
            raise UserError("name a run and a folder to write: python -m parts.export OUT_DIR FOLDER")
        main(*sys.argv[1:])
