"""What was chosen by timing on this machine, remembered in the user's cache, so that a command repeats itself.

Times are a matter of luck on a busy machine: without this file, the same command could take two kernels and end with
other weights. Each line of the file is a case (what was asked, for which shapes, on which machine, by which versions)
and what was chosen for it. Programs take turns to replace the file as a whole. A file that is damaged, or cannot be
written, costs no more than new timings.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
import time
from typing import Any

import torch

from fusedgpt import home
from fusedgpt.errors import UserError
from fusedgpt.machine import files
from fusedgpt.machine.environment import device_name, kernel_versions

MOST = 300  # cases that are kept, the latest ones; one takes about a kilobyte
LARGEST = 2**24  # bytes; a larger file is not ours
PATIENCE_S = 2.0  # wait so long for another program that writes the file
# what decides how fast a choice is, or what it computes; a choice of other code is not remembered
CODE = ("model.py", "fusedgpt/dimensions.py", "fusedgpt/eager.py", "fusedgpt/loss.py", "fusedgpt/rotary.py")
CODE += ("fusedgpt/machine/determinism.py", "fusedgpt/machine/device.py", "fusedgpt/machine/timing.py")
CODE += ("fusedgpt/training/tuning.py",)
CODE_FOLDERS = ("fusedgpt/attention", "fusedgpt/generation")


class Choices:
    """The remembered choices, for one program. `notes` says, a line each, what was wrong with their file.

    again: remember nothing of before, but replace it.
    """

    def __init__(self, again: bool = False):
        self.again, self.notes, self.path = again, [], _path()

    def recall(self, case: dict[str, Any]) -> dict[str, Any] | None:
        """What was chosen for `case`, with the minute as `when`; None if nothing was, or if all is timed anew."""
        if self.again:
            return None
        case = _as_read(case)
        found = [row for row in self._rows() if row["case"] == case]
        return {**found[-1]["choice"], "when": found[-1]["when"]} if found else None

    def remember(self, case: dict[str, Any], choice: dict[str, Any]) -> None:
        """Keep `choice` for `case` in place of an earlier one. If the file cannot be written, a note says why."""
        row = _as_read({"case": case, "choice": choice, "when": time.strftime("%Y-%m-%d %H:%M")})
        try:
            if not self.path:
                raise UserError("this user has no home folder: set XDG_CACHE_HOME")
            with _locked(self.path.parent):
                rows = [other for other in self._rows() if other["case"] != row["case"]][1 - MOST :]
                with files.atomic(self.path, "w") as file:
                    file.writelines(files.json_line({**each, "sum": _sum(each)}) for each in [*rows, row])
        except UserError as error:
            self._note(f"what auto chose is not remembered: {error}")

    def _rows(self):
        """The sound lines of the file, without their sums."""
        try:
            if not self.path or os.path.getsize(self.path) > LARGEST:
                raise OSError("it is too large to be a file of choices")
            rows = files.read_jsonl(self.path)
            with open(self.path, "rb") as file:
                lines = sum(1 for _ in file)
        except FileNotFoundError:
            return []
        except OSError as error:
            if self.path:
                self._note(f"{self.path} is ignored: {error.strerror or error}")
            return []
        sound = [row for row in rows if row.pop("sum", None) == _sum(row)]
        if len(sound) < lines:
            self._note(f"{lines - len(sound)} of {lines} lines of {self.path} are damaged, and ignored")
        return sound

    def _note(self, line):
        if line not in self.notes:
            self.notes.append(line)


def machine(device: torch.device) -> dict[str, Any]:
    """The part of a case that every choice on `device` depends on: processor, instructions, threads, versions."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **kernel_versions(device),
        "code": _code(),
    }


def _path():
    """The file of choices; None if the user has no cache folder."""
    folders = {"win32": "AppData/Local", "darwin": "Library/Caches"}
    named = os.environ.get("XDG_CACHE_HOME", "") or (sys.platform == "win32" and os.environ.get("LOCALAPPDATA", ""))
    try:
        # the rule of XDG: a path that is not absolute is to be ignored
        absolute = named and os.path.isabs(named)
        cache = pathlib.Path(named) if absolute else pathlib.Path.home() / folders.get(sys.platform, ".cache")
    except RuntimeError:
        return None
    return cache / "fusedgpt" / "choices.jsonl"


def _code():
    """A digest of the code that choices depend on."""
    package = pathlib.Path(__file__).resolve().parents[2]
    paths = [home.SCRIPTS / "model.py", *(package / name for name in CODE[1:])]
    paths += sorted(path for folder in CODE_FOLDERS for path in (package / folder).glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _as_read(value):
    """`value` as it comes back from the file: tuples as lists, NaN as None."""
    return json.loads(files.json_line(value))


def _sum(row):
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(folder):
    """The folder for this program alone. Raises UserError if another has it for PATIENCE_S, or it cannot be written."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            lock = files.lock(folder)
            break
        except UserError:
            if time.monotonic() > until or not os.access(folder, os.W_OK):
                raise
            time.sleep(0.05)
    with lock:
        yield
