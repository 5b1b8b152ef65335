"""Convert text to ids and ids to text, as the meta of a data set says."""

import contextlib
import functools
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tiktoken

from fusedgpt.errors import UserError, first_line, is_panic, shown

GPT2 = {"tokenizer": "gpt2", "vocab_size": 50257}  # the meta of data in GPT-2's BPE
END_OF_TEXT = "<|endoftext|>"  # how a prompt writes the id that ends a document
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a blank in tokenizers that SentencePiece made, as that of Llama 2


@functools.lru_cache(maxsize=1)
def tiktoken_bpe(name: str):
    """A byte-pair encoding of tiktoken's. Raises UserError if its files cannot be loaded."""
    how = "without a network, set TIKTOKEN_CACHE_DIR to a folder into which another machine has downloaded them"
    with fails_as(f"cannot load the BPE files of {name}: {how}"):
        return tiktoken.get_encoding(name)


@functools.cache
def _bpe_of_thread(name, thread):
    """tiktoken's BPE for one thread alone. If threads share one, all but the first wait for a lock at each word."""
    bpe = tiktoken_bpe(name)
    parts = {"mergeable_ranks": bpe._mergeable_ranks, "special_tokens": bpe._special_tokens}
    return tiktoken.Encoding(bpe.name, pat_str=bpe._pat_str, **parts)  # as tiktoken's README does


