"""The whole state of a run in one file.

A checkpoint is nanoGPT's dict (model, optimizer, model_args, iter_num, best_val_loss, config) and more: the scaler's
state, `extra_model_args` (fields of GPTConfig that nanoGPT does not have), the meta of the data and the attention that
ran. It holds no random state, because batches and dropout follow from (seed, iteration). Loading runs no code.
"""

import errno
import os
import pathlib
import shutil
import zipfile

import torch

from fusedgpt.errors import UserError, first_line
from fusedgpt.files import atomic

NANOGPTS_ACTIVATION = (
    "a checkpoint of nanoGPT's does not name its activation: taking the exact GELU, nanoGPT's since May 2023."
    " For an older one, set --activation=gelu_tanh"
)


def save(path: str | os.PathLike, state: dict) -> None:
    """Write `state`, whole or not at all. Raises UserError if the disk is full."""
    with atomic(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch.save's exception for a write that failed
            raise OSError(errno.ENOSPC, "no space left, or the disk refuses") from error


def keep(path: str | os.PathLike, copy: str | os.PathLike) -> None:
    """Keep the file `path` under the name `copy` too: by a hard link, which costs nothing, if the file system has them.

    A link is safe, because `save` replaces `path` and never writes into it.
    """
    aside = pathlib.Path(copy).with_suffix(".tmp")
    aside.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        shutil.copyfile(path, aside)
    os.replace(aside, copy)


def load(path: str | os.PathLike) -> dict:
    """The state in `path`, on the CPU. Raises UserError if it is missing, damaged, or no checkpoint of a GPT."""
    if not os.path.exists(path):
        raise UserError(f"{path} does not exist: train first, or name the folder of another run")
    try:
        if zipfile.is_zipfile(path) and (torn := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"the checksum of {torn} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        model = {name.removeprefix("_orig_mod."): w for name, w in state["model"].items()}
        # nanoGPT's older checkpoints hold the causal mask of each layer as if it were a weight
        state["model"] = {
            name: w for name, w in model.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))
        }
        state["best_val_loss"] = float(state["best_val_loss"])
        state = {"config": {}, **state, "iter_num": int(state["iter_num"]), "model_args": dict(state["model_args"])}
        # our own checkpoints from before `activation` was saved had GPT-2's
        activation = "gelu" if is_nanogpts(state) else "gelu_tanh"
        state["extra_model_args"] = {"activation": activation, **state.get("extra_model_args", {})}
    except Exception as error:  # a damaged file can raise anything
        raise UserError(
            f"{path} is damaged or no checkpoint of a GPT ({type(error).__name__}: {first_line(error)[:120]}):"
            " take another, such as best.pt beside it, or train anew"
        ) from error
    return state


def is_nanogpts(state: dict) -> bool:
    """Whether a checkpoint was written by nanoGPT, which does not say its attention or activation."""
    return "attention" not in state


def of_run(out_dir: str | os.PathLike) -> pathlib.Path:
    """The checkpoint to sample from: a run's best, or its latest if there is no best yet."""
    best = pathlib.Path(out_dir) / "best.pt"
    return best if best.exists() else best.with_name("ckpt.pt")
