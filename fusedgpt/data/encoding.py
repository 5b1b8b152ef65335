"""Tokenize a corpus to the disk, on all cores and in constant memory. An interrupted run goes on, file by file.

Text is tokenized in pieces. tiktoken and `tokenizers` release Python's lock, so threads are enough if tiktoken gets a
whole batch in one call and each thread has its own BPE.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from tqdm import tqdm

from fusedgpt.data.dataset import dtype_of
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.errors import UserError
from fusedgpt.machine.files import Lines, cannot_write, json_line, read_jsonl

PIECE = 2**16  # characters to tokenize at once: `tokenizers` needs hundreds of bytes for each
BATCH = 2**20  # characters that a core gets at a time
LONGEST_PIECE = 2**18  # cut a piece here at the latest: tiktoken gives up on a million blanks in a row
COPIED = 2**16  # ids to copy at a time: with 2 MiB at a time, Linux wrote at a tenth of the speed
# GPT-2's pattern and those of its successors begin a new token in two places. One is after a line end that has a
# non-blank before it and a letter or digit after it. The other is after a letter or digit, if the next characters are a
# space and a letter or digit, or if the next one is a Chinese or Japanese mark.
PLACE_TO_CUT = re.compile(r"\n(?<=\S\n)(?=[^\W_])|(?<=[^\W_])(?= [^\W_]|[、。，])")
SECONDS_BETWEEN_LINES = 30
START = {"files": 0, "tokens": 0, "documents": 0, "left_out": {}}
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

    Files that end within a batch share it with the next ones, unless it is well filled.
    """
    batch, size = [], 0
    for number, file in enumerate(corpus.files[done:], start=done + 1):
        for piece in pieces(corpus.read(file)):
            batch.append(piece)
            size += 1 + len(piece[0])
            if size >= BATCH:
                yield batch, None
                batch, size = [], 0
        if size >= BATCH // 4 or number == len(corpus.files):
            yield batch, number
            batch, size = [], 0


