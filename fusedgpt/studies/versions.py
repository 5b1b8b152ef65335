"""Versions of the code, such as a git commit and the working tree, and digests of all that the runs of a study read.

`root` is the folder of a version: the one with its train.py.
"""

import contextlib
import functools
import hashlib
import io
import os
import pathlib
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from typing import Any

from fusedgpt import home
from fusedgpt.data import dataset
from fusedgpt.errors import UserError, shown
from fusedgpt.machine.files import atomic
from fusedgpt.studies.command import safe

# the code that a run of train.py executes
CODE = ("train.py", "model.py", "configurator.py", "fusedgpt/**/*.py")


def other(root: pathlib.Path, named: str, folder: pathlib.Path) -> tuple[str, pathlib.Path, dict[str, Any]]:
    """(name, root, record) of the version that --against=`named` means. A commit's code is unpacked in `folder`.

    The user's files, index and branches stay as they are. Raises UserError if there is no such version.
    """
    if named and (pathlib.Path(named) / "train.py").is_file():
        there = pathlib.Path(named).resolve()
        return safe(there.name), there, {"named": named, "commit": _said(there, "rev-parse", "HEAD")}
    sha = _said(root, "rev-parse", "--verify", "--end-of-options", f"{named}^{{commit}}")
    if not sha or not sha.isalnum():  # such as ^HEAD
        takes = "It takes the folder of a clone, a branch, a tag or a commit, such as HEAD~1"
        raise UserError(f"against={shown(named)} is no commit of {root}, by git. {takes}")
    there = (folder / sha[:7]).resolve()
    if not there.exists():
        folder.mkdir(parents=True, exist_ok=True)
        aside = pathlib.Path(tempfile.mkdtemp(dir=folder))  # a kill leaves no half of a version
        with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", sha))) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
            archive.extractall(aside)
        aside.replace(there)
    return sha[:7], there, {"named": named, "commit": sha}


def save_diff(root: pathlib.Path, path: pathlib.Path) -> str | None:
    """Write what the working tree in `root` has beyond its commit, new code too, as `git apply` takes it.

    Returns its SHA-256; None if there is nothing, or no work tree of its own. The folder of `path` is no part of it.
    """
    if not _said(root, "rev-parse", "HEAD"):
        return None
    left_out, here = [], path.parent.resolve()
    if here.is_relative_to(root.resolve()):
        left_out = [f":(exclude){here.relative_to(root.resolve())}"]
    with tempfile.TemporaryDirectory() as folder:
        aside = {"GIT_INDEX_FILE": os.path.join(folder, "index")}  # not the user's
        _git(root, "read-tree", "HEAD", **aside)
        # new code, of which it stores nothing, but no texts and no secrets
        _git(root, "add", "--intent-to-add", "*.py", **aside)
        diff = _git(root, "diff", "--binary", "HEAD", "--", ".", *left_out, **aside)
    if not diff:
        return None
    with atomic(path) as file:
        file.write(diff)
    return hashlib.sha256(diff).hexdigest()


def digest(root: pathlib.Path) -> str:
    """SHA-256 of the names and contents of the code that training runs, to tell whether it was changed."""
    patterns = CODE
    if home.INSTALLED:  # the scripts are inside the package
        root, patterns = root.parent, ("**/*.py",)
    return _digest({path.relative_to(root).as_posix(): path for pattern in patterns for path in root.glob(pattern)})


def data(runs: Iterable[dict[str, Any]]) -> dict[str, str]:
    """{what: SHA-256} of each split that `runs` with these settings read. Raises UserError if data are missing."""
    found = {}
    for name in sorted({run["dataset"] for run in runs if "dataset" in run}):
        folder = dataset.find_folder(name)
        meta = dataset.read_meta(folder)
        for split in dataset.SPLITS:
            dataset.TokenFile(folder, split, meta)  # raises if it is missing
            paths = [*folder.glob(f"{split}.bin"), *folder.glob(f"{split}_*.bin"), *folder.glob("meta.*")]
            found[f"{name}/{split}"] = _digest({path.name: path for path in paths})
    return found


def _digest(paths):
    found = hashlib.sha256()
    for name, path in sorted(paths.items()):
        now = path.stat()
        found.update(f"{name}\0{_of_file(path, now.st_size, now.st_mtime_ns)}\0".encode(errors="surrogateescape"))
    return found.hexdigest()


@functools.lru_cache(maxsize=10_000)  # data of many GB are read again only if they were touched
def _of_file(path, size, changed):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _said(root, *command):
    """What git says of `root`; None if it is no work tree of its own, because the one around it is another's."""
    with contextlib.suppress(UserError, OSError):
        top = _git(root, "rev-parse", "--show-toplevel").decode(errors="surrogateescape").rstrip("\n")
        if os.path.samefile(top, root):
            return _git(root, *command).decode().strip()
    return None


def _git(folder, *command, **variables):
    """What a git command in `folder` prints. Raises UserError with git's own words if it fails."""
    # no hook of the user's runs, and `git status` does not write to the index
    quiet = ("--no-optional-locks", "-c", f"core.hooksPath={os.devnull}")
    how = dict(stdin=subprocess.DEVNULL, capture_output=True, env=os.environ | variables)
    done = subprocess.run(["git", "-C", str(folder), *quiet, *command], check=False, **how)
    if done.returncode:
        raise UserError(f"git {command[0]} says: {' '.join(done.stderr.decode(errors='replace').split())}")
    return done.stdout
