"""Make the tokenizer that a prepare script was asked for, as the meta of a data set. Some are made from the text."""

import json
import pathlib
import re
import unicodedata

from fusedgpt.data.encoding import batches, watched
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
SAMPLE = 64  # train a BPE on this many batches at most, of a million characters each
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
        return _characters(corpus)
    if name.startswith(TRAINED):
        return _trained(_size(name), corpus)
    if _is_path(name):
        return _of_file(pathlib.Path(name))
    return _of_tiktoken(name)


def stamp(name: str) -> list:
    """A value that changes if the file of the tokenizer changes. Raises UserError if there is no such tokenizer."""
    if not _is_path(name):
        if name.startswith(TRAINED):
            _size(name)
        elif name not in ("byte", "char"):
            _require_known(name)
        return []
    path = pathlib.Path(name)
    if not path.is_file():
        raise UserError(
            f"--tokenizer={name} is no file: name a tokenizer.json. transformers writes one into a model's folder:"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return [str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns]


def without_end(meta: dict) -> dict:
    """The meta of bytes or characters without its last id, end-of-text, which a single document does not need."""
    alone = meta | {"vocab_size": meta["vocab_size"] - 1}
    del alone["end_of_text"]
    if "itos" in meta:
        alone["itos"] = meta["itos"][:-1]
    return alone


def _is_path(name):
    return name.endswith(".json") or "/" in name


def _characters(corpus):
    found = set()
    for batch, _ in watched(batches(corpus), corpus, "finding the characters"):
        found.update(*(text for text, _ in batch))
    itos = [*sorted(found), END_OF_TEXT]
    return {"tokenizer": "char", "vocab_size": len(itos), "itos": itos, "end_of_text": len(itos) - 1}


def _size(name):
    size = name.removeprefix(TRAINED)
    if not re.fullmatch("[0-9]{1,8}", size) or not BYTES_AND_END <= int(size) <= LARGEST_VOCABULARY:
        raise UserError(
            f"--tokenizer={shown(name)} must be train:SIZE, as in train:8192, and SIZE from {BYTES_AND_END} to"
            f" {LARGEST_VOCABULARY}"
        )
    return int(size)


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
    sample, step = _sample(corpus)
    characters = sum(len(text) for batch in sample for text, _ in batch)
    part = f", one million out of every {step} of the text" if step > 1 else ""
    print(f"training a BPE on {characters:,} characters{part}")
    bpe.train_from_iterator((text for batch in sample for text, _ in batch), trainer)
    if bpe.get_vocab_size() < size:
        print(f"the text gives {bpe.get_vocab_size():,} tokens, not {size:,}: it has no more pairs to join")
    return _of_json(bpe)


def _sample(corpus):
    """Every n-th batch of the text, and n, the smallest power of two that gives SAMPLE batches at most."""
    sample, step = [], 1
    for number, (batch, _) in enumerate(watched(batches(corpus), corpus, "reading a sample")):
        if number % step:
            continue
        if len(sample) == SAMPLE:
            sample, step = sample[::2], 2 * step
        if number % step == 0:
            sample.append(batch)
    return sample, step


def _of_file(path):
    with fails_as(f"--tokenizer={path} cannot be read or used"):
        meta = _of_json(read_json(path.read_text(encoding="utf-8"), f"--tokenizer={path}"))
    if "end_of_text" not in meta:  # do not add an id, which the model of this tokenizer would not have
        print(f"{path} has no {' or '.join(ENDS)}, so no id ends a document")
    return meta


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
            lost = (c for c in text if tokenizer.decode(tokenizer.encode_text(c).tolist()) != c.encode())
            raise UserError(
                f"the tokenizer.json does not give back every text: it changes {next(lost, text[:40])!r}. Take a"
                " byte-level one whose vocabulary has all 256 bytes, and which neither changes letters nor drops blanks"
            )
    return meta


def _require_known(name):
    import tiktoken

    if name not in (known := tiktoken.list_encoding_names()):
        raise UserError(
            f"--tokenizer={shown(name)} is unknown: it can be byte, char, train:SIZE, the path of a tokenizer.json, or"
            f" {', '.join(known)}"
        )


def _of_tiktoken(name):
    _require_known(name)
    try:
        bpe = tiktoken_bpe(name)
    except UserError as error:
        no_download = "or give data/text/prepare.py --tokenizer=byte or --tokenizer=train:2048, which need no download"
        raise UserError(f"{error}, {no_download}") from error
    return {"tokenizer": name, "vocab_size": bpe.n_vocab, "end_of_text": bpe.eot_token}
