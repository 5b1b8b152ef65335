"""Files that are whole or not there."""

import contextlib
import json
import os
import pathlib

from parts.errors import UserError


@contextlib.contextmanager
def atomic(path, mode="wb"):
    """Open a file to write that takes its name `path` only once it is complete and on the disk.

    Killed at any instant, `path` holds what it held before; what the kill left behind, the next write replaces.
    Raises UserError where the disk is full or refuses.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
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


def read_jsonl(path):
    """The objects of a file of one a line, without a line that a kill cut off."""
    rows = []
    for line in pathlib.Path(path).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
