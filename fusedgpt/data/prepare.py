"""The code that all data/*/prepare.py share: read the command line, tokenize text, write the bins and meta.json."""

import argparse
import contextlib
import hashlib
import itertools
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
from fusedgpt.data import make_tokenizer
from fusedgpt.data.dataset import UNFINISHED, dtype_of
from fusedgpt.data.encoding import Encoded
from fusedgpt.data.inputs import SHOWN
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


def parser(script: str, description: str) -> argparse.ArgumentParser:
    """The argument parser of a prepare script. `.input` is a list of paths; see home.data_folder for `.out_dir`."""
    parser = argparse.ArgumentParser(description=description)
    take = {"type": _path, "metavar": "PATH"}
    parser.add_argument("--input", action="extend", nargs="+", default=[], **take, help="local text to use")
    parser.add_argument("input", action="extend", nargs="*", **take, help="the same as --input")
    default = home.data_folder(script)
    parser.add_argument("--out_dir", type=_path, metavar="DIR", default=default, help="default: %(default)s")
    return parser


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how local texts are read. `files` takes them."""
    column = "column with the text, as in body, messages.content, FILE:NAME for some files; default: text"
    parser.add_argument("--text_column", metavar="NAME", help=column)
    encoding = "of texts that are not UTF-8, as in cp1252, FILE:NAME for some files; default: by their letters"
    parser.add_argument("--encoding", type=_encoding, metavar="NAME", help=encoding)
    skip = dict(nargs="?", const=True, default=False, type=_true, metavar="True")
    parser.add_argument("--skip_unreadable", **skip, help="go on without the files and rows that cannot be read")


def files(args: argparse.Namespace, paragraphs: bool = False) -> Files:
    """The texts of --input, read as the options of `add_reading` say."""
    return Files(args.input, args.out_dir, args.text_column, args.encoding, paragraphs, args.skip_unreadable)


def _encoding(text):
    for each in text.split(","):
        name = each.rpartition(":")[2]
        try:
            "".encode(name)
        except LookupError as error:
            raise argparse.ArgumentTypeError(f"{name} is no encoding: it can be cp1252, utf-16-le …") from error
    return text


def _true(text):
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"{text} is neither True nor False: write --skip_unreadable=True")
    return text == "True"


def _path(text):
    if not text:  # a shell variable may not be set; pathlib would take the current folder
        raise argparse.ArgumentTypeError("no path was given")
    return pathlib.Path(text)


def fraction(text: str) -> float:
    """The value of --val_fraction. Raises argparse.ArgumentTypeError unless it is between 0 and 1."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")


def beside(script: str) -> list[pathlib.Path]:
    """The input.txt beside a script, if there is one: nanoGPT's users put their text there."""
    path = home.data_folder(script) / "input.txt"
    if not path.is_file():
        return []
    print(f"reading {path}, which is beside this script; --input=PATH takes another text")
    return [path]


def one_text(script: str, args: argparse.Namespace, url: str, sha256: str) -> Files:
    """The text to prepare: `--input`, else input.txt beside the script, else a download from `url`.

    Raises UserError if --input is no single file, or if the download fails or has changed.
    """
    if len(args.input) > 1:
        raise UserError(f"--input got {len(args.input)} paths: this corpus is one text. data/text takes several")
    if args.input and args.input[0].is_dir():
        raise UserError(f"--input={args.input[0]} is a folder: this corpus is one text. data/text takes folders")
    args.input = args.input or beside(script)
    if not args.input:
        args.input = [home.data_folder(script) / "input.txt"]  # where nanoGPT's scripts put it
        with atomic(args.input[0]) as file:
            file.write(_download(url, sha256))
    return files(args)


def _download(url, sha256):
    try:
        with urllib.request.urlopen(url, timeout=60) as page:
            raw = page.read()
    except OSError as error:
        raise UserError(f"cannot download {url}: {error}. Give a local copy: --input=PATH") from error
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise UserError(f"{url} serves another text than it used to. Give a local copy: --input=PATH")
    return raw


