"""Read text as documents: from local files, which need not fit into memory, or from data sets of the Hub.

A corpus has
    source    its name
    key       changes if the content changes
    files     its parts, each read to its end before the next
    read      (a file) -> its documents in fragments (text, last); `last` is True for the one that ends a document
"""

import functools
import io
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from fusedgpt.data import documents, tables
from fusedgpt.data.tokenizer import fails_as
from fusedgpt.errors import UserError, first_line

TEXTS = (".txt", ".text", ".md", ".markdown", ".rst", ".org")
TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")  # each row is a document
# what pandoc reads, and its name for it
ARCHIVES = {".docx": "docx", ".odt": "odt", ".epub": "epub"}
PANDOC = ARCHIVES | {".html": "html", ".htm": "html", ".xhtml": "html"}
PANDOC |= {".rtf": "rtf", ".tex": "latex", ".ipynb": "ipynb", ".fb2": "fb2", ".mediawiki": "mediawiki"}
KINDS = (*TEXTS, *TABLES, *PANDOC, ".eml", ".mbox", ".pdf")
PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip")
SHOWN = 20  # most names in a list
FOR_SOME = r"(?:^|,)([^:,]*[.*][^:,]*):([^,]+)"  # FILE:VALUE


def kind_of(path: pathlib.Path) -> str | None:
    """The suffix of a file's name, if it is in KINDS; otherwise None. A further suffix of PACKED does not count."""
    name = path.name.lower()
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    return next((each for each in KINDS if name.endswith(each)), None)


def require_there(path: pathlib.Path) -> None:
    """Raise UserError if `path` does not exist."""
    how = "name a local file or folder"
    if str(path).startswith(("http:", "https:")):
        how = "download it first, and name the file"
    elif "*" in path.name:
        how = "leave out the quotation marks, so that the shell names the files"
    if not path.exists():
        raise UserError(f"--input={path} does not exist: {how}")