def on_all_cores(function: Callable, items: Iterable) -> Iterator:
    """`function` of each item, in order, computed in one thread per core. Only a few items are taken ahead."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = concurrent.futures.ThreadPoolExecutor(cores)
    waiting = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def watched(items: Iterable, corpus, doing: str) -> Iterator:
    """Pass on `items` that are made from `corpus`, and show progress: a bar on a terminal, lines elsewhere."""
    said = time.monotonic()
    with tqdm(total=corpus.size, desc=doing, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for item in items:
            yield item
            bar.update(corpus.position - bar.n)
            if bar.disable and time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                of = f" of {corpus.size / 1e6:,.0f}" if corpus.size else ""
                print(f"{doing}: {corpus.position / 1e6:,.0f}{of} MB read")


class Encoded:
    """The ids of a corpus and its documents, in a folder that is removed once the bins are written.

    `job` says what is tokenized and how. Ids and documents are appended to the files `ids` and `documents`. The first
    line of `steps.jsonl` has the job and the meta of the tokenizer. Each further line says what the files hold when
    some texts are complete: there an interrupted run of the same job goes on. `meta` is None until `begin`.
    """

    def __init__(self, folder: pathlib.Path, job: list):
        self.folder, self.job, self.meta = folder, job, None
        self.steps = folder / "steps.jsonl"
        first, *steps = (read_jsonl(self.steps) if self.steps.is_file() else []) or [{}]
        self.others = bool(first) and first.get("job") != job
        if first.get("job") == job:
            self._set(first["meta"], steps[-1] if steps else START)

    def _set(self, meta, step):
        self.meta, self.step = meta, dict(step)
        self.dtype = np.dtype(dtype_of(meta["vocab_size"]))

    def begin(self, meta: dict) -> None:
        """Begin anew with the tokenizer of `meta`. Its end_of_text, if there is one, will follow each document.

        What another job left is dropped as soon as there is something to write.
        """
        self._set(meta, START)

    def fill(self, corpus, max_tokens: int | None = None) -> None:
        """Tokenize what is missing of `corpus`. With `max_tokens`, stop after the batch whose documents reach it.

        Raises UserError if the disk is full, and keeps what was written.
        """
        if done := self.step["files"]:
            print(f"continuing after {done:,} files with {self.step['tokens']:,} tokens")
            corpus.left_out.update(self.step["left_out"])
        tokenizer = Tokenizer(self.meta)
        tokenizer.encode_text("")  # load it once, before each thread does
        encode = functools.partial(_encode, tokenizer, self.meta.get("end_of_text"), self.dtype)
        with contextlib.closing(on_all_cores(encode, batches(corpus, done))) as encoded:
            for ids, documents, files in watched(encoded, corpus, "tokenizing"):
                self._add(ids, documents, files, corpus.left_out)
                if len(documents) and documents["end"][-1] >= (max_tokens or math.inf):
                    return

    def _add(self, ids, documents, files, left_out):
        tokens = self.step["tokens"]
        if not tokens:
            if self.others:
                print("starting anew: the work of an interrupted run with other text or options is dropped")
            self.steps.unlink(missing_ok=True)
            self._say({"job": self.job, "meta": self.meta})
        documents["end"] += tokens
        self._write("ids", tokens, ids)
        self._write("documents", self.step["documents"], documents)
        self.step |= {"tokens": tokens + len(ids), "documents": self.step["documents"] + len(documents)}
        if files:
            self.step |= {"files": files, "left_out": left_out}
            self._say(self.step)

    def _say(self, line):
        try:
            with contextlib.closing(Lines(self.steps)) as steps:
                steps.add(json_line(line))
        except OSError as error:
            raise cannot_write(self.steps, error) from error

    def _write(self, name, before, numbers):
        """Write `numbers` after so many others, over what an interrupted run may have left there."""
        try:
            with open(self.folder / name, "r+b" if before else "wb") as file:
                file.seek(before * numbers.itemsize)
                file.write(numbers.tobytes())
        except OSError as error:
            raise cannot_write(self.folder / name, error) from error

    def documents(self, max_tokens: int | None = None) -> np.ndarray:
        """The documents (DOCUMENT), up to the one that reaches `max_tokens`."""
        with open(self.folder / "documents", "rb") as file:
            found = self._next(file, DOCUMENT, self.step["documents"])
        return found if max_tokens is None else found[: np.searchsorted(found["end"], max_tokens) + 1]

    def read(self, ranges: np.ndarray) -> Iterator[np.ndarray]:
        """The ids of `ranges`, an array of (start, stop), piece by piece."""
        with open(self.folder / "ids", "rb") as file:
            for start, stop in map(np.ndarray.tolist, ranges):  # a list of all would take 1 GB for OpenWebText
                file.seek(start * self.dtype.itemsize)
                for at in range(start, stop, COPIED):
                    yield self._next(file, self.dtype, min(COPIED, stop - at))

    def _next(self, file, dtype, count):
        """The next `count` numbers of an open file. np.fromfile gives fewer if the file ends, or the disk fails."""
        numbers = np.fromfile(file, dtype, count)
        if len(numbers) < count:
            raise UserError(f"{file.name} became shorter or cannot be read: remove {self.folder} and run this again")
        return numbers


def _encode(tokenizer, end_of_text, dtype, batch):
    """The ids of a batch as one array, its documents, and how many files end with it, or None."""
    texts, files = batch
    if not texts:  # the last files had no text
        return np.array([], dtype), np.array([], DOCUMENT), files
    ids, ends = tokenizer.encode_texts([text for text, _ in texts])
    last = np.array([digest is not None for _, digest in texts])
    documents = np.zeros(last.sum(), DOCUMENT)
    documents["end"], documents["digest"] = ends[last], [digest for _, digest in texts if digest is not None]
    ids = ids.astype(dtype)
    if end_of_text is not None:
        ids = np.insert(ids, documents["end"], end_of_text)
        documents["end"] += np.arange(1, len(documents) + 1)
    return ids, documents, files
