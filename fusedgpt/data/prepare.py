"""The code that all data/*/prepare.py share: read the command line, tokenize text, write the bins and meta.json."""

import argparse
import hashlib
import json
import os
import pathlib
import pickle
import shlex
import shutil
import urllib.request
from collections.abc import Callable, Iterable

import numpy as np

from fusedgpt import home
from fusedgpt.data import tokenizer as tokenizers
from fusedgpt.data.dataset import dtype_of, read_meta
from fusedgpt.data.encoding import Encoded
from fusedgpt.data.texts import Files
from fusedgpt.errors import UserError
from fusedgpt.machine.files import atomic, lock

TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",  # its SHA-256
)
FEWEST_VALIDATION_TOKENS = 4096  # or a tenth of the text, if that is fewer
FEWEST_TOKENS = 2  # one to predict, and one to predict it from
Split = Callable[[np.ndarray], dict[str, np.ndarray]]


def parser(script: str, description: str, reading: bool = True) -> argparse.ArgumentParser:
    """The argument parser of a prepare script. `.input` is a list of paths; see home.data_folder for `.out_dir`.

    reading: add the options that say how local texts are read. `files` takes them.
    """
    parser = argparse.ArgumentParser(description=description)
    take = {"type": pathlib.Path, "metavar": "PATH"}
    parser.add_argument("--input", action="extend", nargs="+", default=[], **take, help="local text to use")
    parser.add_argument("input", action="extend", nargs="*", **take, help="the same as --input")
    default = home.data_folder(script)
    parser.add_argument("--out_dir", type=pathlib.Path, metavar="DIR", default=default, help="default: %(default)s")
    if reading:
        column = "column with the text, as in body, messages.content, FILE:NAME for some files; default: text"
        parser.add_argument("--text_column", metavar="NAME", help=column)
        encoding = "of texts that are not UTF-8, as in cp1252, FILE:NAME for some files; default: by their letters"
        parser.add_argument("--encoding", metavar="NAME", help=encoding)
        skip = {"nargs": "?", "const": "True", "default": "False", "choices": ["True", "False"]}
        parser.add_argument("--skip_unreadable", **skip, help="go on without the files and rows that cannot be read")
    return parser


def files(args: argparse.Namespace, paragraphs: bool = False) -> Files:
    """The texts of --input, read as the options of `parser` say."""
    skip = args.skip_unreadable == "True"
    return Files(args.input, args.text_column, args.encoding, paragraphs, skip)


def beside(script: str) -> list[pathlib.Path]:
    """The input.txt beside a script, if there is one: nanoGPT's users put their text there."""
    path = home.data_folder(script) / "input.txt"
    if not path.is_file():
        return []
    print(f"reading {path}, which is beside this script; --input=PATH takes another text")
    return [path]


def one_text(script: str, args: argparse.Namespace, url: str, sha256: str) -> Files:
    """The text to prepare: `--input`, else input.txt beside the script, else a download, refused if it has changed."""
    args.input = args.input or beside(script)
    if not args.input:
        args.input = [home.data_folder(script) / "input.txt"]  # where nanoGPT's scripts put it
        print(f"downloading {url}; --input=PATH takes a local copy")
        with urllib.request.urlopen(url, timeout=60) as page:
            raw = page.read()
        if hashlib.sha256(raw).hexdigest() != sha256:
            raise UserError(f"{url} serves another text than it used to. Give a local copy: --input=PATH")
        with atomic(args.input[0]) as file:
            file.write(raw)
    return files(args)


