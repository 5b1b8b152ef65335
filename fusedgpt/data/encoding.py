"""Make the tokenizer of a corpus, and tokenize it to the disk, on all cores and in constant memory.

tiktoken and `tokenizers` release Python's lock: threads do if tiktoken gets a batch in a call, and each has its BPE.
"""

import collections
import concurrent.futures
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from tqdm import tqdm

from fusedgpt.data.dataset import dtype_of
from fusedgpt.data.tokenizer import END_OF_TEXT, Tokenizer, fails_as, tiktoken_bpe, without_prefix
from fusedgpt.errors import UserError, shown
from fusedgpt.machine.files import atomic

PIECE = 2**16  # characters to tokenize at once: `tokenizers` needs hundreds of bytes for each
BATCH = 2**20  # characters that a core gets at a time
LONGEST_PIECE = 2**18  # cut a piece here at the latest: tiktoken gives up on a million blanks in a row
COPIED = 2**16  # ids to copy at a time: with 2 MiB at a time, Linux wrote at a tenth of the speed
# GPT-2's pattern and its successors' begin a token after a line end between a non-blank and a letter or digit, and
# between a letter or digit and either a space before another or a Chinese or Japanese mark
PLACE_TO_CUT = re.compile(r"\n(?<=\S\n)(?=[^\W_])|(?<=[^\W_])(?= [^\W_]|[、。，])")
DOCUMENT = np.dtype([("end", "<i8"), ("digest", "<u8")])  # the ids before its end, and a hash of its text
TRAINED = "train:"  # followed by the size of the vocabulary
SAMPLE = 64  # train a BPE on the first batches
# a text with every byte of UTF-8, letters of both cases and all blanks; in NFC, because some models compose characters
POINTS = [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]
EVERY_BYTE = unicodedata.normalize("NFC", "".join(map(chr, POINTS)))
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")  # the last are Gemma's, DeepSeek's


def pieces(fragments: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, int | None]]:
    """Documents in pieces of about PIECE characters; with the last of each, a hash of its text. Tokens stay."""
    text, digest = "", hashlib.sha256()
    for fragment, last in fragments:
        digest.update(fragment.encode())
        text += fragment
        start = 0
        while end := _place_to_cut(text, start):
            yield text[start:end], None
            start = end
        text = text[start:]
        if last:
            yield text, int.from_bytes(digest.digest()[:8], "little")
            text, digest = "", hashlib.sha256()


def _place_to_cut(text, start):
    if place := PLACE_TO_CUT.search(text, start + PIECE, start + LONGEST_PIECE + 1):
        return place.end()
    return start + LONGEST_PIECE if len(text) - start > LONGEST_PIECE else None


def batches(corpus, done: int = 0) -> Iterator[tuple[list, int | None]]:
    """Pieces of about BATCH characters of a corpus, without its first files; how many files end with them, or None."""
    batch, size = [], 0
    for number, file in enumerate(tqdm(corpus.files[done:], disable=None, leave=False), start=done + 1):
        for piece in pieces(corpus.read(file)):
            batch.append(piece)
            size += 1 + len(piece[0])
            if size >= BATCH:
                yield batch, None
                batch, size = [], 0
        if size >= BATCH // 4 or (batch and number == len(corpus.files)):
            yield batch, number
            batch, size = [], 0


def on_all_cores(function: Callable, items: Iterable) -> Iterator:
    """`function` of each item, in order, in one thread per core. Only a few items are taken ahead."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def made(name: str, corpus) -> dict:
    """The meta of the tokenizer `name`: byte, char, train:SIZE, the path of a tokenizer.json, or one of tiktoken's.

    A tokenizer.json may have no `end_of_text`. Raises UserError for another name, or if it cannot be used here.
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
        with fails_as(f"--tokenizer={shown(name)} must be train:SIZE, as in train:8192"):
            return _trained(int(name.removeprefix(TRAINED)), corpus)
    if name.endswith(".json"):
        with fails_as(f"--tokenizer={name} cannot be used"):
            meta = _of_json(pathlib.Path(name).read_text(encoding="utf-8"))
        if "end_of_text" not in meta:
            print(f"no id will end a document: {name} has none of {', '.join(ENDS)}; rename its end to one of them")
        return meta
    Tokenizer({"tokenizer": name, "vocab_size": 1})  # raises UserError if there is no such
    bpe = tiktoken_bpe(name)
    return {"tokenizer": name, "vocab_size": bpe.n_vocab, "end_of_text": bpe.eot_token}


