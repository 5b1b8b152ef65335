"""Tokenize a corpus to the disk, on all cores and in constant memory. An interrupted run goes on where it stopped.

Text is tokenized in pieces. tiktoken and `tokenizers` release Python's lock, so threads are enough if tiktoken gets a
whole batch in one call and each thread has its own BPE.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
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

Piece = tuple[str, bool]  # a text, and whether it ends a document


def pieces(fragments: Iterable[Piece]) -> Iterator[Piece]:
    """Cut documents into pieces of about PIECE characters. Only a cut at LONGEST_PIECE may change the tokens."""
    text = ""
    for fragment, last in fragments:
        text += fragment
        start = 0
        while end := _place_to_cut(text, start):
            yield text[start:end], False
            start = end
        text = text[start:]
        if last:
            yield text, True
            text = ""


def _place_to_cut(text, start):
    if place := PLACE_TO_CUT.search(text, start + PIECE, start + LONGEST_PIECE + 1):
        return place.end()
    return start + LONGEST_PIECE if len(text) - start > LONGEST_PIECE else None


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Collect pieces into lists of BATCH characters or more."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += 1 + len(piece[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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


def _encode(tokenizer, end_of_text, dtype, batch):
    """The ids of a batch as one array, and the number of ids after which each document ends."""
    texts, last = zip(*batch)
    ids, ends = tokenizer.encode_texts(texts)
    ids, ends = ids.astype(dtype), ends[np.array(last)]
    if end_of_text is None:
        return ids, ends
    return np.insert(ids, ends, end_of_text), ends + np.arange(1, len(ends) + 1)


class Encoded:
    """The ids of a corpus and the ends of its documents, in a folder that is removed once the bins are written.

    `job` says what is tokenized and how. An interrupted run of the same job is continued if it cut the text in the same
    way. `begin` removes what another job left. Each step appends to the files `ids` and `ends`, then to `steps.jsonl`,
    whose first line has the job and `meta`, the meta of the tokenizer. `meta` is None until `begin`.
    """

    def __init__(self, folder: pathlib.Path, job: list):
        self.folder, self.meta = folder, None
        self.job = job = [*job, PIECE, BATCH, LONGEST_PIECE, PLACE_TO_CUT.pattern]  # a resumed run skips whole batches
        steps = read_jsonl(folder / "steps.jsonl") if (folder / "steps.jsonl").is_file() else []
        if steps and steps[0].get("job") == job:
            self._set(steps[0]["meta"], steps[-1])
            sizes = self.state["tokens"] * self.dtype.itemsize, self.state["documents"] * 8
            if all(self._size(name) >= size for name, size in zip(("ids", "ends"), sizes)):
                return
        self.meta, self.others = None, steps[-1].get("tokens") if steps else None

    def _set(self, meta, state):
        self.meta, self.state = meta, state
        self.dtype = np.dtype(dtype_of(meta["vocab_size"]))

    def _size(self, name):
        return (self.folder / name).stat().st_size if (self.folder / name).is_file() else 0

    def begin(self, meta: dict) -> None:
        """Begin anew with the tokenizer of `meta`. Its end_of_text, if there is one, will follow each document."""
        if self.others:
            what = "tokens of an interrupted run, with other text or options, are dropped"
            print(f"starting anew: {self.others:,} {what}")
        for name in ("ids", "ends", "steps.jsonl"):
            (self.folder / name).write_bytes(b"")
        start = {"job": self.job, "meta": meta, "batches": 0, "tokens": 0, "documents": 0, "complete": False}
        self._set(meta, start)
        self._write_step(start)

    def fill(self, corpus, max_tokens: int | None = None) -> None:
        """Tokenize what is missing of `corpus`. With `max_tokens`, stop after the batch whose documents reach it.

        Raises UserError if the disk is full, and keeps what was written.
        """
        enough = math.inf if max_tokens is None else max_tokens
        if self.state["complete"] or (self.state["documents"] and self.ends()[-1] >= enough):
            return
        if done := self.state["batches"]:
            print(f"continuing after {self.state['tokens']:,} tokens of an interrupted run")
        tokenizer = Tokenizer(self.meta)
        tokenizer.encode_text("")  # load it once, before each thread does
        todo = itertools.islice(batches(pieces(corpus.fragments())), done, None)
        encode = functools.partial(_encode, tokenizer, self.meta.get("end_of_text"), self.dtype)
        with contextlib.closing(on_all_cores(encode, todo)) as encoded:
            for ids, ends in watched(encoded, corpus, "tokenizing"):
                last = self.state["tokens"] + ends[-1] if len(ends) else 0
                self._add(ids, ends)
                if last >= enough:
                    return
        self._add(np.array([], self.dtype), np.array([], np.int64), complete=True)

    def _add(self, ids, ends, complete=False):
        batches, tokens, documents = (self.state[name] for name in ("batches", "tokens", "documents"))
        for name, count, array in (("ids", tokens, ids), ("ends", documents, tokens + ends)):
            try:
                path = self.folder / name
                # a killed run may have left no file. If ids were written, a new one would hold zeros in their place
                with open(path, "r+b" if count else "wb") as file:
                    file.seek(count * array.itemsize)  # overwrite what a killed run may have left after its last step
                    file.write(array.tobytes())
            except OSError as error:
                raise cannot_write(self.folder / name, error) from error
        self.state = {
            "batches": batches + 1,
            "tokens": tokens + len(ids),
            "documents": documents + len(ends),
            "complete": complete,
        }
        self._write_step(self.state)

    def _write_step(self, step):
        try:
            with contextlib.closing(Lines(self.folder / "steps.jsonl")) as steps:
                steps.add(json_line(step))
        except OSError as error:
            raise cannot_write(self.folder / "steps.jsonl", error) from error

    def ends(self, max_tokens: int | None = None) -> np.ndarray:
        """The number of ids after which each document ends, int64, up to the document that reaches `max_tokens`."""
        with open(self.folder / "ends", "rb") as file:
            ends = self._next(file, np.int64, self.state["documents"])
        return ends if max_tokens is None else ends[: np.searchsorted(ends, max_tokens) + 1]

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
