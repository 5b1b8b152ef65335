"""Read text as documents, from local files, which need not fit into memory, or from data sets of the Hub."""

import codecs
import collections
import csv
import itertools
import json
import os
import pathlib
import shlex
import tempfile
import weakref
from collections.abc import Iterator
from typing import Protocol

from fusedgpt.data import decoding, documents, inputs, tables
from fusedgpt.data.encoding import watched
from fusedgpt.data.inputs import SHOWN
from fusedgpt.errors import UserError, first_line, out_of_memory, shown

# Bytes of files that are read to their ends before any is tokenized, which takes seconds for text. So those that cannot
# be read are named at once. Among larger ones, they are named when the first of them is met.
CHECKED_FIRST = 2**28
SEVEN_BITS = ("iso2022", "hz", "utf-7")  # text in these encodings is UTF-8 too, with escapes in place of its letters


class Corpus(Protocol):
    """A sequence of documents."""

    source: str  # the name of the corpus
    key: list  # changes if the content changes
    size: int | None  # bytes to read; None if not known
    position: int  # bytes read so far
    skipped: dict[pathlib.Path, str]  # files that were left out because they cannot be read, and why

    def fragments(self) -> Iterator[tuple[str, bool]]:
        """The documents in fragments (text, last). `last` is True for the fragment that ends a document."""

    def check(self) -> None:
        """Raise UserError early for what `fragments` would refuse."""


