"""What every data/*/prepare.py shares: its command line, reading the text, and writing bins and meta.json."""

import argparse
import hashlib
import io
import json
import pathlib
import urllib.request
from collections.abc import Iterable

import numpy as np

from fusedgpt.errors import UserError
from fusedgpt.files import atomic

TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",  # its SHA-256
)


def arguments(script: str, description: str) -> argparse.Namespace:
    """The command line of a prepare script: `.input`, a local path or None; `.out_dir`, by default its own folder.

    Raises UserError if --input does not exist, or is a pipe or a device, which some scripts read more than once.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--input", type=pathlib.Path, metavar="PATH", help="local text to use instead of the corpus")
    here = pathlib.Path(script).resolve().parent
    parser.add_argument("--out_dir", type=pathlib.Path, metavar="DIR", default=here, help="default: %(default)s")
    args = parser.parse_args()
    if args.input and not args.input.exists():
        raise UserError(f"--input={args.input} does not exist: name a local file or folder")
    if args.input and not (args.input.is_file() or args.input.is_dir()):
        raise UserError(f"--input={args.input} is a pipe or a device: write its content to a file and name that")
    return args


def read_text(script: str, args: argparse.Namespace, url: str, sha256: str) -> tuple[str, str]:
    """The text to prepare, and its source for meta.json: `--input`, else input.txt beside the script, else `url`.

    nanoGPT's users put their own text into input.txt beside a copy of prepare.py. Line ends of Windows become \\n, as
    in nanoGPT. Raises UserError if --input is a folder, if the download fails or has changed, or if the text is not
    UTF-8.
    """
    beside = pathlib.Path(script).resolve().with_name("input.txt")
    if args.input and args.input.is_dir():
        raise UserError(f"--input={args.input} is a folder: this corpus is one text, name a file")
    if not args.input and beside.is_file():
        print(f"reading {beside}, which is beside this script; --input=PATH takes another text")
    if local := args.input or (beside if beside.is_file() else None):
        source, raw = local.name, local.read_bytes()
    else:
        source, raw = url, _download(url, sha256)
    try:
        return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8").read(), source
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _download(url, sha256):
    try:
        with urllib.request.urlopen(url, timeout=60) as page:
            raw = page.read()
    except OSError as error:
        raise UserError(f"cannot download {url}: {error}. Give a local copy: --input=PATH") from error
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise UserError(f"{url} no longer serves the corpus it did. Give a local copy: --input=PATH")
    return raw


def write(
    folder: str | pathlib.Path,
    splits: dict[str, Iterable[np.ndarray]],
    source: str,
    tokenizer: str,
    vocab_size: int,
    **extra,
) -> None:
    """Write train.bin, val.bin and, last, meta.json to `folder`. Memory: one array at a time.

    `splits` maps 'train' and 'val' to arrays of ids. `tokenizer` is 'gpt2', 'char' or 'byte'; `extra` goes into
    meta.json too. Raises UserError if a split is empty or the disk is full; then no bin has changed.
    """
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    meta = {
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "source": source,
        "tokens": {},
        "sha256": {},
    }
    folder = pathlib.Path(folder)
    with atomic(folder / "train.bin") as train, atomic(folder / "val.bin") as val:
        for split, file in (("train", train), ("val", val)):
            digest, count = hashlib.sha256(), 0
            for ids in splits[split]:
                raw = np.asarray(ids).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
                file.write(raw)
                digest.update(raw)
                count += len(ids)
            if not count:
                raise UserError(f"{source} is too short: its {split} split is empty")
            meta["tokens"][split], meta["sha256"][split] = count, digest.hexdigest()
    with atomic(folder / "meta.json", "w") as file:
        json.dump(meta | extra, file, indent=1, ensure_ascii=False)
    for split, count in meta["tokens"].items():
        print(f"{folder / split}.bin: {count:,} tokens")