def _trained(size, corpus):
    """The meta of a byte-level BPE with GPT-2's pattern, trained on the text."""
    import tokenizers

    bpe, how = tokenizers.ByteLevelBPETokenizer(), {"min_frequency": 0, "show_progress": False}
    texts = (text for batch, _ in itertools.islice(batches(corpus), SAMPLE) for text, _ in batch)
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=[END_OF_TEXT], **how)
    return _of_json(bpe.to_str())


def _of_json(text):
    from tokenizers import Tokenizer as Bpe

    bpe = Bpe.from_str(text)
    vocabulary = bpe.get_vocab()
    meta = {"tokenizer": "json", "vocab_size": max(vocabulary.values()) + 1}
    # without one, do not add an id, which the model of this tokenizer would not have
    if end := next((each for each in ENDS if each in vocabulary), None):
        bpe.add_special_tokens([end])
        meta["end_of_text"] = vocabulary[end]
    meta["tokenizer_json"] = without_prefix(json.loads(bpe.to_str()))
    tokenizer = Tokenizer(meta)
    for text in (EVERY_BYTE, *(f"a {each.content} b" for each in bpe.get_added_tokens_decoder().values())):
        if tokenizer.decode(tokenizer.encode_text(text).tolist()) != text.encode():
            raise UserError("the tokenizer.json does not give back every text: take one that changes nothing")
    return meta


def fill(folder: pathlib.Path, meta: dict, corpus) -> np.ndarray:
    """Tokenize what is missing of `corpus` to the files `ids` and `documents` of `folder`. Returns the latter.

    `done.json` says how many files of the corpus are complete, and how long the two are then: there a run goes on.
    """
    done, path = {"files": 0, "ids": 0, "documents": 0}, folder / "done.json"
    if path.exists():
        done = json.loads(path.read_text(encoding="utf-8"))
        print(f"continuing after {done['files']:,} files")
    tokenizer, dtype = Tokenizer(meta), np.dtype(dtype_of(meta["vocab_size"]))
    tokenizer.encode_text("")  # load it once, before each thread does
    encoded = on_all_cores(functools.partial(_encode, tokenizer, dtype), batches(corpus, done["files"]))
    with open(folder / "ids", "ab") as ids_file, open(folder / "documents", "ab") as documents_file:
        for file, size in ((ids_file, done["ids"]), (documents_file, done["documents"])):
            file.truncate(size)  # an interrupted run may have left more
            file.seek(size)
        for ids, documents, files in encoded:
            documents["end"] += ids_file.tell() // dtype.itemsize
            ids_file.write(ids.tobytes())
            documents_file.write(documents.tobytes())
            if files:
                for file in (ids_file, documents_file):  # on the disk before done.json says so
                    file.flush()
                    os.fsync(file.fileno())
                with atomic(path, "w") as file:
                    json.dump({"files": files, "ids": ids_file.tell(), "documents": documents_file.tell()}, file)
    return np.fromfile(folder / "documents", DOCUMENT)


def read(path: pathlib.Path, dtype: str, ranges: np.ndarray) -> Iterator[np.ndarray]:
    """The ids in `ranges` of a file, an array of (start, stop), piece by piece."""
    with open(path, "rb") as file:
        for start, stop in map(np.ndarray.tolist, ranges):  # a list of all would take 1 GB for OpenWebText
            file.seek(start * np.dtype(dtype).itemsize)
            for at in range(start, stop, COPIED):
                yield np.fromfile(file, dtype, min(COPIED, stop - at))


def _encode(tokenizer, dtype, batch):
    """The ids of a batch as one array, its documents, and how many files end with it, or None."""
    texts, files = batch
    ids, ends = tokenizer.encode_texts([text for text, _ in texts])
    last = [(end, digest) for end, (_, digest) in zip(ends, texts) if digest is not None]
    documents = np.array(last, DOCUMENT)
    ids = ids.astype(dtype)
    if tokenizer.end_of_text is not None:
        ids = np.insert(ids, documents["end"], tokenizer.end_of_text)
        documents["end"] += np.arange(1, len(documents) + 1)
    return ids, documents, files
