"""Text to ids and ids to text."""

import functools
from typing import Any

from fusedgpt.errors import UserError, shown

GPT2 = {"tokenizer": "gpt2", "vocab_size": 50257}  # the meta of data in GPT-2's BPE
KINDS = ("gpt2", "char", "byte")
LARGEST_VOCABULARY = 2**24  # far above any in use; a damaged meta that has more would fill the memory


@functools.lru_cache(maxsize=1)
def gpt2_bpe():
    """GPT-2's byte-pair encoding, by tiktoken. Raises UserError if its two files cannot be had."""
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken passes on whatever its download raises
        raise UserError(
            f"cannot load GPT-2's BPE files ({type(error).__name__}): tiktoken downloads them once; without a network,"
            " set TIKTOKEN_CACHE_DIR to a folder that has them"
        ) from error


def vocabulary(meta: Any) -> int:
    """The number of ids in `meta`. Raises UserError if `meta` is no dict, or the number is none that data can have."""
    if not isinstance(meta, dict):
        raise UserError(f"meta is a {type(meta).__name__}: it must be an object with tokenizer and vocab_size")
    size = meta.get("vocab_size")
    if type(size) is not int or not 1 <= size <= LARGEST_VOCABULARY:
        raise UserError(f"vocab_size={shown(size)} must be a whole number from 1 to {LARGEST_VOCABULARY}")
    return size


def _characters(meta):
    """meta["itos"], checked: the text of each id, or None."""
    itos = meta.get("itos")
    if not isinstance(itos, list) or len(itos) != meta["vocab_size"]:
        raise UserError(f"itos must be a list of vocab_size={meta['vocab_size']} characters, got {shown(itos)}")
    for id, c in enumerate(itos):
        if c is not None and not (isinstance(c, str) and _is_utf8(c)):
            raise UserError(f"itos must hold characters of UTF-8 or null, got {shown(c)} for id {id}")
    return itos


def _is_utf8(text):
    try:
        return text.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


class Tokenizer:
    """Text to ids and ids to UTF-8 bytes, as `meta` (the meta.json of a data set) says.

    meta["tokenizer"] is 'gpt2', 'byte', or 'char' with the characters in meta["itos"], where None is an id that has no
    character. 'unknown' (a nanoGPT meta.pkl that holds only the vocabulary's size) can be trained on but not used here.
    Raises UserError for any other, and for a meta that is damaged.
    """

    def __init__(self, meta: dict):
        self.vocab_size = vocabulary(meta)
        self.kind = meta.get("tokenizer")
        if self.kind == "gpt2":
            self.vocab_size = GPT2["vocab_size"]  # a data set may be padded beyond; those ids have no text
        elif self.kind == "byte":
            self.vocab_size = 256
        elif self.kind == "char":
            self.itos = _characters(meta)
            self.stoi = {c: i for i, c in enumerate(self.itos) if c is not None}
        elif self.kind == "unknown":
            raise UserError(
                "the data's meta.pkl has no itos (id to character): training needs only its vocab_size, but sampling"
                " needs itos. Write it with meta.pkl's vocab_size, itos and stoi, as data/shakespeare_char does"
            )
        else:
            raise UserError(f"tokenizer {shown(self.kind)} is unknown: it can be {', '.join(map(repr, KINDS))}")

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. In GPT-2's BPE, <|endoftext|> is its special id.

        Raises UserError for a character that is unknown, or none of UTF-8.
        """
        if not _is_utf8(text):
            raise UserError(f"the prompt {shown(text)} cannot be written in UTF-8: change --start")
        if self.kind == "gpt2":
            return gpt2_bpe().encode(text, allowed_special={"<|endoftext|>"})
        if self.kind == "byte":
            return list(text.encode())
        unknown = sorted(set(text) - self.stoi.keys())
        if unknown:
            names, known = ", ".join(map(repr, unknown)), "".join(self.stoi)
            raise UserError(f"the training text has no {names}: it has {known!r}. Change --start")
        return [self.stoi[c] for c in text]

    def decode(self, ids: list[int]) -> bytes:
        """UTF-8 bytes of `ids`; one id may be only part of a character. An id without a character becomes U+FFFD."""
        if self.kind == "gpt2":
            return gpt2_bpe().decode_bytes(ids)
        if self.kind == "byte":
            return bytes(ids)
        return "".join("\N{REPLACEMENT CHARACTER}" if self.itos[i] is None else self.itos[i] for i in ids).encode()

    def ids_without_text(self) -> list[int]:
        """The ids that have no character, because the meta of the data has gaps."""
        return [i for i, c in enumerate(self.itos) if c is None] if self.kind == "char" else []
