"""A run as a Hugging Face GPT-2: `python -m parts.export OUT_DIR FOLDER` writes config.json and model.safetensors.

Padding is stripped, biases that the run did not have are zeros, and the logits are the same.
"""

import sys

import torch

from parts import checkpoint
from parts.errors import UserError, one_sentence

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
            if name not in state:
                p.zero_()  # a bias of a run without
            else:
                w = state[name][: vocab_size if name == "transformer.wte.weight" else None]
                p.copy_(w.t() if name.endswith(CONV1D) else w)
    return model


if __name__ == "__main__":
    with one_sentence():
        if len(sys.argv) != 3:
            raise UserError("name a run and a folder to write: python -m parts.export OUT_DIR FOLDER")
        saved = checkpoint.load(checkpoint.of_run(sys.argv[1]))
        to_transformers(saved["model"], saved["model_args"]).save_pretrained(sys.argv[2])
        print(f"wrote {sys.argv[2]}: load it with transformers, or with --init_from={sys.argv[2]}")
