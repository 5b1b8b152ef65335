"""Read a data folder as prepare scripts leave it: `meta.json`, and bins that are read window by window.

A bin has little-endian token ids: uint16, or uint32 for vocabularies above 65,536. nanoGPT's own folders are read too.
"""

import bisect
import difflib
import hashlib
import itertools
import json
import os
import pathlib
import pickle
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fusedgpt import home
from fusedgpt.data.tokenizer import GPT2, Tokenizer, end_of_text, vocabulary
from fusedgpt.errors import UserError, first_line, shown

SPLITS = ("train", "val")


def find_folder(dataset: str) -> pathlib.Path:
    """The folder that the setting `dataset` names: one in data/, or a path. Raises UserError if there is neither."""
    for folder in (home.ROOT / "data" / str(dataset), pathlib.Path(str(dataset))):
        if dataset and os.path.isdir(folder):
            return folder
    there = sorted({file.parent.name for each in (home.ROOT, home.SCRIPTS) for file in (each / "data").glob("*/*")})
    names = ", ".join(difflib.get_close_matches(str(dataset), there, n=1) or there[:20])
    how = f"name one of data/ ({names}), or a path; python data/NAME/prepare.py makes one"
    if os.path.isfile(str(dataset)):
        prepare = f"python data/text/prepare.py --input={shlex.quote(dataset)}"
        how = f"name its folder, {os.path.dirname(dataset) or '.'}, if it is a bin; if it is a text, {prepare}"
    raise UserError(f"dataset={shown(str(dataset))} is no folder: {how}")


UNKNOWN = {"tokenizer": "unknown"}  # for a model or a checkpoint that does not say what its ids mean


def read_meta(folder: str | pathlib.Path, vocab_size: int | None = None) -> dict:
    """The meta of a data folder, as in meta.json or else, without running code, nanoGPT's meta.pkl.

    A folder with neither holds GPT-2's BPE, as in nanoGPT, in a vocabulary of `vocab_size` (None: 50257).
    Raises UserError if the file is damaged.
    """
    folder = pathlib.Path(folder)
    path = next((folder / name for name in ("meta.json", "meta.pkl") if (folder / name).exists()), None)
    if path is None:
        return GPT2 | {"vocab_size": vocab_size or GPT2["vocab_size"]}
    try:
        if path.suffix == ".pkl":
            return _read_meta_pkl(path)
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{path} is damaged ({first_line(error)}): {_how_to_prepare(folder)}") from error


def meta_of_checkpoint(saved: dict) -> dict:
    """The meta of the data that a checkpoint was trained on. nanoGPT's only name a data set, whose folder is read.

    Where that folder is not, as many ids as GPT-2 has, or a few more that pad, are taken for GPT-2's.
    """
    if saved.get("meta") is None:
        name, size = saved["config"].get("dataset", "openwebtext"), saved["model_args"]["vocab_size"]
        folder = home.ROOT / "data" / name if size < GPT2["vocab_size"] + 1024 else find_folder(name)
        check_fit(meta := read_meta(folder), size, f"{folder} (or GPT-2)", "put the meta.pkl of its data there")
        return meta
    return _checked(saved["meta"])


def separator(meta: dict, dataset: str) -> int:
    """The id between two documents of the data that `meta` describes. Raises UserError if there is none."""
    if (found := end_of_text(meta)) is None:
        none = f"mask=document needs documents, but dataset={dataset} has no id that ends one"
        raise UserError(f"{none}: prepare your texts with data/text/prepare.py, or set --mask=causal")
    return found


def check_fit(meta: dict, vocab_size: int, whose: str, remedy: str) -> None:
    """Raise UserError if `meta` has more ids than a model of `vocab_size`. The message gives its owner and a remedy."""
    if meta["vocab_size"] > vocab_size:
        raise UserError(f"{whose} has {meta['vocab_size']} ids, the model {vocab_size}: {remedy}")


def check_same_ids(meta: dict, trained_on: dict, say: Callable[[str], None]) -> None:
    """Raise UserError if an id means another text in `meta`, of the data, than in `trained_on`, of the weights.

    Unknown ids are taken to be the same, and those of a tokenizer that cannot be loaded, of which `say` is told.
    """
    same = all(meta.get(name) == trained_on.get(name) for name in ("tokenizer", "itos", "tokenizer_json"))
    kinds = [each.get("tokenizer") for each in (meta, trained_on)]
    if same or "unknown" in kinds:
        return
    try:  # compare texts: a tokenizer can have several forms
        tokens, before = Tokenizer(meta).tokens, Tokenizer(trained_on).tokens
    except UserError as error:
        return say(f"cannot tell whether the weights were trained on the data's ids: {error}")
    if tokens[: len(before)] != before[: len(tokens)]:
        other = "the data's ids stand for other texts than those that the weights were trained on"
        how = "prepare the data with their tokenizer, set --dataset to their own data, or --init_from=scratch"
        raise UserError(f"{other} (now {kinds[0]}, then {kinds[1]}): {how}")


def same_text(meta: dict, trained_on: dict, split: str) -> bool:
    """Whether two metas describe the same bins of a split. Bins without a SHA-256, as nanoGPT's, count as the same."""
    now, was = (each.get("sha256", {}).get(split) for each in (meta, trained_on))
    return not (now and was) or now == was


