"""Which files --input names, alone or in folders, and what --text_column and --encoding say of some of them."""

import os
import pathlib
import re
from collections.abc import Sequence

from fusedgpt.errors import UserError

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


def kind(path: pathlib.Path) -> str | None:
    """The suffix of a file's name, if it is in KINDS; otherwise None. A further suffix of PACKED does not count."""
    name = path.name.lower()
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    return next((each for each in KINDS if name.endswith(each)), None)


def name_of(path: pathlib.Path) -> str:
    """The name of a file or folder; "." has the name of the current folder."""
    return os.path.basename(os.path.abspath(path))


def stamp(path: pathlib.Path) -> list:
    """A file's path, size and time: a preparation with another stamp is another one."""
    return [str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns]


def require_readable(path: pathlib.Path) -> None:
    """Raise UserError if `path` is missing, or is a pipe or a device, which cannot be read twice."""
    if not path.exists():
        how = "name a local file or folder"
        if str(path).startswith(("http:", "https:")):
            how = "download it first, and name the file"
        elif "*" in path.name:
            how = "leave out the quotation marks, so that the shell names the files"
        raise UserError(f"--input={path} does not exist: {how}")
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"--input={path} is a pipe or a device: write its content to a file and name that")


def found(paths: Sequence[pathlib.Path], out_dir: pathlib.Path) -> list[pathlib.Path]:
    """The files to read, of those that `paths` name or contain. Prints what is left out.

    Left out of folders are hidden files, files of other kinds, and the meta.json of data sets, as in `out_dir`. Raises
    UserError if there is nothing to read.
    """
    files, left_out = {}, 0
    for path in paths:
        require_readable(path)
        for file in [path] if path.is_file() else _inside(path, out_dir):
            if (file == path or (kind(file) and file.is_file())) and file.stat().st_size:
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


def _inside(folder, out_dir):
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
        if real == os.path.realpath(out_dir) or "train.bin" in names:
            names = [name for name in names if name != "meta.json"]
        files += [pathlib.Path(root, name) for name in names if not name.startswith((".", "~$"))]
    return sorted(files)


def per_file(option: str, given: str | None, default: str | None, files: Sequence[pathlib.Path]) -> dict:
    """What an option says of each file: `VALUE`, or `FILE:VALUE` for files whose names the pattern FILE matches.

    Several have commas between them, and the first that matches counts. Raises UserError if a pattern matches no file.
    """
    pairs, others = re.findall(FOR_SOME, given or ""), re.sub(FOR_SOME, "", given or "").strip(",")
    values = dict.fromkeys(files, others or default)
    for pattern, value in reversed(pairs):
        matching = [file for file in files if file.match(pattern)]
        if not matching:
            names = ", ".join(file.name for file in files[:SHOWN])
            raise UserError(f"--{option}={given} names {pattern!r}, which no file matches: there are {names}")
        values |= dict.fromkeys(matching, value)
    return values
