"""Files that are either complete or absent."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import IO

from fusedgpt.errors import UserError


@contextlib.contextmanager
def atomic(path: str | os.PathLike, mode: str = "wb") -> Iterator[IO]:
    """Open a file for writing that gets its name `path` only once it is complete and on the disk.

    If the process is killed, `path` keeps its old content; the next write replaces the temporary file that was left.
    Raises UserError if the disk is full or cannot be written.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name with no content
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            kept = "what it held before is kept" if path.is_file() else "nothing was written"
            raise UserError(
                f"cannot write {path}: {error.strerror or error}; {kept}. Make room, or name another folder"
            ) from error
        raise


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """The objects of a JSON lines file. A line that a kill cut short is left out."""
    rows = []
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
