"""Read text as documents: from local files, which need not fit into memory, or from data sets of the Hub.

A corpus has
    source    its name
    key       changes if the content changes
    files     its parts, each read to its end before the next
    read      (a file) -> its documents in fragments (text, last); `last` is True for the one that ends a document
"""

import collections
import contextlib
import functools
import io
import mailbox
import os
import pathlib
import zipfile
from collections.abc import Iterator, Sequence

from fusedgpt.data import documents, tables
from fusedgpt.data.tokenizer import END_OF_TEXT, fails_as
from fusedgpt.errors import UserError, first_line

TEXTS = (".txt", ".text", ".md", ".markdown", ".rst", ".org", ".py")
TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")  # each row is a document
# what pandoc reads, and its name for it
ARCHIVES = {".docx": "docx", ".odt": "odt", ".epub": "epub"}
PANDOC = ARCHIVES | {".html": "html", ".htm": "html", ".xhtml": "html"}
PANDOC |= {".rtf": "rtf", ".tex": "latex", ".ipynb": "ipynb", ".fb2": "fb2", ".mediawiki": "mediawiki"}
WHOLE = (*PANDOC, ".eml", ".pdf")  # what is not read from front to end
KINDS = (*TEXTS, *TABLES, *WHOLE, ".mbox")


def kind_of(path: pathlib.Path) -> str:
    """The suffix of a file's name, or of the name in a .zip, in small letters, without one of documents.PACKED."""
    if path.suffix.lower() == ".zip":
        with contextlib.suppress(OSError, UserError, zipfile.BadZipFile):  # said when it is read
            if inside := pathlib.PurePath(documents.name_in_zip(path)).suffix:
                return inside.lower()
    if path.suffix.lower() in documents.PACKED:
        path = path.with_suffix("")
    return path.suffix.lower()


def found(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """The files to read, of those that `paths` name or contain. Raises UserError if there is none.

    Left out of folders are hidden files, files of other kinds, and the meta.json of data sets.
    """
    files, left_out = {}, 0
    for path in paths:
        how = "name a local file or folder"
        if str(path).startswith(("http:", "https:")):
            how = "download it first, and name the file"
        elif "*" in path.name:
            how = "leave out the quotation marks, so that the shell names the files"
        if not (path.is_file() or path.is_dir()):  # a pipe or a device cannot be read twice
            raise UserError(f"--input={path} cannot be read: {how}")
        for file in [path] if path.is_file() else _inside(path):
            if file == path or kind_of(file) in KINDS:
                files.setdefault(file.resolve(), file)  # a document that is there twice could be in both splits
            else:
                left_out += 1
    if left_out:
        print(f"left out: {left_out:,} files of other kinds, which are read as text if you name them")
    if not files:
        raise UserError(f"--input={' '.join(map(str, paths))} holds no text: of folders, {', '.join(KINDS)} are read")
    return list(files.values())


def _inside(folder):
    """All files in and below a folder, sorted, without hidden ones and the locks ~$… of documents that are open."""
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "~$")) for part in file.relative_to(folder).parts)
        of_a_data_set = file.name == "meta.json" and file.with_name("train.bin").exists()
        if file.is_file() and not hidden and not of_a_data_set:
            yield file


