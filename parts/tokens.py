"""What the ids of a data set mean: its meta.json to encode, decode and the size of the vocabulary."""

import functools
import json
import pathlib
import pickle

from parts.errors import UserError

GPT2 = {"tokenizer": "gpt2", "vocab_size": 50257}  # the meta of data in GPT-2's BPE


@functools.lru_cache(maxsize=1)
def gpt2_bpe():
    """GPT-2's byte-pair encoding, by tiktoken. Raises UserError where its two files cannot be had."""
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken lets through whatever its download raises
        raise UserError(
            f"cannot load GPT-2's BPE files ({type(error).__name__}): tiktoken downloads them once; without a network,"
            " set TIKTOKEN_CACHE_DIR to a folder that has them"
        ) from error


def data_folder(root, dataset):
    """The folder of a `dataset`: one of data/, or else a path. Raises UserError where there is neither."""
    for folder in (root / "data" / dataset, pathlib.Path(dataset)):
        if folder.is_dir():
            return folder
    there = ", ".join(sorted(f.parent.name for f in (root / "data").glob("*/prepare.py")))
    raise UserError(f"dataset={str(dataset)!r} is no folder of data/ ({there}), and no path to a folder")


def check_fit(meta, vocab_size, whose):
    """Raise UserError where the ids of `meta` are more than the `vocab_size` of a model."""
    if meta["vocab_size"] > vocab_size:
        raise UserError(
            f"{whose} has {meta['vocab_size']} ids, the model {vocab_size}: prepare the data with the model's"
            " tokenizer, or set --vocab_size to what the data needs"
        )


def read_meta(folder):
    """The meta.json of a data folder as a dict; a nanoGPT meta.pkl is read too; neither: GPT-2's BPE, as in nanoGPT."""
    folder = pathlib.Path(folder)
    if (folder / "meta.json").exists():
        try:
            meta = json.loads((folder / "meta.json").read_text())
            Tokenizer(meta)
            counts = [meta["vocab_size"], *meta.get("tokens", {}).values()]
            if not all(isinstance(n, int) for n in counts) or meta.get("dtype", "uint16") not in ("uint16", "uint32"):
                raise ValueError("counts must be whole numbers, dtype uint16 or uint32")
            return meta
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder / 'meta.json'} is damaged ({error}): run {folder / 'prepare.py'} again"
            ) from error
    if (folder / "meta.pkl").exists():
        try:
            with open(folder / "meta.pkl", "rb") as file:
                itos = _PlainUnpickler(file).load()["itos"]
            return {"tokenizer": "char", "vocab_size": len(itos), "itos": [itos[i] for i in range(len(itos))]}
        except Exception as error:  # a damaged pickle can raise anything
            raise UserError(f"{folder / 'meta.pkl'} is no nanoGPT meta.pkl: {error}") from error
    return GPT2


class _PlainUnpickler(pickle.Unpickler):
    """Admits numbers, text and containers: a pickle that names a class or a function could run anything."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks to load {module}.{name}, which is code")


class Tokenizer:
    """Text to ids and ids to UTF-8 bytes, as `meta` (a meta.json) says: 'gpt2', 'char' or 'byte'."""

    def __init__(self, meta):
        self.kind, self.vocab_size = meta["tokenizer"], int(meta["vocab_size"])
        if self.kind == "char":
            self.itos = meta["itos"]
            self.stoi = {c: i for i, c in enumerate(self.itos)}
        elif self.kind not in ("gpt2", "byte"):
            raise UserError(f"tokenizer {self.kind!r} is unknown: it can be 'gpt2', 'char' or 'byte'")

    def encode(self, text):
        """Ids of `text`. In GPT-2's BPE, <|endoftext|> is its special id. Raises UserError for an unknown character."""
        if self.kind == "gpt2":
            return gpt2_bpe().encode(text, allowed_special={"<|endoftext|>"})
        if self.kind == "byte":
            return list(text.encode())
        unknown = sorted(set(text) - self.stoi.keys())
        if unknown:
            names, known = ", ".join(map(repr, unknown)), "".join(self.itos)
            raise UserError(f"the training text has no {names}: it has {known!r}. Change --start")
        return [self.stoi[c] for c in text]

    def decode(self, ids):
        """UTF-8 bytes of `ids`; a single id may be part of a character."""
        if self.kind == "gpt2":
            return gpt2_bpe().decode_bytes(ids)
        if self.kind == "byte":
            return bytes(ids)
        return "".join(self.itos[i] for i in ids).encode()
