"""Make the tokenizer that a prepare script was asked for, as the meta of a data set. Some are made from the text."""

import itertools
import json
import pathlib
import unicodedata

import tiktoken

from fusedgpt.data.encoding import batches
from fusedgpt.data.tokenizer import (
    END_OF_TEXT,
    LARGEST_VOCABULARY,
    Tokenizer,
    fails_as,
    read_json,
    tiktoken_bpe,
    without_prefix,
)
from fusedgpt.errors import UserError, shown

TRAINED = "train:"  # followed by the size of the vocabulary
BYTES_AND_END = 257  # the smallest vocabulary that can be trained
SAMPLE = 64  # train a BPE on the first batches, of a million characters each
# a text with every byte of UTF-8, letters of both cases and all blanks; in NFC, because some models compose characters
EVERY_BYTE = unicodedata.normalize(
    "NFC", "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000))))
)
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # names of the end-of-text token in tokenizer.json files


def of(name: str, corpus) -> dict:
    """The meta of the tokenizer `name`: byte, char, train:SIZE, the path of a tokenizer.json, or one of tiktoken's.

    Its `end_of_text` is the id that ends a document; a tokenizer.json may have none. Raises UserError if there is no
    such tokenizer, or if it cannot be used here.
    """
    if name == "byte":
        return {"tokenizer": "byte", "vocab_size": 257, "end_of_text": 256}
    if name == "char":
        found = set()
        for batch, _ in batches(corpus):
            found.update(*(text for text, _ in batch))
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


def without_end(meta: dict) -> dict:
    """The meta of bytes or characters without its last id, end-of-text, which a single document does not need."""
    alone = meta | {"vocab_size": meta["vocab_size"] - 1}
    del alone["end_of_text"]
    if "itos" in meta:
        alone["itos"] = meta["itos"][:-1]
    return alone


def _trained(size, corpus):
    """The meta of a byte-level BPE with GPT-2's pattern, trained on the text."""
    from tokenizers import Tokenizer as Bpe
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    texts = [text for batch, _ in itertools.islice(batches(corpus), SAMPLE) for text, _ in batch]
    print(f"training a BPE on {sum(map(len, texts)):,} characters")
    bpe.train_from_iterator(texts, trainer)
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
