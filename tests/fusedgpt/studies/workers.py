"""Workers of a search as study.py starts them, but with another train.py and heartbeats that a test can wait for.

python -m tests.fusedgpt.studies.workers FOLDER CODE FLAG...
"""

import os
import pathlib
import subprocess
import sys

from fusedgpt.errors import one_sentence
from fusedgpt.machine import files
from fusedgpt.studies import command, design, outcomes, search
from fusedgpt.studies.runner import Runner

ROOT = pathlib.Path(__file__).resolve().parents[3]


def work(folder: pathlib.Path, code: pathlib.Path, *flags: str) -> outcomes.Results:
    """Do what study.py does with these flags; what the folder then has. code: the folder of train.py."""
    settings = (f"--study_dir={folder}", "--learning_rate=1e-3", "--min_lr=0", "--max_iters=27")
    settings += ("--eval_interval=3", "--seed=1")
    given = {flag.partition("=")[0]: flag for flag in (*settings, *flags)}
    request = search.prepared(command.read([*given.values()], "a study"))
    line = "python study.py config/a.py " + search.without_password(" ".join(f"'{flag}'" for flag in flags))
    plan = design.of(request, "search", line, {}, {}, None)
    plan.settings.pop("dataset")  # the fake train.py reads none
    with files.lock(folder, shared=bool(request.study.storage)) as lock:
        plan = design.continued(plan, folder)
        own = Runner(plan, folder, {"working tree": code}, lock, print)
        search.run(request, own)
    return outcomes.read(folder)


def start(folder: pathlib.Path, code: pathlib.Path, *flags: str, pause: float = 0.02) -> subprocess.Popen:
    """Start a worker. pause: seconds that a step of the fake train.py takes."""
    command = [sys.executable, "-m", "tests.fusedgpt.studies.workers", folder, code, *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=os.environ | {"FAKE_PAUSE": str(pause)}, cwd=ROOT, **pipes)


def main(folder: pathlib.Path, code: pathlib.Path, *flags: str) -> None:
    """Work as a worker in a process of its own does. Its trial is queued again 4 seconds after it died."""
    search.HEARTBEAT_S, search.GRACE_S, search.NAP_S = 1, 4, 0.1
    with one_sentence():
        work(pathlib.Path(folder), pathlib.Path(code), *flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
