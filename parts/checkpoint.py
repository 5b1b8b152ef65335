"""The whole state of a run, in a file. Nothing random is saved: batches and dropout follow from (seed, iteration).

A checkpoint is nanoGPT's dict (model, optimizer, model_args, iter_num, best_val_loss, config) with the scaler's state,
the data set's meta and the attention that ran. It loads without running code, and nanoGPT's own load too.
"""

import errno
import os
import pathlib
import shutil
import zipfile

import torch

from parts.errors import UserError
from parts.files import atomic


def save(path, state):
    """Write `state`, whole or not at all."""
    with atomic(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # what torch.save makes of a write that failed
            raise OSError(errno.ENOSPC, "no space left, or the disk refuses") from error


def keep(path, copy):
    """Give what is in `path` the name `copy` as well, at no cost where the file system has hard links."""
    aside = pathlib.Path(copy).with_suffix(".tmp")
    aside.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        shutil.copyfile(path, aside)
    os.replace(aside, copy)


def load(path, device="cpu"):
    """The state in `path`. Raises UserError where it is missing, damaged, or no checkpoint of a GPT."""
    if not os.path.exists(path):
        raise UserError(f"{path} does not exist: train first, or name the run's folder with --out_dir")
    try:
        if zipfile.is_zipfile(path) and (torn := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"the checksum of {torn} is wrong")
        state = torch.load(path, map_location=device, weights_only=True)
        model = {name.removeprefix("_orig_mod."): w for name, w in state["model"].items()}
        # nanoGPT's older checkpoints hold the causal mask of each layer as a weight
        state["model"] = {
            name: w for name, w in model.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))
        }
        state["best_val_loss"] = float(state["best_val_loss"])
        state = {"config": {}, **state, "iter_num": int(state["iter_num"]), "model_args": dict(state["model_args"])}
    except Exception as error:  # a damaged file can raise anything
        first = str(error).strip().splitlines()[0][:120] if str(error) else ""
        raise UserError(
            f"{path} is damaged or no checkpoint of a GPT ({type(error).__name__}: {first}):"
            " take another, such as best.pt beside it, or train anew"
        ) from error
    return state


def of_run(out_dir):
    """The checkpoint to sample from: the best of a run, or the latest where none was best yet."""
    best = pathlib.Path(out_dir) / "best.pt"
    return best if best.exists() else best.with_name("ckpt.pt")