class Files:
    """Local files and folders as a corpus: each row of a table, each mail, and each other file is a document.

    column: the path of a row's text. encoding: of texts that are not UTF-8, as documents.encoding_of has it. skip: what
    cannot be read is left out; otherwise `read` raises UserError. So does this if there is nothing to read.
    """

    def __init__(self, paths: list[pathlib.Path], column: str = "text", encoding: str = "", skip: bool = False):
        self.column, self.skip = column, skip
        self.source = os.path.basename(os.path.abspath(paths[0])) + f" and {len(paths) - 1} more" * (len(paths) > 1)
        self.files = found(paths)
        stamps = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        self.key = [column, encoding, skip, *stamps]
        self.say = functools.cache(print)  # each note once, although some texts are read twice
        self.encoding_of = functools.partial(documents.encoding_of, given=encoding, say=self.say)

    def read(self, path: pathlib.Path) -> Iterator[tuple[str, bool]]:
        """The documents of a file. What is blank is left out."""
        last = True
        try:
            for text, last in self._read(path, kind_of(path)):
                if END_OF_TEXT in text:
                    self.say(f"{path} has {END_OF_TEXT} in it, which ends no document there: make a table of its texts")
                yield _clean(text), last
        except Exception as error:  # pyarrow, lzma, csv, json, email and pypdf each have their own types
            what = f"cannot read {path} ({type(error).__name__}: {first_line(error)}): is its suffix right?"
            if isinstance(error, UserError):
                what = str(error)
            elif isinstance(error, ImportError):
                what = f"{path} needs the package {error.name}: pip install pypandoc-binary 'pypdf[crypto]'"
            if not self.skip:
                raise UserError(f"{what}; --skip_unreadable=True goes on without it") from error
            self.say(f"left out: {what}")
            if not last:
                yield "", True  # the next document is not the rest of this one

    def _read(self, path, kind):
        if kind == ".mbox":
            if path.suffix.lower() != kind:
                raise UserError(f"{path} cannot be read while it is packed: unpack it, and name the mailbox")
            with contextlib.closing(mailbox.mbox(path, create=False)) as box:
                yield from ((text, True) for text in map(documents.mail, map(bytes, box)) if text.strip())
            return
        with documents.unpacked(path) as content:
            if kind == ".parquet" and path.suffix.lower() != kind:  # packed: pyarrow reads its end first
                content = io.BytesIO(content.read())
            if kind in TABLES:
                yield from self._rows(path, content, kind)
            elif kind not in WHOLE:
                yield from self._text(path, content)
            elif (text := self._document(path, content.read(), kind)).strip():
                yield text, True

    def _text(self, path, content):
        text, blank = io.TextIOWrapper(content, self.encoding_of(path)), True
        for block in iter(lambda: text.read(documents.CHUNK), ""):
            blank = blank and not block.strip()
            yield block, False
        if not blank:
            yield "", True

    def _document(self, path, raw, kind):
        if kind == ".pdf":
            return documents.pdf(raw)
        if kind == ".eml":
            return documents.mail(raw)
        if kind not in ARCHIVES:
            raw = raw.decode(self.encoding_of(path)).encode()
        return documents.plain(raw, PANDOC[kind])

    def _rows(self, path, content, kind):
        """The texts of a table's rows. Rows without text are left out and counted."""
        left_out = collections.Counter()
        encoding = self.encoding_of(path) if kind != ".parquet" else ""
        for number, row in enumerate(tables.rows(content, kind, encoding, self.column), start=1):
            try:
                text = tables.text_of(row, self.column)
            except (ValueError, RecursionError) as error:
                if not self.skip:
                    raise UserError(f"row {number:,} of {path} cannot be read: {first_line(error)}") from error
                left_out["rows that cannot be read"] += 1
                continue
            if text.strip():
                yield text, True
            else:
                left_out["rows without text"] += 1
        for what, count in left_out.items():
            self.say(f"left out of {path}: {count:,} {what}")


def _clean(text):
    """A text that UTF-8 can write, with \\n as its line end, and without byte order marks within it."""
    if "\ufeff" in text or "\r" in text:
        text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():  # most are: this takes no time
        return text
    # JSON can escape half of a surrogate pair; broken fonts of a PDF give one
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Hub:
    """Parquet files of Hugging Face's Hub, or of a folder of that layout, as a corpus. The text is streamed.

    pattern: where they are, as in hf://datasets/NAME@COMMIT/data/*.parquet. Raises UserError if they cannot be read.
    """

    def __init__(self, source: str, pattern: str):
        import fsspec

        self.source, self.key = source, [pattern]
        self.failure = f"cannot read {source}, run this again, or give --input=PATH"
        with fails_as(self.failure):
            self.files = sorted(each.full_name for each in fsspec.open_files(pattern))

    def read(self, file: str) -> Iterator[tuple[str, bool]]:
        """The documents of a file, from its column `text`."""
        import datasets

        with fails_as(self.failure):
            rows = datasets.load_dataset("parquet", data_files=file, split="train", streaming=True, columns=["text"])
            for row in rows:
                yield _clean(row["text"]), True
