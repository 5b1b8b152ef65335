"""Read text as documents, from local files, which need not fit into memory, or from data sets of the Hub."""

import codecs
import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Protocol

from fusedgpt.errors import UserError, first_line, out_of_memory, shown

KINDS = (".txt", ".md", ".csv", ".json", ".jsonl", ".parquet")
PACKED = (".gz", ".zst")
CHUNK = 2**20  # bytes of a file to read at a time
# Most characters of a JSON value or a CSV row, so that a broken one does not pull the whole file into memory, where
# a character takes up to 4 bytes, and {} takes 72.
LONGEST_VALUE = 2**26
COLUMNS_SHOWN = 20
# Parquet rows to read at once. A file may store a text once for thousands of rows, but in memory each row has a copy.
ROWS = 8
SEPARATORS = re.compile(r"[\s,\[\]]*")  # between the objects of a JSON array, or of JSON lines


def kind(path: pathlib.Path) -> str | None:
    """The suffix of a file's name, if it is in KINDS; otherwise None. A further suffix .gz or .zst does not count."""
    name = path.name.lower()
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    return next((each for each in KINDS if name.endswith(each)), None)


def name_of(path: pathlib.Path) -> str:
    """The name of a file or folder. A link has its own name; "." has the name of the current folder."""
    return os.path.basename(os.path.abspath(path))


def _same(path, other):
    return other is not None and path.name == other.name and path.resolve() == other.resolve()


def _inside(folder):
    """All files in and below a folder, sorted, without hidden ones."""

    def refuse(error):
        raise UserError(f"--input: cannot read the folder {error.filename}: {error.strerror}") from error

    files, been = [], set()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in been:  # a link led to a folder that was read or is above
            folders.clear()
            continue
        been.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [pathlib.Path(root, name) for name in names if not name.startswith(".")]
    return sorted(files)


def require_readable(path: pathlib.Path) -> None:
    """Raise UserError if `path` is missing, is an archive, or is a pipe or device, which cannot be read twice."""
    if not path.exists():
        raise UserError(f"--input={path} does not exist: name a local file or folder")
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"--input={path} is a pipe or a device: write its content to a file and name that")
    if ".tar" in path.suffixes and path.is_file():  # the headers in it would pass for text
        raise UserError(f"--input={path} is an archive: unpack it and name the folder")


class Corpus(Protocol):
    """A sequence of documents."""

    source: str  # the name of the corpus
    key: list  # changes if the content changes
    size: int | None  # bytes to read; None if not known
    position: int  # bytes read so far

    def fragments(self) -> Iterator[tuple[str, bool]]:
        """The documents in fragments (text, last). `last` is True for the fragment that ends a document."""


