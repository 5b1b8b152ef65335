"""Tokenize a corpus to the disk, on all cores and in constant memory. An interrupted run goes on, file by file.

Text is tokenized in pieces. tiktoken and `tokenizers` release Python's lock, so threads are enough if tiktoken gets a
whole batch in one call and each thread has its own BPE.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from tqdm import tqdm

from fusedgpt.data.dataset import dtype_of
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.machine.files import atomic

PIECE = 2**16  # characters to tokenize at once: `tokenizers` needs hundreds of bytes for each
BATCH = 2**20  # characters that a core gets at a time
LONGEST_PIECE = 2**18  # cut a piece here at the latest: tiktoken gives up on a million blanks in a row
COPIED = 2**16  # ids to copy at a time: with 2 MiB at a time, Linux wrote at a tenth of the speed
# GPT-2's pattern and those of its successors begin a new token in two places. One is after a line end that has a
# non-blank before it and a letter or digit after it. The other is after a letter or digit, if the next characters are a
# space and a letter or digit, or if the next one is a Chinese or Japanese mark.
PLACE_TO_CUT = re.compile(r"\n(?<=\S\n)(?=[^\W_])|(?<=[^\W_])(?= [^\W_]|[、。，])")
DOCUMENT = np.dtype([("end", "<i8"), ("digest", "<u8")])  # the ids before its end, and a hash of its text

Piece = tuple[str, int | None]  # a text, and the hash of the document's text if it ends a document


def pieces(fragments: Iterable[tuple[str, bool]]) -> Iterator[Piece]:
    """Cut documents into pieces of about PIECE characters. Only a cut at LONGEST_PIECE may change the tokens."""
    text, digest = "", hashlib.blake2b(digest_size=8)
    for fragment, last in fragments:
        digest.update(fragment.encode())
        text += fragment
        start = 0
        while end := _place_to_cut(text, start):
            yield text[start:end], None
            start = end
        text = text[start:]
        if last:
            yield text, int.from_bytes(digest.digest(), "little")
            text, digest = "", hashlib.blake2b(digest_size=8)


def _place_to_cut(text, start):
    if place := PLACE_TO_CUT.search(text, start + PIECE, start + LONGEST_PIECE + 1):
        return place.end()
    return start + LONGEST_PIECE if len(text) - start > LONGEST_PIECE else None


def batches(corpus, done: int = 0) -> Iterator[tuple[list[Piece], int | None]]:
    """Lists of about BATCH characters of a corpus, without its first files; how many files end with each, or None.

    Files that end within a batch share it with the next ones, unless it is well filled. A terminal shows progress.
    """
    batch, size = [], 0
    with tqdm(desc="reading", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for number, file in enumerate(corpus.files[done:], start=done + 1):
            for piece in pieces(corpus.read(file)):
                batch.append(piece)
                size += 1 + len(piece[0])
                if size >= BATCH:
                    yield batch, None
                    bar.update(size)
                    batch, size = [], 0
            if size >= BATCH // 4 or (batch and number == len(corpus.files)):
                yield batch, number
                bar.update(size)
                batch, size = [], 0


def on_all_cores(function: Callable, items: Iterable) -> Iterator:
    """`function` of each item, in order, computed in one thread per core. Only a few items are taken ahead."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Encoded:
    """The ids of a corpus and its documents, in a folder that is removed once the bins are written.

    Ids and documents are appended to the files `ids` and `documents`. `done.json` says how many files of the corpus are
    complete, and what the two then hold: there an interrupted run goes on.
    """

    def __init__(self, folder: pathlib.Path, meta: dict):
        self.folder, self.meta = folder, meta
        self.dtype = np.dtype(dtype_of(meta["vocab_size"]))

    def fill(self, corpus, max_tokens: int | None = None) -> None:
        """Tokenize what is missing of `corpus`. With `max_tokens`, stop after the batch whose documents reach it.

        If the disk is full, what was written is kept.
        """
        done, path = {"files": 0, "tokens": 0, "documents": 0}, self.folder / "done.json"
        if path.exists():
            done = json.loads(path.read_text(encoding="utf-8"))
            print(f"continuing after {done['files']:,} files with {done['tokens']:,} tokens")
        tokenizer = Tokenizer(self.meta)
        tokenizer.encode_text("")  # load it once, before each thread does
        encoded = on_all_cores(functools.partial(_encode, tokenizer, self.dtype), batches(corpus, done["files"]))
        with (
            self._appended("ids", done["tokens"] * self.dtype.itemsize) as ids_file,
            self._appended("documents", done["documents"] * DOCUMENT.itemsize) as documents_file,
            contextlib.closing(encoded),
        ):
            for ids, documents, files in encoded:
                documents["end"] += done["tokens"]
                ids_file.write(ids.tobytes())
                documents_file.write(documents.tobytes())
                done["tokens"] += len(ids)
                done["documents"] += len(documents)
                if files:
                    ids_file.flush()
                    documents_file.flush()
                    with atomic(path, "w") as file:
                        json.dump(done | {"files": files}, file)
                if len(documents) and documents["end"][-1] >= (max_tokens or math.inf):
                    return

    @contextlib.contextmanager
    def _appended(self, name, size):
        with open(self.folder / name, "ab") as file:
            file.truncate(size)  # an interrupted run may have left more
            yield file

    def documents(self, max_tokens: int | None = None) -> np.ndarray:
        """The documents (DOCUMENT), up to the one that reaches `max_tokens`."""
        found = np.fromfile(self.folder / "documents", DOCUMENT)
        return found if max_tokens is None else found[: np.searchsorted(found["end"], max_tokens) + 1]

    def read(self, ranges: np.ndarray) -> Iterator[np.ndarray]:
        """The ids of `ranges`, an array of (start, stop), piece by piece."""
        with open(self.folder / "ids", "rb") as file:
            for start, stop in map(np.ndarray.tolist, ranges):  # a list of all would take 1 GB for OpenWebText
                file.seek(start * self.dtype.itemsize)
                for at in range(start, stop, COPIED):
                    yield np.fromfile(file, self.dtype, min(COPIED, stop - at))


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
