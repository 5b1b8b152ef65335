"""The code that all data/*/prepare.py share: read the command line, tokenize text, write the bins and meta.json."""

import argparse
import hashlib
import json
import os
import pathlib
import pickle
import shlex
import shutil
from collections.abc import Callable

import numpy as np

from fusedgpt import home
from fusedgpt.data.dataset import dtype_of, read_meta
from fusedgpt.data.encoding import fill, made, read
from fusedgpt.data.texts import Files
from fusedgpt.data.tokenizer import fails_as
from fusedgpt.errors import UserError
from fusedgpt.machine.files import atomic, lock

TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",  # its SHA-256
)
FEW = 150_000  # tokens for training; config/train_text_cpu.py reads fewer more than ten times (docs/running.md)
FEWEST_VALIDATION_TOKENS = 4096  # or a tenth of the text, if that is fewer


def parser(script: str, description: str, reading: bool = True) -> argparse.ArgumentParser:
    """The argument parser of a prepare script. reading: with --input, and how it is read, which `files` takes."""
    parser, default = argparse.ArgumentParser(description=description), home.data_folder(script)
    take = {"type": lambda path: pathlib.Path(os.path.expanduser(path)), "metavar": "PATH"}  # --input=~/a stays so
    parser.add_argument("--out_dir", default=default, **take, help="default: %(default)s")
    if reading:
        parser.add_argument("--input", action="extend", nargs="+", default=[], **take, help="local text to use")
        parser.add_argument("input", action="extend", nargs="*", **take, help="the same as --input")
        parser.add_argument("--text_column", metavar="NAME", default="text", help="of tables; default: %(default)s")
        parser.add_argument("--encoding", metavar="NAME", default="", help="of texts that are not UTF-8")
        skip = {"nargs": "?", "const": "True", "default": "False", "choices": ["True", "False"]}
        parser.add_argument("--skip_unreadable", **skip, help="go on without the files and rows that cannot be read")
    return parser


def files(args: argparse.Namespace, script: str = "", url: str = "", sha256: str = "") -> Files:
    """The texts of --input. Without it, the input.txt beside the script, as in nanoGPT; it is downloaded from `url`."""
    path = home.data_folder(script) / "input.txt"
    if not args.input:
        print(f"reading {path}; --input=PATH takes another text")
        if url and not path.exists():
            from torch.hub import download_url_to_file

            path.parent.mkdir(parents=True, exist_ok=True)
            with fails_as(f"cannot download {url}, give a copy of it with --input=PATH"):
                download_url_to_file(url, str(path), hash_prefix=sha256)
    return Files(args.input or [path], args.text_column, args.encoding, args.skip_unreadable == "True")


def prepare(corpus, tokenizer: str, out_dir: pathlib.Path, split: Callable, fraction: float, config: str) -> None:
    """Tokenize `corpus` (texts.py) and write its bins and meta.json to `out_dir`. An interrupted run is continued.

    An end-of-text id follows each document, except a single one of bytes or characters. tokenizer: a name as in
    encoding.made. split: `by_text` or another function of the documents (encoding.DOCUMENT) and `fraction`, the share
    for validation, to arrays of (start, stop), in ids, for 'train' and 'val'. config: as `write` has it.
    """
    work = out_dir / ".prepare"
    with lock(work):
        changed = os.path.isfile(tokenizer) and os.stat(tokenizer).st_mtime_ns
        job = json.dumps([corpus.source, corpus.key, tokenizer, changed])
        folder = work / hashlib.sha256(job.encode()).hexdigest()[:16]  # one for each job
        if not (folder / "meta.json").exists():
            meta = made(tokenizer, corpus)
            with atomic(folder / "meta.json", "w") as file:
                json.dump(meta, file)
        meta = read_meta(folder)
        dtype, documents = dtype_of(meta["vocab_size"]), fill(folder, meta, corpus)
        if not len(documents):
            raise UserError(f"{corpus.source} holds no text: name a file or folder that does")
        if len(documents) == 1 and meta["tokenizer"] in ("byte", "char"):  # it needs no end, which is the last id
            documents["end"] -= 1
            meta["vocab_size"] = meta.pop("end_of_text")
            if "itos" in meta:
                meta["itos"].pop()
        parts = split(documents, fraction)
        splits = {name: read(folder / "ids", dtype, ranges) for name, ranges in parts.items()}
        write(out_dir, splits, corpus.source, config=config, **meta)
    shutil.rmtree(work)


