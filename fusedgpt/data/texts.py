"""Read text as documents: from local files, which need not fit into memory, or from data sets of the Hub.

A corpus has
    source    its name
    key       changes if the content changes
    files     its parts, each read to its end before the next
    read      (a file) -> its documents in fragments (text, last); `last` is True for the one that ends a document
    size      bytes to read, None if not known; `position`: how many have been read
    left_out  {file: what of it was left out, and why}
"""

import collections
import contextlib
import csv
import functools
import io
import itertools
import json
import pathlib
import shlex
from collections.abc import Iterator
from typing import Any

from fusedgpt.data import decoding, documents, inputs
from fusedgpt.data.inputs import SHOWN
from fusedgpt.errors import UserError, first_line, out_of_memory, shown

LONGEST_ROW = 2**25  # most characters of a line of a table, and of a cell of a CSV
LONGEST_JSON = 2**29  # most characters of an array, which is read whole


class Unreadable(ValueError):
    """What is wrong with a row."""


class Files:
    """Local files and folders as a corpus: each row of a table, each mail, and each other file is a document.

    paragraphs: each paragraph of other files is a document. column: what of a row is its text. encoding: that of texts
    that are not UTF-8. Both as inputs.PerFile has them. skip_unreadable: leave out what cannot be read.
    Raises UserError if there is nothing to read. `read` raises it for what cannot be read.
    """

    def __init__(
        self,
        paths: list[pathlib.Path],
        out_dir: pathlib.Path,
        column: str | None = None,
        encoding: str | None = None,
        paragraphs: bool = False,
        skip_unreadable: bool = False,
    ):
        self.paragraphs, self.skip = paragraphs, skip_unreadable
        self.source = inputs.name_of(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        self.files = inputs.found(paths, out_dir)
        tables = [file for file in self.files if inputs.kind(file) in inputs.TABLES]
        self.columns = inputs.PerFile("text_column", column, "text", tables)
        self.encodings = inputs.PerFile("encoding", encoding, None, self.files)
        self.left_out = {}
        self._stamps = {file: _stamp(file) for file in self.files}
        sizes = itertools.accumulate((size for size, _ in self._stamps.values()), initial=0)
        self._starts = dict(zip([*self.files, None], sizes))  # in bytes over all files
        self.size = self._starts[None]
        stamps = [[str(file.absolute()), *self._stamps[file]] for file in self.files]
        self.key = [column, encoding, paragraphs, skip_unreadable, stamps]
        self._start, self._file = 0, None  # of the open file
        self._notes = set()

    @property
    def position(self) -> int:
        """How many bytes of the files have been read."""
        return self._start + (self._file.tell() if self._file and not self._file.closed else 0)

    def read(self, path: pathlib.Path) -> Iterator[tuple[str, bool]]:
        """The documents of a file. What is blank is left out."""
        self._start = self._starts[path]
        try:
            yield from self._read(path)
        except UserError as error:
            if not self.skip:
                further = "; --skip_unreadable=True goes on, and names all such files" * (len(self.files) > 1)
                raise UserError(f"{error}{further}") from error
            self._say(path, str(error))

    def _say(self, path, what):
        if self.left_out.get(str(path)) == what:  # read again
            return
        self.left_out[str(path)] = what
        if len(self.left_out) <= SHOWN:
            print(f"left out: {path}: {what.removeprefix(f'{path} ')}")

    def _read(self, path):
        kind, anything = inputs.kind(path) or ".txt", False
        try:
            with open(path, "rb") as self._file:
                for text, last in self._rows(path, kind) if kind in inputs.TABLES else self._texts(path, kind):
                    anything = anything or bool(text)
                    yield _clean(text), last
        except UserError:
            raise
        except Exception as error:  # pyarrow, lzma, csv, json, email and pypdf each have their own types
            raise _unreadable(path, error) from error
        if _stamp(path) != self._stamps[path]:
            raise UserError(f"{path} has changed while it was read: run this again, or name a copy of it")
        if not anything and str(path) not in self.left_out:
            self._say(path, "it has no text")

    def _encoding(self, path, plain=True):
        encoding, note = decoding.encoding_of(path, self.encodings[path], plain)
        if note and note not in self._notes:
            self._notes.add(note)
            if len(self._notes) <= SHOWN:
                print(note)
        return encoding

    def _texts(self, path, kind):
        """The documents of a file that is no table."""
        if kind in inputs.TEXTS:
            with decoding.text_of(path, self._encoding(path), self._file) as text:
                if self.paragraphs:
                    yield from ((paragraph, True) for paragraph in decoding.paragraphs(text))
                else:
                    yield from _whole(iter(lambda: text.read(decoding.CHUNK), ""))
            return
        for text in self._documents(path, kind):
            if self.paragraphs:
                yield from ((each, True) for each in decoding.paragraphs(text.splitlines(keepends=True)))
            elif text.strip():
                yield text, True

    def _documents(self, path, kind):
        if kind == ".mbox":
            yield from documents.mails(path)
        elif kind == ".pdf":
            with self._seekable(path) as file:
                yield "".join(documents.pdf(file, path, lambda what: self._say(path, what)))
        else:
            with decoding.unpacked(path, self._file) as file:
                raw = documents.read_whole(file, path)
            if kind in inputs.MAILS:
                yield documents.mail(raw, path)
            else:
                if kind not in inputs.ARCHIVES:
                    raw = raw.decode(self._encoding(path, plain=False)).encode()
                yield documents.plain(raw, inputs.PANDOC[kind], path)

    @contextlib.contextmanager
    def _seekable(self, path):
        with decoding.unpacked(path, self._file) as file:
            yield file if file is self._file else io.BytesIO(documents.read_whole(file, path))

    def _rows(self, path, kind):
        """The rows of a table. Those without text are left out and counted."""
        blank, unreadable, column = 0, [], self.columns[path]
        for number, row in enumerate(self._table(path, kind, column), start=1):
            try:
                if isinstance(row, Exception):
                    raise row
                if (text := text_at(row, column)).strip():
                    yield text, True
                else:
                    blank += 1
            except (KeyError, Unreadable) as error:
                why = _missing(row, column) if isinstance(error, KeyError) else str(error)
                why = " ".join(f"row {number:,} of {path} {why}".split())  # names may have line ends
                if not self.skip:
                    raise UserError(why) from error
                unreadable.append(why)
        said = [f"{blank:,} rows without text"] * bool(blank)
        said += [f"{len(unreadable):,} rows that cannot be read, as {each}" for each in unreadable[:1]]
        if said:
            self._say(path, " and ".join(said))

    def _table(self, path, kind, column):
        """The rows of a table: what they are, or an Unreadable."""
        if kind == ".parquet":
            with self._seekable(path) as file:
                yield from _parquet(file, column)
            return
        with decoding.text_of(path, self._encoding(path), self._file, newline="" if kind == ".csv" else None) as text:
            if kind in (".csv", ".tsv"):
                yield from _csv(text, tabs=kind == ".tsv")
            elif kind == ".json":
                yield from _json(text.read(LONGEST_JSON))
            else:
                yield from map(_value, filter(str.strip, _lines(text)))


def _whole(blocks):
    anything = False
    for block in blocks:
        anything = anything or bool(block.strip())
        yield block, False
    if anything:
        yield "", True


def _lines(text):
    for line in iter(lambda: text.readline(LONGEST_ROW), ""):
        if len(line) == LONGEST_ROW:
            raise ValueError(f"a line has over {LONGEST_ROW:,} characters")
        yield line


def _csv(text, tabs):
    """The rows of a CSV by the names of its first line. Semicolons or tabs may separate cells, as Excel writes them.

    A tab-separated table has no quotation marks (IANA, text/tab-separated-values).
    """
    csv.field_size_limit(LONGEST_ROW)
    lines = _lines(text)
    first = next(lines, "")
    delimiter = "\t" if tabs else max(",;\t", key=first.count)
    how = {"quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    for row in csv.DictReader(itertools.chain([first], lines), delimiter=delimiter, **how):
        yield Unreadable("has more cells than the first line") if None in row else row


def _value(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"is no JSON ({first_line(error)})")


def _json(text):
    """The rows of a JSON array, of JSON lines, or one value."""
    if len(text) == LONGEST_JSON:
        raise ValueError(f"it has over {LONGEST_JSON:,} characters, and is read whole: write its rows to a .jsonl")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        value = [_value(line) for line in text.splitlines() if line.strip()]
    return value if isinstance(value, list) else [value]


def _parquet(file, column):
    import pyarrow.parquet

    # do not read ahead: a row group can be the whole file
    table = pyarrow.parquet.ParquetFile(file, buffer_size=decoding.CHUNK, pre_buffer=False)
    name = next((name for name in (column, column.partition(".")[0]) if name in table.schema_arrow.names), None)
    for batch in table.iter_batches(batch_size=64, columns=name and [name]):
        yield from batch.to_pylist()


def text_at(value: Any, path: str) -> str:
    """The text at a path of a row, such as messages.content; "" for a null. Texts of a list are joined by line ends.

    Raises KeyError if there is no such path, Unreadable if what is there is no text.
    """
    if isinstance(value, list):
        return "\n".join(text_at(each, path) for each in value)
    if path and isinstance(value, dict):
        if path in value:  # a name may have a dot in it
            return text_at(value[path], "")
        name, _, rest = path.partition(".")
        return text_at(value[name], rest)
    if path and value is not None:
        raise KeyError(path)
    if value is not None and not isinstance(value, str):
        raise Unreadable(f"has {shown(value)} where its text should be")
    return value or ""


def _missing(row, column):
    """What a row has in place of `column`, and the path of its longest text."""
    if not (texts := _paths(row)):
        return f"has no {column!r}, and no text elsewhere: {shown(row)}"
    longest = max(texts, key=texts.get)
    there = ", ".join(itertools.islice(texts, SHOWN))
    return f"has no {column!r}, but {there}: name one, as in --text_column={shlex.quote(longest)}"


def _paths(value, path=""):
    """{path: characters} of all texts in a row."""
    if isinstance(value, str):
        return {path: len(value)}
    inside = collections.Counter()
    if isinstance(value, dict):
        for name, each in value.items():
            inside.update(_paths(each, f"{path}.{name}" if path else name))
    elif isinstance(value, list):
        for each in value[:SHOWN]:
            inside.update(_paths(each, path))
    return inside


def _clean(text):
    """A text that UTF-8 can write, with \\n as its line end, and without byte order marks within it."""
    if "\ufeff" in text or "\r" in text:
        text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can escape half of a surrogate pair; broken fonts of a PDF give one
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _stamp(path):
    """The size of a file and when it was written."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _unreadable(path, error):
    """The UserError for a file that cannot be read."""
    if isinstance(error, OSError) and error.strerror:  # that of gzip has none
        return UserError(f"cannot read {path}: {error.strerror}")
    if out_of_memory(error):
        return UserError(f"cannot read {path}, because memory ran out: cut its long texts into shorter ones")
    why = first_line(error)
    if isinstance(error, UnicodeError):
        return UserError(f"{path} is not {error.encoding} text ({why}): say --encoding=NAME, or convert it")
    if isinstance(error, csv.Error):
        return UserError(f"{path} is no sound CSV ({why}): a cell that begins with a quotation mark must end with one")
    return UserError(f"cannot read {path} ({type(error).__name__}: {why}): it is damaged, or its suffix is wrong")


class Hub:
    """Parquet files of Hugging Face's Hub, or of a folder of that layout, as a corpus. The text is streamed.

    pattern: where they are, as in hf://datasets/NAME@COMMIT/data/*.parquet. `read` raises UserError if they cannot be
    read.
    """

    def __init__(self, source: str, pattern: str):
        self.source, self.pattern, self.key, self.left_out = source, pattern, [pattern], {}
        self.size, self.position = None, 0

    @functools.cached_property
    def files(self) -> list[str]:
        """The addresses of the files, sorted."""
        import fsspec

        try:
            system, path = fsspec.core.url_to_fs(self.pattern)
            found = [system.unstrip_protocol(each) for each in sorted(system.glob(path))]
        except Exception as error:
            raise self._unreadable(error) from error
        if not found:
            raise UserError(f"{self.pattern} names no file: give local texts with --input=PATH")
        return found

    def read(self, file: str) -> Iterator[tuple[str, bool]]:
        """The documents of a file, from its column `text`."""
        import datasets

        try:
            rows = datasets.load_dataset("parquet", data_files=file, split="train", streaming=True, columns=["text"])
            for row in rows:
                self.position += len(row["text"])
                yield _clean(row["text"]), True
        except Exception as error:  # `datasets` wraps a lost connection in its own types
            raise self._unreadable(error) from error

    def _unreadable(self, error):
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {first_line(cause)}"
        return UserError(f"cannot read {self.source} ({why}): run this again, or give --input=PATH")


def whole(corpus) -> str:
    """The text of a corpus, with an empty line between its documents."""
    parts = []
    for file in corpus.files:
        for text, last in corpus.read(file):
            parts += [text, "\n\n"] if last else [text]
    return "".join(parts[:-1])