class Files:
    """Local files and folders as a corpus.

    Each row of .csv, .json, .jsonl and .parquet is a document, with its text in `column`. Any other file is one
    document; with `paragraphs`, each paragraph is one, and empty lines separate them. Links to folders are followed. In
    folders, hidden files and the file `besides` are left out. Files of other kinds are left out too, and their number
    is printed. Text must be UTF-8. A BOM is removed, and line ends become \\n. Raises UserError if there is nothing to
    read, or if a folder cannot be read. `fragments` raises it if a file is damaged or holds no text.
    """

    def __init__(self, paths: list[pathlib.Path], column="text", paragraphs=False, besides: pathlib.Path | None = None):
        self.column, self.paragraphs = column, paragraphs
        self.source = name_of(paths[0])
        if len(paths) > 1:
            self.source += f" and {len(paths) - 1} more"
        files, left_out = [], 0
        for path in paths:
            require_readable(path)
            if path.is_file():
                files.append(path)
                continue
            inside = [f for f in _inside(path) if not _same(f, besides)]
            taken = [f for f in inside if f.is_file() and kind(f)]
            left_out += len(inside) - len(taken)
            files += taken
        if left_out:
            print(f"left out: {left_out:,} files that are not {', '.join(KINDS)}, or these with .gz or .zst")
        self.files = [f for f in files if f.stat().st_size]
        if empty := len(files) - len(self.files):
            print(f"left out: {empty:,} empty files")
        if not self.files:
            raise UserError(f"--input={' '.join(map(str, paths))} holds no text: name a file or folder that does")
        stamps = [[str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns] for f in self.files]
        self.key = [column, paragraphs, *stamps]
        self.size = sum(size for _, size, _ in stamps)
        self._done, self._file = 0, None  # bytes of the files that were read, and the open file
        self._row = 0  # number of the last row read from the open file

    @property
    def position(self) -> int:
        """How many bytes of the files have been read."""
        return self._done + (self._file.tell() if self._file and not self._file.closed else 0)

    def fragments(self) -> Iterator[tuple[str, bool]]:
        """The documents of all files."""
        self._done = 0
        for path in self.files:
            self._row = 0
            try:
                with open(path, "rb") as self._file:
                    yield from self._read(path)
            except UserError:
                raise
            except Exception as error:  # zlib, zstandard, csv, json and pyarrow each have their own types
                raise _unreadable(path, self._row, error) from error
            self._done += path.stat().st_size

    def _read(self, path):
        chunks = _unpacked(path, self._file)
        if kind(path) == ".parquet":
            rows = self._parquet_rows(path, chunks)
        elif kind(path) == ".csv":
            rows = _csv_rows(_decoded(path, chunks))
        elif kind(path) in (".json", ".jsonl"):
            rows = _json_values(_decoded(path, chunks))
        else:
            yield from (_paragraphs if self.paragraphs else _whole)(_decoded(path, chunks))
            return
        for number, row in enumerate(rows, start=1):
            yield self._text(row, f"row {number:,} of {path}"), True
            self._row = number

    def _text(self, row, where):
        if not isinstance(row, dict):
            raise UserError(f"{where} is {shown(row)}: it must be an object with a text in {self.column!r}")
        if any(row.get(None, ())):  # csv puts cells beyond the columns under None
            raise UserError(f"{where} has more cells than the first line: put texts with commas between quotes")
        if self.column not in row:
            columns = ", ".join(map(shown, itertools.islice(row, COLUMNS_SHOWN)))
            raise UserError(f"{where} has no {self.column!r}, but {columns}: --text_column names the one with the text")
        text = row[self.column]
        if not isinstance(text, str):
            raise UserError(f"{where} has {shown(text)} in {self.column!r}, which must be a text. Remove such rows")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
            raise UserError(f"{where} has half of a surrogate pair in {self.column!r}. Remove such rows") from error
        return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text

    def _parquet_rows(self, path, chunks):
        import pyarrow.parquet

        with contextlib.ExitStack() as opened:
            file = self._file
            if path.suffix.lower() in PACKED:  # unpack it first, because Parquet is read from its end
                file = opened.enter_context(tempfile.TemporaryFile())
                file.writelines(chunks)
            # do not read ahead: a row group can be the whole file
            parquet = pyarrow.parquet.ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)
            columns = [self.column] if self.column in parquet.schema_arrow.names else None
            for batch in parquet.iter_batches(batch_size=ROWS, columns=columns):
                yield from batch.to_pylist()


def _unreadable(path, row, error):
    """The UserError for a file that cannot be read after its row number `row`."""
    if isinstance(error, ImportError):
        return UserError(f"cannot read {path} without the package {error.name}: pip install {error.name}")
    if isinstance(error, OSError) and error.strerror:  # gzip's own errors have none
        return UserError(f"cannot read {path}: {error.strerror}")
    # leave out the position in a JSON error, because it counts from the value, not from the beginning of the file
    why = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
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
        self.streaming, self.options = streaming, options

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


class Halves:
    """The text of a corpus as two documents: the first `share` of its characters, and the rest."""

    def __init__(self, whole: Corpus, share: float):
        self.whole, self.share, self.source, self.key, self.size = whole, share, whole.source, whole.key, whole.size

    @property
    def position(self) -> int:
        """How many bytes have been read."""
        return self.whole.position

    def fragments(self) -> Iterator[tuple[str, bool]]:
        """The two documents, as in Corpus."""
        left = int(self.share * sum(len(text) for text, _ in self.whole.fragments()))
        for text, _ in self.whole.fragments():
            if 0 <= left <= len(text):
                yield text[:left], True
                text, left = text[left:], -1
            yield text, False
            left -= len(text)
        yield "", True


