"""Text to `train.bin`, `val.bin` and `meta.json`: what every data/*/prepare.py shares.

A bin is a row of little-endian token ids, uint16, or uint32 for vocabularies above 65,536 (nanoGPT's format).
"""

import argparse
import hashlib
import json
import pathlib
import urllib.request

import numpy as np

from parts.errors import UserError
from parts.files import atomic

TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",  # its SHA-256
)


def arguments(script, description):
    """The command line of a prepare script: `.input`, a local path or None, and `.out_dir`, else its own folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--input", type=pathlib.Path, metavar="PATH", help="local text in place of the corpus")
    here = pathlib.Path(script).resolve().parent
    parser.add_argument("--out_dir", type=pathlib.Path, metavar="DIR", default=here, help="default: %(default)s")
    args = parser.parse_args()
    if args.input and not args.input.exists():
        raise UserError(f"--input={args.input} does not exist: name a local file or folder")
    return args


def text(args, url, sha256):
    """The local file of `args`, or what `url` serves, as text; and what it is, for `meta.json`."""
    if args.input and args.input.is_dir():
        raise UserError(f"--input={args.input} is a folder: this corpus is one text, name a file")
    if args.input:
        source, raw = str(args.input.name), args.input.read_bytes()
    else:
        try:
            with urllib.request.urlopen(url, timeout=60) as page:
                source, raw = url, page.read()
        except OSError as error:
            raise UserError(f"cannot download {url}: {error}. Give a local copy: --input=PATH") from error
        if hashlib.sha256(raw).hexdigest() != sha256:
            raise UserError(f"{url} no longer serves the corpus it did. Give a local copy: --input=PATH")
    try:
        return raw.decode(), source
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def write(folder, splits, source, tokenizer, vocab_size, **extra):
    """Write {'train': arrays, 'val': arrays} as bins, and meta.json last. Memory: one array at a time.

    `splits` maps a split to an iterable of arrays of ids. `tokenizer` is 'gpt2', 'char' or 'byte'; `extra` goes into
    meta.json too. Raises UserError where a split is empty or the disk is full; then no bin has changed.
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
