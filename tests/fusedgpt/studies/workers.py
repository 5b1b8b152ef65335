"""Workers of a study as study.py starts them, but with another train.py and heartbeats that a test can wait for.

python -m tests.fusedgpt.studies.workers FOLDER CODE FLAG...
"""

import math
import os
import pathlib
import subprocess
import sys

from fusedgpt.errors import one_sentence
from fusedgpt.studies import command, database, design, outcomes, search, space

ROOT = pathlib.Path(__file__).resolve().parents[3]


def work(folder: pathlib.Path, code: pathlib.Path, *flags: str, deadline: float = math.inf) -> outcomes.Results:
    """Do what study.py does with these flags; what the folder then has. code: the folder of train.py."""
    settings = (
        f"--study_dir={folder}",
        "--learning_rate=1e-3",
        "--min_lr=0",
        "--max_iters=27",
        "--eval_interval=3",
        "--seed=1",
    )
    given = {flag.partition("=")[0]: flag for flag in (*settings, *flags)}
    request = command.read(list(given.values()), "a study")
    if request.study.search:
        request = space.prepared(request)
    line = "python study.py config/a.py " + database.without_password(" ".join(f"'{flag}'" for flag in flags))
    plan = design.of(request, "search" if request.study.search else "grid", line, "", {}, None)
    search.run(request, design.continued(plan, folder, looked=False), folder, code, deadline)
    return outcomes.read(folder)


def start(folder: pathlib.Path, code: pathlib.Path, *flags: str, pause=0.02, patience=3) -> subprocess.Popen:
    """Start a worker. pause: seconds that a step of the fake train.py takes. patience: seconds to wait for a server.

    A trial of a worker that has died is queued again after 2 seconds more.
    """
    command = [sys.executable, "-m", "tests.fusedgpt.studies.workers", folder, code, *flags]
    environment = os.environ | {"FAKE_PAUSE": str(pause), "PATIENCE": str(patience)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)


def finish(workers: list[subprocess.Popen], timeout: float = 120) -> list[str]:
    """Wait for workers to end well; what each said."""
    said = [each.communicate(timeout=timeout)[0] for each in workers]
    for each, text in zip(workers, said):
        assert each.returncode == 0, text
    return said


def main(folder: pathlib.Path, code: pathlib.Path, *flags: str, patience: int = 3) -> None:
    """Work as a worker in a process of its own does."""
    database.PATIENCE_S = patience
    database.HEARTBEAT_S, database.GRACE_S = 1, database.PATIENCE_S + 2
    search.NAP_S, search.LOOK_S = 0.1, 0.02
    with one_sentence():
        work(pathlib.Path(folder), pathlib.Path(code), *flags)


if __name__ == "__main__":
    main(*sys.argv[1:], patience=int(os.environ["PATIENCE"]))
