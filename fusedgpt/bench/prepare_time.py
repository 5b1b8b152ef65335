"""data/text/prepare.py, the whole command, on a text of some size and on some of the cores, for growth.py."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable

import numpy as np

from fusedgpt.bench import child
from fusedgpt.bench.proof import ParityError
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.home import SCRIPTS
from fusedgpt.machine.timing import summary

COMPARED = 1000  # ids that must give the beginning of the text


def counts_of_cores() -> list[int]:
    """1, 2, 4, … and all cores of this process; [] if the system cannot keep a process to some of them."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    every = len(os.sched_getaffinity(0))
    return sorted({2**n for n in range(every.bit_length())} | {every})


def run(megabytes: float, cores: int | None, tokenizer: str, folder: pathlib.Path) -> dict:
    """Time one call in ms, on `cores` cores or on all. Its files go to `folder`, and are removed.

    Raises ChildProcessError with the script's last sentence, MemoryError, RuntimeError if it failed otherwise, and
    ParityError if its ids are not those of the text.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        text, out_dir = pathlib.Path(temporary, "text.txt"), pathlib.Path(temporary, "out")
        size = write_library(text, megabytes)
        script, flags = SCRIPTS / "data" / "text" / "prepare.py", [f"--input={text}", f"--out_dir={out_dir}"]
        command = [sys.executable, script, *flags, f"--tokenizer={tokenizer}"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_kept_to(cores))
        ms = 1e3 * (time.perf_counter() - began)
        if done.returncode:
            raise child.error_of(done, "data/text/prepare.py")
        proof = same_text(text, out_dir)
    return {"parity": proof, "megabytes": size / 1e6, "samples_ms": [ms], **summary([ms])}


def _kept_to(cores) -> Callable[[], None] | None:
    if cores is None:
        return None
    some = sorted(os.sched_getaffinity(0))[:cores]
    return lambda: os.sched_setaffinity(0, some)


def write_library(path: pathlib.Path, megabytes: float) -> int:
    """Write the modules of Python's standard library, again and again, until they are so many MB; returns the bytes."""
    files, size = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")), 0
    with open(path, "wb") as out:
        for file in itertools.cycle(files):
            size += out.write(file.read_text(encoding="utf-8", errors="ignore").encode())
            if size >= 1e6 * megabytes:
                return size


def same_text(text: pathlib.Path, out_dir: pathlib.Path) -> str:
    """A sentence if the first ids in `out_dir` are the beginning of `text`; otherwise it raises ParityError."""
    meta = json.loads((out_dir / "meta.json").read_text(encoding="utf-8"))
    ids = np.fromfile(out_dir / "train.bin", meta["dtype"], COMPARED).tolist()
    got = Tokenizer(meta).decode(ids)
    with open(text, "rb") as file:
        if file.read(len(got)) != got:
            raise ParityError(f"its first {len(ids)} ids are not the beginning of the text")
    return f"passed: its first {len(ids)} ids are the beginning of the text"