def found(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """The files to read, of those that `paths` name or contain. Prints how many are left out.

    Left out of folders are hidden files, files of other kinds, and the meta.json of data sets. Raises UserError if
    there is nothing to read.
    """
    files, left_out = {}, 0
    for path in paths:
        require_there(path)
        for file in [path] if path.is_file() else _inside(path):
            if (file == path or (kind_of(file) and file.is_file())) and file.stat().st_size:
                files.setdefault(file.resolve(), file)  # a document that is there twice could be in both splits
            else:
                left_out += 1
    if left_out:
        print(f"left out: {left_out:,} files that are empty or of another kind, which is read if you name the file")
    if not files:
        raise UserError(
            f"--input={' '.join(map(str, paths))} holds no text: name a file or folder that does. Of folders,"
            f" {', '.join(KINDS)} are read, also with {', '.join(PACKED)}"
        )
    return list(files.values())


def _inside(folder):
    """All files in and below a folder, sorted, without hidden ones and the locks ~$… of documents that are open."""

    def refuse(error):
        raise error

    files, been = [], set()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in been:  # a link led to a folder that was read or is above
            folders.clear()
            continue
        been.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        left_out = ("meta.json",) * ("train.bin" in names)
        files += [pathlib.Path(root, name) for name in names if not name.startswith((".", "~$", *left_out))]
    return sorted(files)


def per_file(given: str | None, default: str | None, files: Sequence[pathlib.Path]) -> dict:
    """What an option says of each file: `VALUE`, or `FILE:VALUE` for files whose names the pattern FILE matches.

    Several have commas between them, and the first that matches counts.
    """
    pairs, others = re.findall(FOR_SOME, given or ""), re.sub(FOR_SOME, "", given or "").strip(",")
    values = dict.fromkeys(files, others or default)
    for pattern, value in reversed(pairs):
        values |= dict.fromkeys([file for file in files if file.match(pattern)], value)
    return values


class Files:
    """Local files and folders as a corpus: each row of a table, each mail, and each other file is a document.

    paragraphs: each paragraph of other files is a document. column: what of a row is its text. encoding: that of texts
    that are not UTF-8. Both as per_file has them. skip_unreadable: leave out what cannot be read.
    Raises UserError if there is nothing to read. `read` raises it for what cannot be read.
    """

    def __init__(
        self,
        paths: list[pathlib.Path],
        column: str | None = None,
        encoding: str | None = None,
        paragraphs: bool = False,
        skip_unreadable: bool = False,
    ):
        self.paragraphs, self.skip = paragraphs, skip_unreadable
        self.source = paths[0].absolute().name + f" and {len(paths) - 1} more" * (len(paths) > 1)
        self.files = found(paths)
        rows = [file for file in self.files if kind_of(file) in TABLES]
        self.columns = per_file(column, "text", rows)
        self.encodings = per_file(encoding, None, self.files)
        stamps = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        self.key = [column, encoding, paragraphs, skip_unreadable, *stamps]
        self._notes = set()

    def read(self, path: pathlib.Path) -> Iterator[tuple[str, bool]]:
        """The documents of a file. What is blank is left out."""
        kind = kind_of(path) or ".txt"
        readers = dict.fromkeys(TEXTS, self._text) | dict.fromkeys(TABLES, self._rows)
        try:
            for text, last in readers.get(kind, self._documents)(path, kind):
                yield _clean(text), last
        except Exception as error:  # pyarrow, lzma, csv, json, email and pypdf each have their own types
            what = _unreadable(path, error)
            if not self.skip:
                raise UserError(what) from error
            self._leave_out(path, what)

    def _leave_out(self, path, what):
        self._note(f"left out: {path}: {what.removeprefix(f'{path} ')}")

    def _note(self, note):
        """Print a note: once, although some texts are read twice, and only the first of many."""
        if note not in self._notes and len(self._notes) < SHOWN:
            print(note)
        self._notes.add(note)

    def _encoding(self, path):
        encoding, note = documents.encoding_of(path, self.encodings[path])
        if note:
            self._note(note)
        return encoding

    def _text(self, path, kind):
        with documents.unpacked(path) as content, io.TextIOWrapper(content, self._encoding(path)) as text:
            if self.paragraphs:
                yield from ((paragraph, True) for paragraph in documents.paragraphs(text))
                return
            anything = False
            for block in iter(lambda: text.read(documents.CHUNK), ""):
                anything = anything or bool(block.strip())
                yield block, False
            if anything:
                yield "", True

    def _documents(self, path, kind):
        for text in self._mails_or_document(path, kind):
            parts = documents.paragraphs(text.splitlines(keepends=True)) if self.paragraphs else [text]
            yield from ((part, True) for part in parts if part.strip())

    def _mails_or_document(self, path, kind):
        if kind == ".mbox":
            yield from documents.mails(path)
            return
        with documents.unpacked(path) as file:
            raw = documents.read_whole(file, path)
        if kind == ".pdf":
            yield documents.pdf(io.BytesIO(raw), path, functools.partial(self._leave_out, path))
        elif kind == ".eml":
            yield documents.mail(raw, path)
        else:
            if kind not in ARCHIVES:
                raw = raw.decode(self._encoding(path)).encode()
            yield documents.plain(raw, PANDOC[kind], path)

    def _rows(self, path, kind):
        """The texts of a table's rows. Rows without text are left out and counted."""
        blank, unreadable, column = 0, [], self.columns[path]
        encoding = "" if kind == ".parquet" else self._encoding(path)
        with documents.unpacked(path) as content:
            if kind == ".json" or (kind == ".parquet" and path.suffix.lower() != kind):  # not read from front to end
                content = io.BytesIO(documents.read_whole(content, path))
            for number, row in enumerate(tables.rows(content, kind, encoding, column), start=1):
                try:
                    text = tables.text_of(row, column)
                except (ValueError, RecursionError) as error:
                    unreadable.append(f"row {number:,} of {path} cannot be read: {first_line(error)}")
                    if not self.skip:
                        raise UserError(unreadable[0]) from error
                    continue
                if text.strip():
                    yield text, True
                else:
                    blank += 1
        if blank:
            self._leave_out(path, f"{blank:,} rows without text")
        if unreadable:
            self._leave_out(path, f"{len(unreadable):,} rows that cannot be read, as {unreadable[0]}")


def _clean(text):
    """A text that UTF-8 can write, with \\n as its line end, and without byte order marks within it."""
    if "\ufeff" in text or "\r" in text:
        text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():  # most are: this takes no time
        return text
    # JSON can escape half of a surrogate pair; broken fonts of a PDF give one
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unreadable(path, error):
    """What the UserError for a file says that cannot be read."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{path} needs the package {error.name}: pip install 'fusedgpt[documents]'"
    return f"cannot read {path} ({type(error).__name__}: {first_line(error)}): is its suffix right, and --encoding?"


class Hub:
    """Parquet files of Hugging Face's Hub, or of a folder of that layout, as a corpus. The text is streamed.

    pattern: where they are, as in hf://datasets/NAME@COMMIT/data/*.parquet. Raises UserError if they cannot be read.
    """

    def __init__(self, source: str, pattern: str):
        self.source, self.pattern, self.key = source, pattern, [pattern]
        self.failure = f"cannot read {source}, run this again, or give --input=PATH"

    @functools.cached_property
    def files(self) -> list[str]:
        """The addresses of the files, sorted."""
        import fsspec

        with fails_as(self.failure):
            system, path = fsspec.core.url_to_fs(self.pattern)
            found = [system.unstrip_protocol(each) for each in sorted(system.glob(path))]
        if not found:
            raise UserError(f"{self.pattern} names no file: give local texts with --input=PATH")
        return found

    def read(self, file: str) -> Iterator[tuple[str, bool]]:
        """The documents of a file, from its column `text`."""
        import datasets

        with fails_as(self.failure):
            rows = datasets.load_dataset("parquet", data_files=file, split="train", streaming=True, columns=["text"])
            for row in rows:
                yield _clean(row["text"]), True


def whole(corpus) -> str:
    """The text of a corpus, with an empty line between its documents."""
    parts = []
    for file in corpus.files:
        for text, last in corpus.read(file):
            parts += [text, "\n\n"] if last else [text]
    return "".join(parts[:-1])