@contextlib.contextmanager
def fails_as(sentence: str) -> Iterator[None]:
    """A context for calls of other packages: an error, even a panic of Rust code, becomes a UserError of `sentence`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError) or not (isinstance(error, Exception) or is_panic(error)):
            raise  # such as KeyboardInterrupt
        raise UserError(f"{sentence}: {first_line(error)}") from error


def vocabulary(meta: Any) -> int:
    """The number of ids in `meta`. Raises UserError if there is none, or if it is out of range."""
    size = meta.get("vocab_size") if isinstance(meta, dict) else None
    if type(size) is not int or not 1 <= size <= 2**24:  # far above any in use: more would fill the memory
        raise UserError(f"vocab_size={shown(size)} must be a whole number from 1 to {2**24}")
    return size


def end_of_text(meta: dict) -> int | None:
    """The id that ends a document in data with this `meta`, if there is one. Raises UserError if it cannot be an id."""
    end = meta.get("end_of_text")
    if end is None and meta.get("tokenizer") == "gpt2":
        return 50256
    if end is not None and not (type(end) is int and 0 <= end < meta["vocab_size"]):
        raise UserError(f"end_of_text={shown(end)} must be an id below {meta['vocab_size']}")
    return end


def byte_characters() -> list[str]:
    """The character that stands for each byte in the vocabulary of a byte-level BPE (GPT-2's bytes_to_unicode)."""
    shown_as_they_are = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = map(chr, range(256, 512))
    return [chr(byte) if byte in shown_as_they_are else next(others) for byte in range(256)]


class Tokenizer:
    """Text to ids and ids to UTF-8 bytes, as `meta` (the meta.json of a data set) says. meta["tokenizer"] is one of

        gpt2      GPT-2's BPE, or the name of another of tiktoken's; loaded when it is first needed
        byte      256 ids, and one more if there is an end_of_text
        char      meta["itos"] has the character of each id, or None
        json      meta["tokenizer_json"] is the tokenizer.json of a BPE that is byte-level or SentencePiece's

    Raises UserError for 'unknown' (a meta.pkl with a size alone), any other tokenizer, and a damaged meta.
    """

    def __init__(self, meta: Any):
        self.vocab_size, self.end_of_text = vocabulary(meta), end_of_text(meta)
        self.kind, self.meta, self.itos = meta.get("tokenizer"), meta, meta.get("itos")
        self.ends = {self.end_of_text} - {None}  # the ids at which a text ends
        if self.kind == "gpt2":
            self.vocab_size = GPT2["vocab_size"]  # meta may have more: padding, whose ids have no text
        elif self.kind == "byte":
            self.vocab_size = 256 + len(self.ends)
        elif self.kind == "char":
            if not isinstance(self.itos, list) or len(self.itos) != self.vocab_size:
                raise UserError(f"itos must be a list of {self.vocab_size} characters, got {shown(self.itos)}")
        elif self.kind == "json":
            if not isinstance(meta.get("tokenizer_json"), dict):
                raise UserError(f"tokenizer_json must be an object, got {shown(meta.get('tokenizer_json'))}")
        elif self.kind == "unknown":
            raise UserError("the data's meta.pkl has no itos (id to character): training needs none, sampling does")
        elif self.kind not in (known := tiktoken.list_encoding_names()):
            kinds = f"byte, char, train:SIZE, the path of a tokenizer.json, {', '.join(known)}"
            raise UserError(f"tokenizer {shown(self.kind)} is unknown: it can be {kinds}")

    @functools.cached_property
    def tokens(self) -> list[bytes | None]:
        """The UTF-8 bytes of each id, or None. Raises UserError if the tokenizer cannot be loaded."""
        if self.kind == "byte":
            return [bytes([byte]) for byte in range(256)] + [END_OF_TEXT.encode()] * (self.vocab_size - 256)
        if self.kind == "char":
            return [c and c.encode("utf-8", "replace") for c in self.itos]
        if self.kind == "json":
            found = _bytes_of_ids(self._json, self.meta["tokenizer_json"])
        else:
            bpe = tiktoken_bpe(self.kind)
            texts = [*bpe.token_byte_values(), *(name.encode() for name in bpe.special_tokens_set)]
            found = {bpe.encode_single_token(text): text for text in texts}
        return [found.get(id) for id in range(self.vocab_size)]

    def byte_lengths(self) -> np.ndarray:
        """The number of UTF-8 bytes of each id, int64. It is 0 for end_of_text, which no text contains."""
        lengths = np.array([len(token or b"") for token in self.tokens], np.int64)
        if self.end_of_text is not None:
            lengths[self.end_of_text] = 0
        return lengths

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt. <|endoftext|> in it becomes the id that ends a document, if there is one.

        Raises UserError for a character that UTF-8 or the tokenizer does not have.
        """
        if text != text.encode("utf-8", "replace").decode():  # a file of another encoding, or half a surrogate pair
            raise UserError(f"the prompt {shown(text)} cannot be written in UTF-8: change it")
        if self.end_of_text is None:
            return self.encode_text(text).tolist()
        ids = []
        for part in text.split(END_OF_TEXT):
            ids += [*self.encode_text(part).tolist(), self.end_of_text]
        return ids[:-1]

    def encode_text(self, text: str) -> np.ndarray:
        """Ids of a UTF-8 text as an array. A special token in the text is encoded as ordinary text.

        Raises UserError for an unknown character.
        """
        if self.kind == "byte":
            return np.frombuffer(text.encode(), np.uint8)
        if self.kind == "char":
            if unknown := set(text) - self._id_of.keys():
                raise UserError(f"the training text has no {shown(sorted(unknown)).strip('[]')}: change the prompt")
            return np.fromiter(map(self._id_of.get, text), np.int64, len(text))
        if self.kind == "json":
            with fails_as(f"tokenizer_json cannot tokenize {shown(text)}; change the text, or take another tokenizer"):
                # unlike `encode`, this releases Python's lock
                (encoded,) = self._json.encode_batch_fast([text], add_special_tokens=False)
            return np.array(encoded.ids, np.uint32)
        return tiktoken_bpe(self.kind).encode_to_numpy(text, disallowed_special=())

    def encode_texts(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of encode_text for all texts in one array, and the number of ids after which each text ends.

        Made for threads: as much as possible happens in one call that releases Python's lock.
        """
        if self.kind not in ("byte", "char", "json"):
            bpe, joined = _bpe_of_thread(self.kind, threading.get_ident()), END_OF_TEXT.join([*texts, ""])
            if joined.count(END_OF_TEXT) == len(texts):  # no text has <|endoftext|> in it
                ids = bpe.encode_to_numpy(joined, allowed_special={END_OF_TEXT}, disallowed_special=())
                is_end = ids == bpe.eot_token
                return ids[~is_end], np.flatnonzero(is_end) - np.arange(len(texts))
        each = [self.encode_text(text) for text in texts]
        return np.concatenate(each), np.cumsum([len(ids) for ids in each])

    def decode(self, ids: list[int]) -> bytes:
        """UTF-8 bytes of `ids`. One id may be only part of a character. An id without text becomes U+FFFD."""
        unknown = "\N{REPLACEMENT CHARACTER}".encode()
        texts = (self.tokens[id] if id < len(self.tokens) else None for id in ids)  # a model may be padded, as Qwen's
        return b"".join(unknown if text is None else text for text in texts)

    @functools.cached_property
    def _id_of(self):
        return {c: id for id, c in enumerate(self.itos) if c is not None}

    @functools.cached_property
    def _json(self):
        from tokenizers import Tokenizer as Bpe

        with fails_as("tokenizer_json is no tokenizer.json of `tokenizers`"):
            loaded = Bpe.from_str(json.dumps(self.meta["tokenizer_json"]))
            largest = max(loaded.get_vocab().values())
        if largest >= self.vocab_size:
            raise UserError(f"tokenizer_json has the id {largest}, and vocab_size is {self.vocab_size}")
        loaded.encode_special_tokens = True  # as ordinary text
        loaded.no_truncation()
        loaded.no_padding()
        return loaded


def without_prefix(content: dict) -> dict:
    """A tokenizer.json that puts no blank before a text, as SentencePiece's do: a text has the ids of its parts."""
    if not _of_sentencepiece(content):
        return content
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    back = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return content | {"normalizer": blanks, "pre_tokenizer": None, "decoder": decoder}


def _of_sentencepiece(content):
    return content["model"].get("type") == "BPE" and bool(content["model"].get("byte_fallback"))


def _bytes_of_ids(tokenizer, content):
    """{id: its bytes}. Raises UserError unless the names in the vocabulary are of bytes, or SentencePiece's."""
    added = {id: token.content.encode() for id, token in tokenizer.get_added_tokens_decoder().items()}
    names = {id: name for name, id in tokenizer.get_vocab().items() if id not in added}
    if _of_sentencepiece(content):
        byte = {f"<0x{n:02X}>": bytes([n]) for n in range(256)}
        if byte.keys() <= {*names.values()}:
            return {id: byte.get(name) or name.replace(BLANK, " ").encode() for id, name in names.items()} | added
    elif '"type": "ByteLevel"' in json.dumps([content.get("normalizer"), content.get("pre_tokenizer")]):
        byte = {character: n for n, character in enumerate(byte_characters())}
        if byte.keys() >= set("".join(names.values())):
            return {id: bytes(byte[c] for c in name) for id, name in names.items()} | added
    how = "take GPT-2's, Llama 3's or Qwen's, or train one: data/text/prepare.py --tokenizer=train:8192"
    raise UserError(f"tokenizer_json is not byte-level, so it does not give back every text: {how}")