def check_bins(files: Mapping[str, "TokenFile"], meta: dict, whole: bool) -> None:
    """Raise UserError if a bin has another SHA-256 than meta.json says: it was replaced, or damaged by a copy.

    Compared are bins that were written after their meta.json; with `whole`, all.
    """
    for split, file in files.items():
        (path, *others), digest = file.paths, meta.get("sha256", {}).get(split)
        if others or not digest:
            continue
        if whole or path.stat().st_mtime_ns > path.with_name("meta.json").stat().st_mtime_ns:
            with open(path, "rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != digest:
                what = f"is not the file that meta.json describes, its SHA-256 is {found:.12}…"
                raise UserError(f"{path} {what}: {_how_to_prepare(path.parent)}")


def require_same_data(files: Mapping[str, "TokenFile"], meta: dict, gather: Callable[[Any], list]) -> None:
    """Raise UserError if a rank has other bins than rank 0, or another meta. gather: returns the values of all."""
    described = repr([*map(len, files.values()), meta | {"source": ""}])
    each = gather(hashlib.sha256(described.encode()).hexdigest())  # a meta can be large
    if others := [rank for rank, theirs in enumerate(each) if theirs != each[0]]:
        which = f"rank(s) {', '.join(map(str, others))} of {len(each)} have other data than rank 0"
        raise UserError(f"{which}: copy {files['train'].paths[0].parent} from the node of rank 0 to the others")


def _how_to_prepare(folder):
    script = folder / "prepare.py"
    return f"run python {script}" if script.exists() else f"run a data/*/prepare.py with --out_dir={folder}"


def _checked(meta):
    """`meta`, of which each field that is read has the right form. Raises UserError otherwise."""
    vocabulary(meta)
    end_of_text(meta)
    if meta.get("tokenizer") != "unknown":  # unknown ids can be trained on
        Tokenizer(meta)
    return meta


def _read_meta_pkl(path):
    """The meta of a meta.pkl. Training needs only vocab_size, as in nanoGPT; sampling needs itos or stoi."""
    with open(path, "rb") as file:
        meta = _PlainUnpickler(file).load()
    itos = meta.get("itos") or {i: c for c, i in meta.get("stoi", {}).items()}
    if isinstance(itos, list):
        itos = dict(enumerate(itos))
    size = vocabulary({"vocab_size": int(meta.get("vocab_size") or max(map(int, itos)) + 1)})
    itos = {int(i): str(c) for i, c in itos.items() if isinstance(c, str)}  # no checkpoint can hold numpy's text
    if not itos:
        return {"tokenizer": "unknown", "vocab_size": size}
    return _checked({"tokenizer": "char", "vocab_size": size, "itos": [itos.get(i) for i in range(size)]})


class _PlainUnpickler(pickle._Unpickler):  # one damaged byte can make the one in C fill gigabytes
    """Admits only numbers, text and containers. A pickle that names another class or function could run code."""

    def find_class(self, module, name):
        if (module, name) == ("numpy", "dtype"):  # the size of a vocabulary may be an integer of numpy's
            return np.dtype
        if module in ("numpy._core.multiarray", "numpy.core.multiarray") and name == "scalar":
            return np.int64(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it asks to load {module}.{name}, which is code")


def dtype_of(vocab_size: int) -> str:
    """The type of the ids in a bin: 'uint16' or 'uint32'."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class TokenFile:
    """The ids of `<split>_0000.bin …`, or else of `<split>.bin`, as one sequence that is read window by window.

    Files are not memory-mapped, because the process would keep every page that it reads in memory (nanoGPT#287).
    Raises UserError if files are missing, or do not have the size that `meta` says.
    """

    def __init__(self, folder: str | pathlib.Path, split: str, meta: dict):
        folder = pathlib.Path(folder)
        self.paths = sorted(folder.glob(f"{split}_[0-9][0-9][0-9][0-9].bin")) or [folder / f"{split}.bin"]
        if not self.paths[0].exists():
            raise UserError(f"{self.paths[0]} does not exist: {_how_to_prepare(folder)}")
        self.vocab_size = meta["vocab_size"]
        self.dtype = np.dtype(meta.get("dtype", dtype_of(self.vocab_size))).newbyteorder("<")
        sizes = [path.stat().st_size for path in self.paths]
        self.starts = [0, *itertools.accumulate(size // self.dtype.itemsize for size in sizes)]
        expected = meta.get("tokens", {}).get(split, len(self)) * self.dtype.itemsize
        if sum(sizes) != expected or any(size % self.dtype.itemsize for size in sizes):
            what = f"is truncated or not what meta.json describes: it has {sum(sizes):,} bytes, not {expected:,}"
            raise UserError(f"{self.paths[0]} {what}: {_how_to_prepare(folder)}")
        self.files = [open(path, "rb") for path in self.paths]  # noqa: SIM115 (open as long as the run)

    def __len__(self) -> int:
        return self.starts[-1]

    def window(self, start: int, length: int) -> np.ndarray:
        """`length` ids from position `start`, int64. Raises UserError if an id is beyond the vocabulary."""
        ids, done = np.empty(length, np.int64), 0
        while done < length:
            shard = bisect.bisect_right(self.starts, start + done) - 1
            self.files[shard].seek((start + done - self.starts[shard]) * self.dtype.itemsize)
            count = min(length - done, self.starts[shard + 1] - start - done)
            part = ids[done : done + count] = np.fromfile(self.files[shard], self.dtype, count)
            if part.max() >= self.vocab_size:
                which = f"{self.paths[shard]} holds the id {part.max()}, but the vocabulary has {self.vocab_size}"
                raise UserError(f"{which}: prepare it again, or set --vocab_size. nanoGPT pads GPT-2's to 50304")
            done += count
        return ids