def _unpacked(path, file):
    """The unpacked bytes of a file, in chunks."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        yield from _unpacked_zst(file)
        return
    file = gzip.GzipFile(fileobj=file) if suffix == ".gz" else file
    while chunk := file.read(CHUNK):
        yield chunk


def _unpacked_zst(file):
    """The unpacked bytes of a .zst, frame by frame. zstandard's own readers do not notice a file that was cut short."""
    import zstandard

    frame = None
    while chunk := file.read(CHUNK // 512):  # 64 MiB at most, because 4 bytes can become 2**17
        while chunk:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()  # zstd --long=31
            yield frame.decompress(chunk)
            chunk, frame = frame.unused_data, None if frame.eof else frame
    if frame:
        raise EOFError("the file ends within a frame")


def _decoded(path, chunks):
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    before = 0
    for chunk in itertools.chain(chunks, [None]):  # the end is None, because b"" may come from an empty frame
        raw = chunk or b""
        try:
            yield decoder.decode(raw, final=chunk is None)
        except UnicodeDecodeError as error:
            at = before + len(raw) - len(error.object) + error.start  # the decoder may hold bytes of earlier chunks
            raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {at:,}. Convert it to UTF-8") from error
        before += len(raw)


def _whole(blocks):
    """All text as one document."""
    anything = False
    for block in blocks:
        if block:
            yield block, False
            anything = True
    if anything:
        yield "", True


def _paragraphs(blocks):
    """Each paragraph as a document."""
    line_ends, within = "", False  # a paragraph may go on in the next block, so keep its line ends until then
    for block in blocks:
        text = (line_ends + block).rstrip("\n")
        line_ends = (line_ends + block)[len(text) :][:2]  # two are enough, and there may be a billion
        *complete, rest = re.split("\n{2,}", text)
        for paragraph in complete:
            if paragraph or within:
                yield paragraph, True
            within = False
        if rest:
            yield rest, False
            within = True
    if within:
        yield "", True


def _csv_rows(blocks):
    left = LONGEST_VALUE

    def lines():
        nonlocal left
        for line in _lines(blocks):
            left -= len(line)  # a row may have several lines, in quotes
            if left < 0:
                raise csv.Error(f"a row is longer than {LONGEST_VALUE:,} characters")
            yield line

    csv.field_size_limit(LONGEST_VALUE)
    for row in csv.DictReader(lines(), strict=True):
        left = LONGEST_VALUE
        yield row


def _lines(blocks):
    """Lines with their line ends. A line longer than LONGEST_VALUE comes in parts."""
    rest = ""
    for block in blocks:
        *lines, rest = (rest + block).split("\n")
        yield from (line + "\n" for line in lines)
        if len(rest) > LONGEST_VALUE:
            yield rest
            rest = ""
    if rest:
        yield rest


def _json_values(blocks):
    """The values of a JSON array, or of JSON lines."""
    decode, text, at, wanted, arrays = json.JSONDecoder().raw_decode, "", 0, 0, 0
    for block in itertools.chain(blocks, [None]):
        text, at = text[at:] + (block or ""), 0
        if len(text) < wanted and block is not None:
            continue
        while True:
            gap = SEPARATORS.match(text, at)
            at, arrays = gap.end(), arrays + gap.group().count("[") - gap.group().count("]")
            if at == len(text):
                break
            try:
                value, at = decode(text, at)
            except json.JSONDecodeError:
                if block is None or len(text) - at > LONGEST_VALUE:
                    raise
                # the value may go on in the next block; wait until the text is twice as long, to save attempts
                wanted = min(2 * (len(text) - at), LONGEST_VALUE + 1)
                break
            wanted = 0
            yield value
    if arrays:
        raise EOFError("the file ends within an array")
