"""Text to ids and ids to text."""

import functools

from fusedgpt.errors import UserError

GPT2 = {"tokenizer": "gpt2", "vocab_size": 50257}  # the meta of data in GPT-2's BPE
KINDS = ("gpt2", "char", "byte")


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


class Tokenizer:
    """Text to ids and ids to UTF-8 bytes, as `meta` (the meta.json of a data set) says.

    meta["tokenizer"] is 'gpt2', 'byte', or 'char' with the characters in meta["itos"], where None is an id that has no
    character. 'unknown' (a nanoGPT meta.pkl that holds only the vocabulary's size) can be trained on but not used here.
    Raises UserError for any other.
    """

    def __init__(self, meta: dict):
        self.kind, self.vocab_size = meta["tokenizer"], int(meta["vocab_size"])
        if self.kind == "gpt2":
            self.vocab_size = GPT2["vocab_size"]  # a data set may be padded beyond; those ids have no text
        elif self.kind == "char":
            self.itos = meta["itos"]
            self.stoi = {c: i for i, c in enumerate(self.itos) if c is not None}
        elif self.kind == "unknown":
            raise UserError(
                "the data's meta.pkl has no itos (id to character): training needs only its vocab_size, but sampling"
                " needs itos. Write it with meta.pkl's vocab_size, itos and stoi, as data/shakespeare_char does"
            )
        elif self.kind != "byte":
            raise UserError(f"tokenizer {self.kind!r} is unknown: it can be {', '.join(map(repr, KINDS))}")

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. In GPT-2's BPE, <|endoftext|> is its special id. Raises UserError for an unknown character."""
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