def prepare(
    corpus, tokenizer: str, out_dir: pathlib.Path, split: Split, ended=True, max_tokens: int | None = None
) -> None:
    """Tokenize `corpus` (texts.py) and write its bins and meta.json to `out_dir`. An interrupted run is continued.

    tokenizer: a name as in make_tokenizer.of.
    split: maps the documents (encoding.DOCUMENT) to arrays of (start, stop), in ids, for 'train' and 'val'.
    ended: put an end-of-text id after each document, except after a single one of bytes or characters.
    max_tokens: stop after the document that reaches it.
    Raises UserError if the text is too short.
    """
    work = out_dir / ".prepare"
    with lock(work):
        encoded = Encoded(work, [corpus.source, corpus.key, tokenizer, make_tokenizer.stamp(tokenizer), ended])
        if encoded.meta is None:
            meta = make_tokenizer.of(tokenizer, corpus)
            encoded.begin(meta if ended else {name: meta[name] for name in meta if name != "end_of_text"})
        encoded.fill(corpus, max_tokens)
        meta, documents = encoded.meta, encoded.documents(max_tokens)
        if not len(documents):
            raise UserError(f"{corpus.source} holds no text: name a file or folder that does")
        if len(documents) == 1 and ended and meta["tokenizer"] in ("byte", "char"):
            meta = make_tokenizer.without_end(meta)
            documents["end"] -= 1
        ranges = split(documents)
        for name, parts in ranges.items():
            if (count := np.diff(parts).sum()) < FEWEST_TOKENS:
                raise UserError(
                    f"{corpus.source} is too short: of its {documents['end'][-1]:,} tokens, {count:,} would be in the"
                    f" {name} split, which needs {FEWEST_TOKENS}. Give more text"
                )
        if corpus.left_out:
            some = dict(itertools.islice(corpus.left_out.items(), SHOWN))
            meta = meta | {"left_out": {"files": len(corpus.left_out), "some": some}}
        write(out_dir, {name: encoded.read(parts) for name, parts in ranges.items()}, corpus.source, **meta)
    shutil.rmtree(work)


def say_next(out_dir: pathlib.Path, config: str, dataset: str, with_gpu: str | None = None) -> None:
    """Print the command that trains on `out_dir`.

    config: the config file to begin with, whose setting `dataset` is given. with_gpu: the one for a machine with a GPU.
    """
    folder = out_dir.resolve()
    name = folder.name if folder.parent == (home.ROOT / "data").resolve() else str(out_dir)
    command = f"{'fusedgpt train' if home.INSTALLED else 'python train.py'} {config}"
    if name != dataset:
        command += f" --dataset={shlex.quote(name)}"
    print(f"next: {command}" + (f" (with a GPU {with_gpu})" if with_gpu else ""))


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
    share = max(fraction, min(0.1, FEWEST_VALIDATION_TOKENS / edges[-1]))
    chosen = np.diff(edges)[val].sum() / edges[-1]
    if not share / 2 <= chosen <= min(2 * share, (1 + share) / 2):
        return last_part(documents, share)
    return {"train": _ranges(edges, train), "val": _ranges(edges, val)}


def _ranges(edges, numbers):
    """The (start, stop) of documents by their numbers. Neighbours become one range, which saves reads."""
    firsts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    lasts = np.append(firsts[1:], len(numbers)) - 1
    return np.stack([edges[numbers[firsts]], edges[numbers[lasts] + 1]], axis=1)


def last_part(documents: np.ndarray, fraction: float) -> dict[str, np.ndarray]:
    """The last `fraction` of all ids for validation, wherever that begins."""
    total = int(documents["end"][-1])
    cut = int((1 - fraction) * total)
    return {"train": np.array([[0, cut]]), "val": np.array([[cut, total]])}


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
    reads them from meta.json. If the process is killed, the folder has all old files, or all new ones, or a meta.json
    that says that they are mixed, which every run refuses. Raises UserError if a split is empty, if an id is beyond the
    vocabulary, or if the disk is full before any old file is replaced.
    """
    dtype = dtype_of(vocab_size)
    meta = {
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "source": source.encode("utf-8", "replace").decode(),  # a file's name may not be UTF-8
        "tokens": {},
        "sha256": {},
    }
    folder = pathlib.Path(folder)
    described = folder / "meta.json"
    # meta.json is opened first, so it gets its name last
    with atomic(described, "w") as new, atomic(folder / "train.bin") as train, atomic(folder / "val.bin") as val:
        for split, file in (("train", train), ("val", val)):
            digest, count = hashlib.sha256(), 0
            for ids in map(np.asarray, splits[split]):
                if ids.size and not 0 <= (worst := ids.min() if ids.min() < 0 else ids.max()) < vocab_size:
                    allowed = f"with vocab_size={vocab_size}, ids are from 0 to {vocab_size - 1}"
                    raise UserError(f"{source} has the id {worst}: {allowed}. Mend the ids or vocab_size")
                raw = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
                file.write(raw)
                digest.update(raw)
                count += len(ids)
            if not count:
                raise UserError(f"{source} is too short: its {split} split is empty")
            meta["tokens"][split], meta["sha256"][split] = count, digest.hexdigest()
        json.dump(meta | extra, new, indent=1, ensure_ascii=False)
        for file in (train, val, new):  # no file may replace an old one before all are on the disk
            file.flush()
            os.fsync(file.fileno())
        with atomic(described, "w", aside=".unfinished") as file:
            json.dump(UNFINISHED, file)
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