def by_text(documents: np.ndarray, fraction: float) -> dict[str, np.ndarray]:
    """Take about `fraction` of the documents for validation, each by a hash of its text.

    So a document stays in its split when others come or go. If documents are few, or of very different lengths, so that
    a split would have less than half or more than twice its share of the ids, validation gets the last ids.
    """
    chosen = documents["digest"] < fraction * 2.0**64
    return _whole_documents(documents, np.flatnonzero(chosen), np.flatnonzero(~chosen), fraction)


def as_nanogpt(documents: np.ndarray, fraction: float) -> dict[str, np.ndarray]:
    """As `by_text`, but drawn, and in the order of the draw, as by nanoGPT's `train_test_split(seed=2357)`."""
    order = np.random.default_rng(2357).permutation(len(documents))
    held_out = int(np.ceil(fraction * len(documents)))
    return _whole_documents(documents, order[:held_out], order[held_out:], fraction)


def _whole_documents(documents, val, train, fraction):
    edges = np.append(0, documents["end"])  # document n is from edges[n] to edges[n + 1]
    total = int(edges[-1])
    share = max(fraction, min(0.1, FEWEST_VALIDATION_TOKENS / total))
    if share / 2 <= np.diff(edges)[val].sum() / total <= min(2 * share, (1 + share) / 2):
        return {"train": _ranges(edges, train), "val": _ranges(edges, val)}
    cut = int((1 - share) * total)
    return {"train": np.array([[0, cut]]), "val": np.array([[cut, total]])}


def _ranges(edges, numbers):
    """The (start, stop) of documents by their numbers. Neighbours become one range, which saves reads."""
    firsts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    lasts = np.append(firsts[1:], len(numbers)) - 1
    return np.stack([edges[numbers[firsts]], edges[numbers[lasts] + 1]], axis=1)


def write(folder: pathlib.Path, splits: dict, source: str, tokenizer: str, vocab_size: int, config="", **extra) -> None:
    """Write train.bin, val.bin and meta.json to `folder`, with one array in memory at a time.

    splits: maps 'train' and 'val' to iterables of arrays of ids. config: a file to name in the printed command that
    trains on them. extra: more of what Tokenizer reads. After a kill between two files, the old meta.json is older than
    the new bins and has other SHA-256s, which every run refuses. Raises UserError if an id is beyond the vocabulary, or
    if the disk is full, before any old file is replaced.
    """
    folder, dtype = pathlib.Path(folder), dtype_of(vocab_size)
    source = source.encode("utf-8", "replace").decode()  # a file's name may not be UTF-8
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "dtype": dtype, "source": source}
    meta, described = meta | {"tokens": {}, "sha256": {}}, folder / "meta.json"
    # meta.json is opened first, so it gets its name last
    with atomic(described, "w") as new, atomic(folder / "train.bin") as train, atomic(folder / "val.bin") as val:
        for split, file in (("train", train), ("val", val)):
            digest, count = hashlib.sha256(), 0
            for ids in map(np.asarray, splits[split]):
                if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
                    raise UserError(f"{source} has ids from {ids.min()} to {ids.max()}: vocab_size is {vocab_size}")
                raw = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
                file.write(raw)
                digest.update(raw)
                count += len(ids)
            meta["tokens"][split], meta["sha256"][split] = count, digest.hexdigest()
        json.dump(meta | extra, new, indent=1, ensure_ascii=False)
        for file in (train, val, new):  # no file may replace an old one before all are on the disk
            file.flush()
            os.fsync(file.fileno())
        (folder / "meta.pkl").unlink(missing_ok=True)  # that of other data
        if known := {id: c for id, c in enumerate(extra.get("itos", [])) if c is not None}:
            with atomic(folder / "meta.pkl") as file:  # nanoGPT's, which notebooks open
                stoi = {c: id for id, c in known.items()}
                pickle.dump({"vocab_size": vocab_size, "itos": known, "stoi": stoi}, file)
    for split, count in meta["tokens"].items():
        print(f"{folder / split}.bin: {count:,} tokens")
    if config:
        named = folder.resolve() if (home.ROOT / "data" / folder).is_dir() else folder  # not that of data/
        few = " --dropout=0.2" * (config.endswith("text_cpu.py") and meta["tokens"]["train"] < FEW)
        print(home.as_called(f"next: python train.py {config} --dataset={shlex.quote(str(named))}{few}"))
