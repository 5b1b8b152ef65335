"""Write files that are either complete or absent, or that grow by lines, and lock a folder."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import IO, Any

from fusedgpt.errors import UserError


@contextlib.contextmanager
def atomic(path: str | os.PathLike, mode: str = "wb", aside: str = "") -> Iterator[IO]:
    """Open a file for writing. It gets the name `path` only once it is complete and on the disk.

    A missing folder is made. aside: part of the temporary file's name, so that two processes that write the same `path`
    do not share it. Raises UserError if the disk is full or cannot be written.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}{aside}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # write names of files and folders that are not UTF-8 as escapes
        how = {} if "b" in mode else {"encoding": "utf-8", "errors": "backslashreplace"}
        temporary.unlink(missing_ok=True)
        with open(temporary, mode.replace("w", "x"), **how) as file:  # x: not through a link that a stranger put there
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut could leave the new name without content
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        advice = "make room, or name another folder that can be written; what was there before is kept"
        raise UserError(f"cannot write {path}: {error.strerror or error}: {advice}") from error


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to write, which gets the name `path` at the end of the `with` statement: it is complete or absent.

    Raises UserError if there is something at `path`, be it a link.
    """
    path = path.absolute()
    if os.path.lexists(path):
        raise UserError(f"{path} is there already: remove it, or name another folder")
    new = path.with_name(f".{path.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # left by a call that was killed
    new.mkdir(parents=True)
    try:
        yield new
        new.rename(path)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def lock(out_dir: str | os.PathLike, shared: bool = False) -> IO:
    """Take the folder for this process, until the returned file is closed. shared: for all processes that ask so.

    The system releases the folder when the process ends, however it ends. On Windows nobody is kept out. Raises
    UserError if another process has the folder.
    """
    path = pathlib.Path(out_dir) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab+", opener=_no_link)  # noqa: SIM115 (kept)
    try:
        import fcntl

        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.lockf(file, how | fcntl.LOCK_NB)  # unlike flock, not inherited by children; works over NFS
    except (BlockingIOError, PermissionError) as error:
        raise UserError(f"{out_dir} is in use by another run: wait for it to end, or name another folder") from error
    except (OSError, ImportError):
        pass  # a file system without locks, or Windows
    return file


def check_lock(file: IO | None) -> None:
    """Raise UserError if the folder of a lock was moved or removed, or has another: call it before each write."""
    with contextlib.suppress(OSError):
        if not file or os.path.samefile(file.name, file.fileno()):  # None: only another rank writes
            return
    how = "nothing was written since: go on in the folder with its present name"
    folder = os.path.dirname(file.name)
    raise UserError(f"{folder} was removed or moved, or its .lock replaced, while it was in use, and {how}")


def _no_link(path, flags):
    """Open `path` unless it is a symbolic link, which in a folder from a stranger may name any file of this machine."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # Windows has no such flag


def link(path: str | os.PathLike, name: str | os.PathLike) -> None:
    """Give the file `path` a second `name`: a hard link, or a copy where that fails. Replaces an older `name`.

    A link is as good as a copy, because `atomic` replaces files. Raises UserError if the disk refuses.
    """
    aside = pathlib.Path(name).with_name(".link.tmp")  # always this name, so that the next link removes a leftover
    with contextlib.suppress(OSError):
        aside.unlink(missing_ok=True)
        os.link(os.path.realpath(path), aside)  # a relative symbolic link would name another file there
        os.replace(aside, name)
        aside.unlink(missing_ok=True)  # os.replace does nothing if both names are of one file already
        return
    with atomic(name) as copy, open(path, "rb") as file:
        shutil.copyfileobj(file, copy)


def json_line(content: dict[str, Any]) -> str:
    """`content` as a line of strict JSON. NaN and infinity become null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return json.dumps(finite) + "\n"


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """The objects of a JSON lines file. Lines that are cut short or are no object are left out."""
    rows, names = [], {}  # equal names are one string: a row takes half the memory
    decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: {names.setdefault(n, n): v for n, v in pairs})
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                rows.append(decoder.decode(line))
    return [row for row in rows if isinstance(row, dict)]


class Lines:
    """A file that grows by whole lines. Lines that cannot be written wait in memory until the next one is added."""

    def __init__(self, path: str | os.PathLike):
        self.path, self.pending = pathlib.Path(path), bytearray()
        # unbuffered: a kill loses no line
        self.file = open(self.path, "ab+", buffering=0, opener=_no_link)  # noqa: SIM115 (kept)
        if end := self.file.tell():
            self.file.seek(end - 1)
            if self.file.read() != b"\n":  # a full disk tore it: a line behind it would be damaged with it
                self.pending += b"\n"

    def add(self, line: str) -> None:
        """Append the pending lines and this one. Raises OSError if the disk refuses; none is lost."""
        self.pending += line.encode()
        self.flush()

    def flush(self) -> None:
        """Write what is pending. Raises OSError if the disk refuses."""
        while self.pending:
            del self.pending[: self.file.write(self.pending)]  # a disk that fills up writes only a part
