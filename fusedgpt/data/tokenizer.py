"""Convert text to ids and ids to text, as the meta of a data set says, and make such a meta for a new data set."""

import contextlib
import functools
import json
import pathlib
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tiktoken

from fusedgpt.errors import UserError, first_line, is_panic, shown

GPT2 = {"tokenizer": "gpt2", "vocab_size": 50257}  # the meta of data in GPT-2's BPE
KINDS = ("gpt2", "char", "byte", "json")  # and tiktoken's other encodings, by name
END_OF_TEXT = "<|endoftext|>"  # how a prompt writes the id that ends a document
LARGEST_VOCABULARY = 2**24  # far above any in use; a damaged meta with more would fill the memory
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a blank in tokenizers that SentencePiece made, as that of Llama 2
BPES_OF_THREAD = threading.local()  # each thread's own BPEs, by name
# GPT-2's pattern, and one that finds the same words 1.7 times as fast. tiktoken's engine tries alternatives one by one
# if they look ahead or are possessive (`++`). It matches a group of others in one pass, in which `++` and `+` match the
# same, because what follows matches none of the repeated characters.
GPT2S_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
FASTER = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s++$|\s+(?!\S)|\s"
TRAINED = "train:"  # followed by the size of the vocabulary
BYTES_AND_END = 257  # the smallest vocabulary that can be trained
SAMPLE = 2**26  # train a BPE on the first characters
PIECE = 2**16  # characters to train on at once: `tokenizers` needs hundreds of bytes for each
# a text with every byte of UTF-8, letters of both cases and all blanks; in NFC, because some models compose characters
EVERY_BYTE = unicodedata.normalize(
    "NFC", "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000))))
)
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # names of the end-of-text token in tokenizer.json files


@functools.lru_cache(maxsize=1)
def tiktoken_bpe(name: str):
    """A byte-pair encoding of tiktoken's. Raises UserError if its files cannot be loaded."""
    with fails_as(
        f"cannot load the BPE files of {name}: tiktoken downloads them once. Without a network, set TIKTOKEN_CACHE_DIR"
        " to a folder into which another machine has downloaded them, or give data/text/prepare.py --tokenizer=byte"
    ):
        return tiktoken.get_encoding(name)


def _bpe_of_thread(name):
    """tiktoken's BPE for this thread alone. If threads share one, all but the first wait for a lock at each word."""
    copies = vars(BPES_OF_THREAD)
    if name not in copies:
        bpe = tiktoken_bpe(name)
        parts = {"mergeable_ranks": bpe._mergeable_ranks, "special_tokens": bpe._special_tokens}
        pattern = bpe._pat_str.replace(GPT2S_PATTERN, FASTER)
        copies[name] = tiktoken.Encoding(bpe.name, pat_str=pattern, **parts)  # as tiktoken's README does
    return copies[name]