def prepare(corpus, tokenizer: str, out_dir: pathlib.Path, split: Split, max_tokens: int | None = None) -> None:
    """Tokenize `corpus` (texts.py) and write its bins and meta.json to `out_dir`. An interrupted run is continued.

    An end-of-text id follows each document, except a single one of bytes or characters.
    tokenizer: a name as in tokenizer.made.
    split: maps the documents (encoding.DOCUMENT) to arrays of (start, stop), in ids, for 'train' and 'val'.
    max_tokens: stop after the document that reaches it.
    """
    work = out_dir / ".prepare"
    with lock(work):
        job = json.dumps([corpus.source, corpus.key, tokenizer])
        described = work / hashlib.sha256(job.encode()).hexdigest()[:16] / "meta.json"  # a folder for each job
        if not described.exists():
            meta = tokenizers.made(tokenizer, corpus)
            with atomic(described, "w") as file:
                json.dump(meta, file)
        encoded = Encoded(described.parent, read_meta(described.parent))
        encoded.fill(corpus, max_tokens)
        meta, documents = encoded.meta, encoded.documents(max_tokens)
        if not len(documents):
            raise UserError(f"{corpus.source} holds no text: name a file or folder that does")
        if len(documents) == 1 and meta["tokenizer"] in ("byte", "char"):
            meta = tokenizers.without_end(meta)
            documents["end"] -= 1
        splits = {name: encoded.read(parts) for name, parts in split(documents).items()}
        write(out_dir, splits, corpus.source, **meta)
    shutil.rmtree(work)


def say_next(out_dir: pathlib.Path, config: str) -> None:
    """Print the command that trains on `out_dir`, with the config file `config`."""
    print(home.as_called(f"next: python train.py {config} --dataset={shlex.quote(str(out_dir))}"))


def by_text(documents: np.ndarray, fraction: float) -> dict[str, np.ndarray]:
    """Take about `fraction` of the documents for validation, each by a hash of its text.

    So a document stays in its split when others come or go, and two copies of a text are in one. Returns arrays of
    (start, stop). If documents are few, or of very different lengths, validation would have less than half or more than
    twice its share of the ids, or training less than half of its share: then validation gets the last ids.
    """
    chosen = documents["digest"] < fraction * 2.0**64
    return _whole_documents(documents, np.flatnonzero(chosen), np.flatnonzero(~chosen), fraction)


def as_nanogpt(documents: np.ndarray, fraction: float) -> dict[str, np.ndarray]:
    """Draw `fraction` of the documents for validation, and keep the order of the draw, as nanoGPT does.

    It calls `train_test_split(seed=2357, shuffle=True)` of `datasets`. Otherwise as `by_text`.
    """
    order = np.random.default_rng(2357).permutation(len(documents))
    held_out = max(1, round(fraction * len(documents)))
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


def write(
    folder: str | pathlib.Path,
    splits: dict[str, Iterable[np.ndarray]],
    source: str,
    tokenizer: str,
    vocab_size: int,
    **extra,
) -> None:
    """Write train.bin, val.bin and meta.json to `folder`, with one array in memory at a time.

    `splits` maps 'train' and 'val' to arrays of ids. `tokenizer` and `extra` (end_of_text, itos, …) are as Tokenizer
    reads them from meta.json. If the process is killed between two files, the old meta.json is older than the new bins
    and has other SHA-256s, which every run refuses. Raises UserError if a split is too short, if an id is beyond the
    vocabulary, or if the disk is full before any old file is replaced.
    """
    folder, dtype = pathlib.Path(folder), dtype_of(vocab_size)
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "dtype": dtype}
    meta["source"] = source.encode("utf-8", "replace").decode()  # a file's name may not be UTF-8
    meta |= {"tokens": {}, "sha256": {}}
    described = folder / "meta.json"
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
            if count < FEWEST_TOKENS:
                raise UserError(f"{source} is too short: its {split} split has {count} tokens. Give more text")
            meta["tokens"][split], meta["sha256"][split] = count, digest.hexdigest()
        json.dump(meta | extra, new, indent=1, ensure_ascii=False)
        for file in (train, val, new):  # no file may replace an old one before all are on the disk
            file.flush()
            os.fsync(file.fileno())
        _write_meta_pkl(folder, vocab_size, extra.get("itos"))
    for split, count in meta["tokens"].items():
        print(f"{folder / split}.bin: {count:,} tokens")


def _write_meta_pkl(folder, vocab_size, itos):
    """Write characters as nanoGPT's meta.pkl has them, because notebooks open it; remove that of other data."""
    if itos is None:
        (folder / "meta.pkl").unlink(missing_ok=True)
        return
    known = {id: c for id, c in enumerate(itos) if c is not None}
    with atomic(folder / "meta.pkl") as file:
        pickle.dump({"vocab_size": vocab_size, "itos": known, "stoi": {c: id for id, c in known.items()}}, file)
