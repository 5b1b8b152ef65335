"""Files that are whole or not there."""

import contextlib
import os
import pathlib
import tempfile

from parts.errors import UserError


@contextlib.contextmanager
def atomic(path, mode="wb"):
    """Open a file to write that takes its name `path` only once it is complete and on the disk.

    Killed at any instant, `path` holds what it held before. Raises UserError where the disk is full or refuses.
    """
    path = pathlib.Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(mode, dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # temporary files are private: take what open() would have given
        os.replace(temporary, path)
    except BaseException as error:
        if temporary:
            pathlib.Path(temporary).unlink(missing_ok=True)
        # torch.save reports a full disk as a RuntimeError of its own
        if isinstance(error, OSError) or "PytorchStreamWriter" in str(error) or "write file" in str(error):
            kept = "what it held before is kept" if path.exists() else "nothing was written"
            reason = getattr(error, "strerror", None) or "the disk is full or refuses"
            raise UserError(f"cannot write {path}: {reason}; {kept}. Free some space or name another folder") from error
        raise


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
