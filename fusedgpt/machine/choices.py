"""What was chosen by timing on this machine, remembered in the user's cache, so that a command repeats itself.

Times are a matter of luck on a busy machine: without this file, the same command could take two kernels and end with
other weights. Each line of the file is a case (what was asked, for which shapes, on which machine, by which versions)
and what was chosen for it. A later line replaces an earlier one. Without the file, all is timed anew.
"""

import hashlib
import json
import os
import pathlib
import time
from typing import Any

import torch

from fusedgpt import home
from fusedgpt.machine import files
from fusedgpt.machine.environment import device_name, kernel_versions


class Choices:
    """The remembered choices, for one program. `notes` says why one was not remembered.

    again: recall nothing, but remember what is timed now.
    """

    def __init__(self, again: bool = False):
        self.again, self.notes = again, []

    def recall(self, case: dict[str, Any]) -> dict[str, Any] | None:
        """What was chosen for `case`, with the minute as `when`; None if nothing was, or if all is timed anew."""
        found = []
        if not self.again and path().is_file():
            found = [row for row in files.read_jsonl(path()) if row.get("case") == _as_read(case)]
        return {**found[-1]["choice"], "when": found[-1]["when"]} if found else None

    def remember(self, case: dict[str, Any], choice: dict[str, Any]) -> None:
        """Keep `choice` for `case`. If the file cannot be written, a note says why."""
        row = {"case": case, "choice": choice, "when": time.strftime("%Y-%m-%d %H:%M")}
        try:
            path().parent.mkdir(parents=True, exist_ok=True)
            lines = files.Lines(path())
            lines.add(files.json_line(row))
            lines.close()
        except OSError as error:
            self.notes.append(f"what auto chose is not remembered: {error}. Set XDG_CACHE_HOME to another folder")


def path() -> pathlib.Path:
    """The file of choices."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(cache) / "fusedgpt" / "choices.jsonl"


def machine(device: torch.device) -> dict[str, Any]:
    """The part of a case that every choice on `device` depends on: processor, instructions, threads, versions, code."""
    package = pathlib.Path(__file__).parents[1]
    code = [home.SCRIPTS / "model.py", *sorted(package.glob("**/*.py"))]
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **kernel_versions(device),
        "code": hashlib.sha256(b"\0".join(path.read_bytes() for path in code)).hexdigest()[:16],
    }


def _as_read(value):
    """`value` as it comes back from the file: tuples as lists, NaN as None."""
    return json.loads(files.json_line(value))
