"""Which files --input names, alone or in folders: by their kinds. Which column of a table --text_column names."""

import codecs
import collections
import contextlib
import os
import pathlib
import re

from fusedgpt.data import decoding, documents, tables
from fusedgpt.errors import UserError

TEXTS = (".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex")
KINDS = (*TEXTS, *documents.KINDS, *tables.KINDS)
SHOWN = 20  # most names in a list


def kind(path: pathlib.Path) -> str | None:
    """The suffix of a file's name, if it is in KINDS; otherwise None. A further suffix .gz or .zst does not count."""
    name = path.name.lower()
    for suffix in decoding.PACKED:
        name = name.removesuffix(suffix)
    return next((each for each in KINDS if name.endswith(each)), None)


def name_of(path: pathlib.Path) -> str:
    """The name of a file or folder. A link has its own name; "." has the name of the current folder."""
    return os.path.basename(os.path.abspath(path))


def _same(path, other):
    return other is not None and path.name == other.name and path.resolve() == other.resolve()


def _inside(folder):
    """All files in and below a folder, sorted, without hidden ones and the locks ~$… of documents that are open."""

    def refuse(error):
        raise UserError(f"--input: cannot read the folder {error.filename}: {error.strerror}") from error

    files, been = [], set()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in been:  # a link led to a folder that was read or is above
            folders.clear()
            continue
        been.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [pathlib.Path(root, name) for name in names if not name.startswith((".", "~$"))]
    return sorted(files)


def _of_bins(path):
    """Whether a file is the meta.json of a data set, which a preparation wrote."""
    return path.name == "meta.json" and any(path.parent.glob("train*.bin"))


def _blank(file):
    """Whether a file is empty, or short and of blanks alone."""
    if (size := file.stat().st_size) > decoding.HEAD:
        return False
    with contextlib.suppress(OSError):  # reading it will say why
        return not size or not file.read_bytes().removeprefix(codecs.BOM_UTF8).strip()
    return False


def require_readable(path: pathlib.Path) -> None:
    """Raise UserError if `path` is missing, is an archive, or is a pipe or device, which cannot be read twice."""
    if not path.exists():
        raise UserError(f"--input={path} does not exist: name a local file or folder")
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"--input={path} is a pipe or a device: write its content to a file and name that")
    if ".tar" in path.suffixes and path.is_file():  # the headers in it would pass for text
        raise UserError(f"--input={path} is an archive: unpack it and name the folder")


def _once(files):
    """The files without those that came before. A link beside its file is another file."""
    folders, firsts = {folder: os.path.realpath(folder) for folder in {file.parent for file in files}}, {}
    for file in files:
        firsts.setdefault((folders[file.parent], file.name), file)
    return list(firsts.values())


def found(paths: list[pathlib.Path], besides: pathlib.Path | None) -> list[pathlib.Path]:
    """The files to read, of those that `paths` name or contain. Prints what is left out.

    besides: a file to leave out. Raises UserError if there is nothing to read, or if a folder cannot be read.
    """
    files, others = [], collections.Counter()
    for path in paths:
        require_readable(path)
        if path.is_file():
            files.append(path)
            continue
        inside = [f for f in _inside(path) if not (_same(f, besides) or _of_bins(f))]
        taken = [f for f in inside if f.is_file() and kind(f)]
        others.update(f.suffix.lower() or "without a suffix" for f in set(inside).difference(taken))
        files += taken
    if others:
        remedies = ["save .doc, .rtf and .pages as .docx"] if others.keys() & {".doc", ".rtf", ".pages"} else []
        remedies.append("a text with another suffix is read if you name it")
        print(f"left out: {others.total():,} files of other kinds ({_counted(others)}): {'; '.join(remedies)}")
    once = _once(files)  # a document that is there twice may be in both splits
    if again := len(files) - len(once):
        print(f"left out: {again:,} files that --input names twice")
    full = [f for f in once if not _blank(f)]
    if empty := len(once) - len(full):
        print(f"left out: {empty:,} empty files")
    if not full:
        raise UserError(
            f"--input={' '.join(map(str, paths))} holds no text: name a file or folder that does. Of folders,"
            f" {', '.join(KINDS)} are read, also with .gz or .zst"
        )
    if len(full) > 1:
        print(f"reading {len(full):,} files ({_counted(collections.Counter(kind(f) or 'as text' for f in full))})")
    return full


def _counted(counter):
    """'3 .png, 1 .doc' for a counter, with the most frequent first, and SHOWN at most."""
    most = [f"{count:,} {name}" for name, count in sorted(counter.items(), key=lambda each: (-each[1], each[0]))]
    return ", ".join(most[:SHOWN]) + ", …" * (len(most) > SHOWN)


def columns(given: str, files: list[pathlib.Path]) -> tuple[list[tuple[str, str]], str]:
    """What --text_column says: pairs of a pattern of files and their column, and the column of all others.

    The first pattern that matches a file counts. Raises UserError if one would never count, because of those before it
    or because it matches no file, or if there are two columns for all others.
    """
    named = [re.fullmatch(r"(.*?[.*][^:]*):(.+)", each) or each for each in given.split(",")]
    if not any(isinstance(each, re.Match) for each in named):  # a column's name may have a comma
        return [], given
    patterns = [each.groups() for each in named if isinstance(each, re.Match)]
    others = [each for each in named if isinstance(each, str)]
    if len(others) > 1:
        raise UserError(
            f"--text_column={given} names {len(others)} columns for the same files: give one, and FILE:COLUMN for files"
            " that have another"
        )
    for number, (pattern, _) in enumerate(patterns):
        matched = [file for file in files if file.match(pattern)]
        if matched and all(any(file.match(before) for before, _ in patterns[:number]) for file in matched):
            raise UserError(
                f"--text_column={given} names {pattern!r}, whose files have a column by what is before it: put"
                f" {pattern!r} first"
            )
        if not matched:
            there = [file.name for file in files if kind(file) in tables.KINDS]
            tell = f"the tables are {', '.join(there[:SHOWN])}" if there else "there is no table"
            raise UserError(f"--text_column={given} names {pattern!r}, which no file matches: {tell}")
    return patterns, others[0] if others else "text"