@contextlib.contextmanager
def fails_as(sentence: str) -> Iterator[None]:
    """A context for calls of tiktoken, tokenizers and datasets: an error becomes a UserError of `sentence` and reason.

    They have no exception type of their own, and a damaged file may make their Rust code panic.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError) or not (isinstance(error, Exception) or is_panic(error)):
            raise  # such as KeyboardInterrupt
        raise UserError(f"{sentence}: {first_line(error)}") from error


def read_json(text: str, name: str) -> Any:
    """The tokenizers.Tokenizer that the tokenizer.json `text` describes.

    Raises UserError if it describes none, or if no model can have its ids. The error calls the text `name`.
    """
    from tokenizers import Tokenizer

    with fails_as(f"{name} is no tokenizer.json of `tokenizers`"):
        read = Tokenizer.from_str(text)
        largest = max(read.get_vocab().values(), default=LARGEST_VOCABULARY)
    if largest >= LARGEST_VOCABULARY:
        raise UserError(f"{name} must have ids from 0 to {LARGEST_VOCABULARY - 1}, got {largest}: name another")
    return read


def vocabulary(meta: Any) -> int:
    """The number of ids in `meta`. Raises UserError if there is none, or if it is out of range."""
    size = meta.get("vocab_size") if isinstance(meta, dict) else None
    if type(size) is not int or not 1 <= size <= LARGEST_VOCABULARY:
        raise UserError(f"vocab_size={shown(size)} must be a whole number from 1 to {LARGEST_VOCABULARY}")
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
    """The character that stands for each byte in the vocabulary of a byte-level BPE (GPT-2's bytes_to_unicode).

    Bytes that Latin-1 prints are written as its characters, all others as the characters from U+0100 on.
    """
    shown_as_they_are = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = map(chr, range(256, 512))
    return [chr(byte) if byte in shown_as_they_are else next(others) for byte in range(256)]


class Tokenizer:
    """Text to ids and ids to UTF-8 bytes, as `meta` (the meta.json of a data set) says.

    meta["tokenizer"] is one of these:

        gpt2      GPT-2's BPE, or the name of another of tiktoken's; loaded when it is first needed
        byte      256 ids, and one more if there is an end_of_text
        char      meta["itos"] has the character of each id, or None
        json      meta["tokenizer_json"] is the tokenizer.json of a BPE, as Hugging Face's `tokenizers` reads; it is
                  byte-level, or made by SentencePiece with a token for each byte, and puts no blank before a text
        unknown   a nanoGPT meta.pkl with only the vocabulary's size, which is enough to train, but not to encode

    meta["end_of_text"] is the id that ends a document, if there is one. For gpt2 it need not be given.
    Raises UserError for 'unknown', for any other tokenizer, and for a meta that is damaged.
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
            if odd := [c for c in self.itos if not isinstance(c, str | None)]:
                raise UserError(f"itos must hold characters or null, got {shown(odd[0])}")
        elif self.kind == "json":
            if not isinstance(meta.get("tokenizer_json"), dict):
                raise UserError(f"tokenizer_json must be an object, got {shown(meta.get('tokenizer_json'))}")
        elif self.kind == "unknown":
            raise UserError(
                "the data's meta.pkl has no itos (id to character): training needs only its vocab_size, but sampling"
                " needs itos. Write it with meta.pkl's vocab_size, itos and stoi, as data/shakespeare_char does"
            )
        elif self.kind not in (known := tiktoken.list_encoding_names()):
            raise UserError(f"tokenizer {shown(self.kind)} is unknown: it can be byte, char, json, {', '.join(known)}")

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
        """The number of UTF-8 bytes of each id, int64. It is 0 for end_of_text, which no text contains.

        Raises UserError if the tokenizer cannot be loaded.
        """
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
            return self._encode_characters(text)
        if self.kind == "json":
            with fails_as(f"tokenizer_json cannot tokenize {shown(text)}; change the text, or take another tokenizer"):
                # unlike `encode`, this releases Python's lock
                (encoded,) = self._json.encode_batch_fast([text], add_special_tokens=False)
            return np.array(encoded.ids, np.uint32)
        return tiktoken_bpe(self.kind).encode_to_numpy(text, disallowed_special=())

    def encode_texts(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of encode_text for all texts in one array, and the number of ids after which each text ends.

        Made for threads: as much as possible happens in one call that releases Python's lock. Raises UserError for an
        unknown character.
        """
        encode = self.encode_text
        if self.kind not in ("byte", "char", "json"):
            bpe, joined = _bpe_of_thread(self.kind), END_OF_TEXT.join([*texts, ""])
            if joined.count(END_OF_TEXT) == len(texts):  # no text has <|endoftext|> in it
                ids = bpe.encode_to_numpy(joined, allowed_special={END_OF_TEXT}, disallowed_special=())
                is_end = ids == bpe.eot_token
                return ids[~is_end], np.flatnonzero(is_end) - np.arange(len(texts))
            encode = functools.partial(bpe.encode_to_numpy, disallowed_special=())
        each = [encode(text) for text in texts]
        return np.concatenate(each), np.cumsum([len(ids) for ids in each])

    def decode(self, ids: list[int]) -> bytes:
        """UTF-8 bytes of `ids`. One id may be only part of a character. An id without text becomes U+FFFD.

        So do ids beyond the tokenizer's, because a model may have more: Qwen's is padded to a round number.
        """
        unknown = "\N{REPLACEMENT CHARACTER}".encode()
        texts = (self.tokens[id] if id < len(self.tokens) else None for id in ids)
        return b"".join(unknown if text is None else text for text in texts)

    def _encode_characters(self, text):
        if unknown := set(text) - self._id_of.keys():
            names, known = shown(sorted(unknown)).strip("[]"), "".join(c for c in self.itos if c is not None)
            raise UserError(f"the training text has no {names}: it has {shown(known)}; change the prompt")
        return np.fromiter(map(self._id_of.get, text), np.int64, len(text))

    @functools.cached_property
    def _id_of(self):
        return {c: id for id, c in enumerate(self.itos) if c is not None}

    @functools.cached_property
    def _json(self):
        loaded = read_json(json.dumps(self.meta["tokenizer_json"]), "tokenizer_json")
        if (size := 1 + max(loaded.get_vocab().values())) > self.vocab_size:
            raise UserError(f"tokenizer_json has {size} ids, and vocab_size is {self.vocab_size}")
        loaded.encode_special_tokens = True  # as ordinary text
        loaded.no_truncation()
        loaded.no_padding()
        return loaded


def without_prefix(content: dict) -> dict:
    """A tokenizer.json whose BPE puts no blank before a text, and takes none away from its beginning.

    Those that SentencePiece made do, so that the ids of a text would not be those of its parts. All they need is BLANK
    for each blank, and the other way round.
    """
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
    raise UserError(
        "tokenizer_json is not byte-level, so it does not give back every text: take one whose pre-tokenizer is"
        " ByteLevel, as GPT-2, Llama 3 and Qwen have it, or train one: data/text/prepare.py --tokenizer=train:8192"
    )


def made(name: str, corpus) -> dict:
    """The meta of the tokenizer `name`: byte, char, train:SIZE, the path of a tokenizer.json, or one of tiktoken's.

    Its `end_of_text` is the id that ends a document; a tokenizer.json may have none. Raises UserError if there is no
    such tokenizer, or if it cannot be used here.
    """
    if name == "byte":
        return {"tokenizer": "byte", "vocab_size": 257, "end_of_text": 256}
    if name == "char":
        found = set()
        for text in _texts(corpus):
            found.update(text)
        itos = [*sorted(found), END_OF_TEXT]
        return {"tokenizer": "char", "vocab_size": len(itos), "itos": itos, "end_of_text": len(itos) - 1}
    if name.startswith(TRAINED):
        size = name.removeprefix(TRAINED)
        if not (size.isdecimal() and len(size) < 9 and BYTES_AND_END <= int(size) <= LARGEST_VOCABULARY):
            raise UserError(f"--tokenizer={shown(name)} must be train:SIZE, and SIZE from {BYTES_AND_END} up, as 8192")
        return _trained(int(size), corpus)
    if name.endswith(".json") or "/" in name:
        return _of_file(pathlib.Path(name))
    if name not in (known := tiktoken.list_encoding_names()):
        raise UserError(
            f"--tokenizer={shown(name)} is unknown: it can be byte, char, train:SIZE, the path of a tokenizer.json, or"
            f" {', '.join(known)}"
        )
    bpe = tiktoken_bpe(name)
    return {"tokenizer": name, "vocab_size": bpe.n_vocab, "end_of_text": bpe.eot_token}


def _texts(corpus):
    return (text for file in corpus.files for text, _ in corpus.read(file))


def _sample(corpus):
    """The first SAMPLE characters of a text, in pieces."""
    left = SAMPLE
    for text in _texts(corpus):
        yield from (text[at : at + PIECE] for at in range(0, min(left, len(text)), PIECE))
        left -= len(text)
        if left <= 0:
            return


def without_end(meta: dict) -> dict:
    """The meta of bytes or characters without its last id, end-of-text, which a single document does not need."""
    alone = meta | {"vocab_size": meta["vocab_size"] - 1}
    del alone["end_of_text"]
    if "itos" in meta:
        alone["itos"] = meta["itos"][:-1]
    return alone


def _trained(size, corpus):
    """The meta of a byte-level BPE with GPT-2's pattern, trained on the text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_sample(corpus), trainer)
    return _of_json(bpe)


def _of_file(path):
    with fails_as(f"--tokenizer={path} cannot be read or used"):
        return _of_json(read_json(path.read_text(encoding="utf-8"), f"--tokenizer={path}"))


def _of_json(bpe):
    vocabulary = bpe.get_vocab()
    meta = {"tokenizer": "json", "vocab_size": max(vocabulary.values()) + 1}
    if end := next((each for each in ENDS if each in vocabulary), None):
        bpe.add_special_tokens([end])
        meta["end_of_text"] = vocabulary[end]
    meta["tokenizer_json"] = without_prefix(json.loads(bpe.to_str()))
    tokenizer = Tokenizer(meta)
    for text in (EVERY_BYTE, *(f"a {each.content} b" for each in bpe.get_added_tokens_decoder().values())):
        if tokenizer.decode(tokenizer.encode_text(text).tolist()) != text.encode():
            raise UserError(
                "the tokenizer.json does not give back every text: take a byte-level one whose vocabulary has all 256"
                " bytes, and which neither changes letters nor drops blanks"
            )
    return meta