class Files:
    """Local files and folders as a corpus.

    Each row of a table (.csv, .tsv, .json, .jsonl, .parquet) is a document. Any other file is one document; with
    `paragraphs`, each paragraph is one, and empty lines separate them. Links to folders are followed. In folders,
    hidden files, the file `besides`, the meta.json of bins and files of other kinds are left out. What is left out is
    printed. A BOM is removed, and line ends become \\n.

    column: the column with the text, or FILE:COLUMN for the tables that the pattern FILE matches. With a FILE, several
    of these have commas between them; without one, commas belong to the name.
    encoding: that of text which is not UTF-8. Without one, such text is refused.
    skip_unreadable: leave out files that are damaged or hold no text; `skipped` then has them, with the reasons.

    Raises UserError if there is nothing to read, or if a folder cannot be read. `fragments` raises it for files that
    cannot be read.
    """

    def __init__(
        self,
        paths: list[pathlib.Path],
        column: str = "text",
        paragraphs: bool = False,
        besides: pathlib.Path | None = None,
        encoding: str | None = None,
        skip_unreadable: bool = False,
    ):
        self.paragraphs, self.encoding = paragraphs, encoding
        self.source = inputs.name_of(paths[0])
        if len(paths) > 1:
            self.source += f" and {len(paths) - 1} more"
        self.files, self.skipped = inputs.found(paths, besides), {}
        self._columns, self._column = inputs.columns(column, self.files)
        self._done, self._file = 0, None  # bytes of the files that were read, and the open file
        self._row = 0  # number of the last row read from the open file
        self._said = set()
        self._encodings = {}  # of texts, if there is a choice
        self._kept, self._places = None, {}  # the texts of documents, which take time to read, and where each is
        self._stamps = {file: _stamp(file) for file in self.files}
        self.size = sum(size for size, _ in self._stamps.values())
        if skip_unreadable:
            self._skip_unreadable()
        stamps = [[str(file.absolute()), *self._stamps[file]] for file in self.files]
        self.size = sum(size for _, size, _ in stamps)
        # the readers' versions count for all files, because one named .txt may turn out to be a PDF
        self.key = [column, paragraphs, encoding, documents.versions(), *stamps]

    @property
    def position(self) -> int:
        """How many bytes of the files have been read."""
        return self._done + (self._file.tell() if self._file and not self._file.closed else 0)

    def fragments(self) -> Iterator[tuple[str, bool]]:
        """The documents of all files."""
        self._done = 0
        for number, path in enumerate(self.files, start=1):
            try:
                yield from self._fragments_of(path)
            except UserError as error:
                if self.size > CHECKED_FIRST:  # this may take hours
                    print(f"checking the other files too, because {error}")
                problems = watched(self._problems(self.files[number:]), self, "checking")
                others = [error for _, error in problems if error]
                raise _refusal([error, *others], len(self.files)) from error

    def check(self) -> None:
        """Read all files to their ends or, if they are large, begin to."""
        most = None if self.size <= CHECKED_FIRST else 1
        collections.deque(itertools.islice(watched(self.fragments(), self, "checking"), most), maxlen=0)

    def _skip_unreadable(self):
        problems = watched(self._problems(self.files), self, "checking")
        self.skipped = {path: str(error) for path, error in problems if error}
        if not self.skipped:
            return
        self.files = [file for file in self.files if file not in self.skipped]
        _say_each("skipped: ", self.skipped.values())
        if not self.files:
            raise UserError(f"none of the {len(self.skipped):,} files can be read, for the reasons above")

    def _problems(self, files):
        """Read files to their ends: (path, None) for each fragment, and (path, its UserError) if one is refused."""
        for path in files:
            try:
                for _ in self._fragments_of(path):
                    yield path, None
            except UserError as error:
                yield path, error

    def _fragments_of(self, path):
        self._row, nothing = 0, True
        try:
            with open(path, "rb") as self._file:
                for fragment in self._read(path):
                    nothing = False
                    yield fragment
            if nothing:
                self._say(f"left out: {path}, which has no text")
            if _stamp(path) != self._stamps[path]:
                raise UserError(f"{path} has changed while it was read: run this again, or name a copy of it")
        except UserError:
            raise
        except Exception as error:  # zlib, zstandard, csv, json, pyarrow and pypdf each have their own types
            raise _unreadable(path, self._row, error) from error
        self._done += path.stat().st_size

    def _read(self, path):
        head, chunks = decoding.peeked(decoding.unpacked(path, self._file))
        what = self._kind(path, head)
        if what in documents.KINDS or what == ".zip":
            texts = self._document(path, what, head, chunks)
        elif what in tables.KINDS:
            for number, row in enumerate(self._rows(path, what, head, chunks), start=1):
                yield self._text(row, path, number), True
                self._row = number
            return
        else:
            texts = decoding.decoded(path, chunks, self._encoding(path, head))
        yield from (decoding.paragraphs if self.paragraphs else decoding.whole)(texts)

    def _kind(self, path, head):
        """The kind of a file: by its first bytes, because a PDF may be named .txt, otherwise by its name."""
        if reason := documents.foreign(head):
            raise UserError(f"{path} {reason}")
        named, content = inputs.kind(path), documents.kind_of_content(head)
        if content and named not in documents.SUFFIXES[content]:
            if named in tables.KINDS:
                raise UserError(f"{path} is {documents.NAMES[content]}, whatever its suffix says: rename or remove it")
            self._say(f"reading {path} as {documents.NAMES[content]}, which it is by its content")
        return content or named

    def _rows(self, path, what, head, chunks):
        if what == ".parquet":
            with decoding.seekable(path, self._file, chunks) as file:
                yield from tables.parquet_rows(file, self._column_of(path))
            return
        blocks = decoding.decoded(path, chunks, self._encoding(path, head))
        if what in (".csv", ".tsv"):
            yield from tables.csv_rows(blocks, "\t" if what == ".tsv" else ",", self._column_of(path))
        else:
            yield from tables.json_values(blocks)

    def _document(self, path, what, head, chunks):
        """The text of a document. It is kept in a temporary file, because some are read twice or more."""
        if self._kept is None:
            self._kept = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this object is there)
            weakref.finalize(self, self._kept.close)
        if path not in self._places:
            start = self._kept.seek(0, os.SEEK_END)
            for text in self._extracted(path, what, head, chunks):
                self._kept.write(text.encode())
            self._places[path] = start, self._kept.tell()
        at, end = self._places[path]
        decoder = codecs.getincrementaldecoder("utf-8")()
        while at < end:
            self._kept.seek(at)
            raw = self._kept.read(min(decoding.CHUNK, end - at))
            at += len(raw)
            yield decoder.decode(raw)

    def _extracted(self, path, what, head, chunks):
        if what in (".pdf", ".zip", ".docx", ".odt", ".epub"):
            with decoding.seekable(path, self._file, chunks) as file:
                if what == ".pdf":
                    yield from documents.pdf_text(str(path), file, self._say)
                else:
                    yield from documents.zip_text(
                        str(path), file, lambda chunks: self._chapter(path, chunks), self._say
                    )
        else:
            encoding = self._encoding(path, head, documents.charset(head))
            yield from documents.html_text(str(path), decoding.decoded(path, chunks, encoding), self._say)

    def _chapter(self, path, chunks):
        head, chunks = decoding.peeked(chunks)
        return decoding.decoded(path, chunks, documents.charset(head))

    def _encoding(self, path, head, declared=None):
        """The encoding of a text: by its BOM, otherwise as it declares or UTF-8, or self.encoding if it is not in that.

        Those of SEVEN_BITS come before UTF-8. None: as decoding.decoded finds it.
        """
        if self.encoding is None or decoding.bom(head):
            return declared
        if path not in self._encodings:
            first, second = declared, self.encoding
            if declared is None and codecs.lookup(self.encoding).name.startswith(SEVEN_BITS):
                first, second = second, first
            try:
                with open(path, "rb") as file:
                    collections.deque(decoding.decoded(path, decoding.unpacked(path, file), first), maxlen=0)
                self._encodings[path] = first
            except UserError as error:
                if b"\0" in head and not self.encoding.lower().startswith("utf"):
                    raise UserError(f"{path} is no text: it has zero bytes. Remove it") from error
                self._encodings[path] = second
                self._say(f"reading {path} as {second or 'UTF-8'}, because it is not {first or 'UTF-8'}")
        return self._encodings[path]

    def _say(self, what):
        """Print a note once, though files are read several times. Few notes are printed, because files may be many."""
        if what not in self._said and len(self._said) <= SHOWN:
            print(what if len(self._said) < SHOWN else "further files with such notes are not named")
            self._said.add(what)

    def _column_of(self, path):
        return next((column for pattern, column in self._columns if path.match(pattern)), self._column)

    def _text(self, row, path, number):
        column, where = self._column_of(path), f"row {number:,} of {path}"
        if not isinstance(row, dict):
            raise UserError(f"{where} is {shown(row)}: it must be an object with a text in {column!r}")
        if any(row.get(None, ())):  # cells beyond the columns of a CSV
            raise UserError(f"{where} has more cells than the first line: put texts with commas between quotes")
        if column not in row:
            columns = ", ".join(map(shown, itertools.islice(row, SHOWN)))
            texts = [name for name in row if name and isinstance(row[name], str)]
            if not texts:
                raise UserError(
                    f"{where} has no {column!r}, and no text in another column ({columns}): remove such rows"
                )
            example = max(texts, key=lambda name: len(row[name]))
            named = f"{path.name}:{example}"
            named = example if "," in named else named  # after a FILE, a name is split at its comma
            example = f"--text_column={shlex.quote(named)}" if len(example) < 100 else "--text_column=FILE:NAME"
            raise UserError(f"{where} has no {column!r}, but {columns}: name the one with the text, as {example} does")
        text = row[column]
        if not isinstance(text, str):
            raise UserError(f"{where} has {shown(text)} in {column!r}, which must be a text. Remove such rows")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
            raise UserError(f"{where} has half of a surrogate pair in {column!r}. Remove such rows") from error
        return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _stamp(path):
    """The size of a file and when it was written."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _say_each(prefix, notes):
    """Print notes, SHOWN at most."""
    for note in itertools.islice(notes, SHOWN):
        print(f"{prefix}{note}")
    if len(notes) > SHOWN:
        print(f"{prefix}{len(notes) - SHOWN:,} more")


def _refusal(errors, files):
    """The UserError for the files that cannot be read, out of a number of files. Prints the reasons if several."""
    if files == 1:
        return errors[0]
    if len(errors) == 1:
        return UserError(f"{errors[0]}; --skip_unreadable=True goes on without this file")
    _say_each("unreadable: ", [str(error) for error in errors])
    return UserError(
        f"{len(errors):,} of {files:,} files cannot be read, for the reasons above: mend or remove them, or go on"
        " without them by --skip_unreadable=True"
    )


def _unreadable(path, row, error):
    """The UserError for a file that cannot be read after its row number `row`."""
    if isinstance(error, ImportError):
        return UserError(f"cannot read {path} without the package {error.name}: pip install {error.name}")
    if isinstance(error, OSError) and error.strerror:  # gzip's own errors have none
        return UserError(f"cannot read {path}: {error.strerror}")
    # leave out the position in a JSON error, because it counts from the value, not from the beginning of the file
    why = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
    if isinstance(error, csv.Error):
        return UserError(
            f"cannot read row {row + 1:,} of {path} ({why}): if a cell begins with a quotation mark, one must close it,"
            " and those within it must be doubled"
        )
    place = f"after row {row:,} of {path}" if row else f"{path}"
    if out_of_memory(error):
        return UserError(f"cannot read {place}, because memory ran out: cut its long texts into shorter ones")
    return UserError(f"cannot read {place} ({type(error).__name__}: {why}): it is damaged, or its suffix is wrong")


class Hub:
    """A data set of Hugging Face's Hub as a corpus. `options` are those of datasets.load_dataset.

    With `streaming`, no copy stays in the cache. `fragments` raises UserError if the data set cannot be read.
    """

    def __init__(self, source: str, streaming: bool, **options):
        self.source, self.key, self.size, self.position = source, [source, options], None, 0
        self.streaming, self.options, self.skipped = streaming, options, {}

    def fragments(self) -> Iterator[tuple[str, bool]]:
        """The documents, from the column `text`."""
        import datasets

        self.position = 0
        try:
            dataset = datasets.load_dataset(split="train", streaming=self.streaming, **self.options)
            for rows in dataset.select_columns("text").iter(batch_size=1000):
                for text in rows["text"]:
                    self.position += len(text.encode())
                    yield text, True
        except Exception as error:  # `datasets` wraps a lost connection in its own types
            cause = error.__cause__ or error
            why = f"{type(cause).__name__}: {first_line(cause)}"
            raise UserError(f"cannot read {self.source} ({why}): run this again, or give --input=PATH") from error

    def check(self) -> None:
        """Read the first document."""
        next(self.fragments(), None)


class Halves:
    """The text of a corpus as two documents: the first `share` of its characters, and the rest.

    An empty line is put between the documents of the corpus, such as the rows of a table.
    """

    def __init__(self, whole: Corpus, share: float):
        self.whole, self.share, self.source, self.key, self.size = whole, share, whole.source, whole.key, whole.size
        self.skipped = whole.skipped

    @property
    def position(self) -> int:
        """How many bytes have been read."""
        return self.whole.position

    def fragments(self) -> Iterator[tuple[str, bool]]:
        """The two documents, as in Corpus."""
        left = int(self.share * sum(map(len, self._text())))
        for text in self._text():
            if 0 <= left <= len(text):
                yield text[:left], True
                text, left = text[left:], -1
            yield text, False
            left -= len(text)
        yield "", True

    def _text(self):
        ended = False
        for text, last in self.whole.fragments():
            yield "\n\n" + text if ended else text
            ended = last

    def check(self) -> None:
        """Check the whole text."""
        self.whole.check()
