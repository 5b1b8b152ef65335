"""A GPT in nanoGPT's files: ckpt.pt, which its sample.py opens, and meta.pkl, which says what the ids mean."""

from typing import Any

import torch
from torch import Tensor

from fusedgpt.data.tokenizer import END_OF_TEXT, Tokenizer
from fusedgpt.dimensions import GPTConfig, require_known
from fusedgpt.errors import UserError
from fusedgpt.interchange import families

ACTIVATION = "gelu"  # nanoGPT computes the exact form, since May 2023


def checkpoint(config: GPTConfig, state: dict[str, Tensor], saved: dict, dataset: str) -> dict[str, Any]:
    """The content of ckpt.pt for a GPT with `config` and `state`, without vocabulary padding.

    saved: our checkpoint of the GPT, whose optimizer is left out. dataset: the folder of nanoGPT's data/ that has
    meta.pkl. Raises UserError if the GPT computes what GPT-2 does not.
    """
    require_known(config, "checkpoint (fusedgpt/interchange/nanogpt.py), which makes a GPT-2,", ("document_start",))
    weights = families.weights(config, state, "gpt2")
    own = {name: w.clone() for name, w in weights.items() if name in state}  # of a view, all of its tensor is saved
    return {
        "model": own | {"lm_head.weight": own["transformer.wte.weight"]},
        "model_args": {name: getattr(config, name) for name in saved["model_args"]},
        "iter_num": saved["iter_num"],
        "best_val_loss": torch.tensor(saved["best_val_loss"]),
        "config": {"dataset": dataset},
    }


def characters(meta: dict) -> dict[str, Any] | None:
    """The content of meta.pkl for data with this `meta`; None for GPT-2's BPE, which nanoGPT takes if there is none.

    Raises UserError if nanoGPT cannot have the ids.
    """
    ours = Tokenizer(meta)
    if ours.kind == "gpt2":
        return None
    if ours.kind != "char":
        raise UserError(f"nanoGPT has GPT-2's BPE and characters, not the tokenizer {ours.kind}: name --format=hf")
    itos = {id: c for id, c in enumerate(ours.itos) if c is not None}
    stoi = {c: id for id, c in itos.items() if len(c) == 1}
    if ours.end_of_text is not None:
        itos[ours.end_of_text] = END_OF_TEXT
    return {"vocab_size": ours.vocab_size, "itos": itos, "stoi": stoi}
