"""Train many runs that differ in what is varied and in nothing else; compare them seed by seed, and end with a verdict.

    python study.py config/train_shakespeare_cpu.py --learning_rate=4e-3,8e-3,1.2e-2 --optimizer=adamw,muon --seed=1,2,3
    python study.py config/quickstart.py --against=HEAD~1 --seed=1..5      did my change to the code help?
    python study.py config/quickstart.py --search='learning_rate=1e-3..2e-2:log, optimizer=adamw|muon' --trials=40
    python study.py report out-study                                       write the tables, figures and verdict again

Any setting of train.py takes several values: a,b,c, or 1..5 for whole numbers. Two settings vary together if they are
given as --learning_rate,min_lr=1e-3:1e-4,2e-3:2e-4. A config file may name variants of any settings:
variants = {"small": dict(n_layer=2), "large": dict(n_layer=8)}. Each run is train.py in a process of its own. To
continue a study that was broken off, give the same command again; with more seeds or values, these are added.
"""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a background job ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a run has begun, Ctrl-C ends the program at once

import dataclasses
import hashlib
import math
import os
import pathlib
import shlex
import time
from collections.abc import Iterator

from configurator import answer_help
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.studies import command

if __name__ == "__main__" and "report" not in sys.argv[1:2]:
    answer_help(command.settings_class()(), sys.argv[1:], __doc__, unused=command.SET_BY_THE_STUDY)

from fusedgpt.data import dataset
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.home import ROOT, SCRIPTS, as_called
from fusedgpt.machine import files
from fusedgpt.studies import design, outcomes, report, search, space, versions
from fusedgpt.studies.database import without_password
from fusedgpt.studies.design import Design
from fusedgpt.studies.progress import Progress, outlook
from fusedgpt.studies.runner import Runner, Stopped, order

WORKING_TREE = "working tree"


def main(args: list[str]) -> None:
    """Run the study that the command line asks for, and report it. Raises UserError for bad input."""
    began = time.monotonic()
    request = command.read(args, __doc__)
    s, folder = request.study, pathlib.Path(request.study.study_dir)
    if s.search:
        request = space.prepared(request)
    plan, code = plan_of(request, without_password(shlex.join(["python", "study.py", *args])))
    plan = design.continued(plan, folder, (folder / "verdict.json").exists(), named=s.baseline is not None)
    left = [job for job in order(plan) if not outcomes.is_over(folder, job)]
    if len(plan.seeds) == 1:
        print("one seed decides nothing: with --seed=1..5 the verdict has intervals")
    if s.search:
        left = search.left(plan, folder, s.trials)
    if s.dry_run:
        return print(outlook(plan, folder, code, left, s.jobs))
    if s.search or s.storage:
        search.run(request, plan, folder, SCRIPTS, began + 60 * (s.max_minutes or math.inf))
        with search.turn(folder):
            return conclude(folder, s.fail_unless)
    with files.lock(folder) as lock:
        plan.save(folder)
        progress = Progress(plan, folder, done=len(order(plan)) - len(left))
        runner = Runner(plan, folder, code, lock, progress.say)
        try:
            for job in runner.run(left, s.jobs, began + 60 * (s.max_minutes or math.inf)):
                progress.ended(job)
        finally:
            progress.close()
        conclude(folder, s.fail_unless)


def plan_of(request: command.Request, line: str) -> tuple[Design, dict[str, pathlib.Path]]:
    """The design of a study, and the folder of the code that runs each of its variants.

    line: the command line. Raises UserError if the data or the other version are missing.
    """
    s = request.study
    names = {changes.get("dataset", request.shared.dataset) for changes in request.variants.values()}
    folders = {name: dataset.find_folder(ROOT, name).resolve() for name in sorted(names)}
    metas = {name: dataset.read_meta(path) for name, path in folders.items()}
    if s.metric == "bits_per_byte":
        for meta in metas.values():
            Tokenizer(meta).byte_lengths()  # raises if a loss cannot be turned into bits per byte
    data = {f"{name}/{split}": digest for name, path in folders.items() for split, digest in digests(path, metas[name])}
    runs = [dataclasses.asdict(request.shared) | changes for changes in request.variants.values()]
    if s.search and "attention" in (axes := space.parse(s.search, request.shared)):
        runs += [{"attention": kernel} for kernel in axes["attention"].values]
    data |= versions.inputs(runs)
    how = dict(command=line, code=versions.digest(SCRIPTS), data=data, threads=threads(s.jobs))
    if not s.against:
        plan = design.of(request, "search" if s.search else "grid", **how)
        return plan, dict.fromkeys(plan.variants, SCRIPTS)
    if any(request.variants.values()):
        raise UserError("--against compares two versions of the code: leave the settings the same, with one value each")
    sha = versions.commit_of(SCRIPTS, s.against)
    there = versions.check_out(SCRIPTS, sha, pathlib.Path(s.study_dir) / "code" / sha[:7])
    shared = dataclasses.replace(request.shared, dataset=str(folders[request.shared.dataset]))  # data are not in git
    arms = {sha[:7]: {}, WORKING_TREE: {}}
    plan = design.of(dataclasses.replace(request, shared=shared, variants=arms), "against", **how)
    weights = versions.initial_weights(there, SCRIPTS, versions.flags_for(plan.settings | {"seed": plan.seeds[0]}))
    plan.against = {"ref": s.against, "commit": sha, "initial_weights": weights}
    return plan, {sha[:7]: there, WORKING_TREE: SCRIPTS}


def digests(folder: pathlib.Path, meta: dict) -> Iterator[tuple[str, str]]:
    """(split, a digest of its length and of a sample of its ids): a meta.json may be absent, or of earlier bins.

    Raises UserError if a bin is missing.
    """
    for split in dataset.SPLITS:
        file = dataset.TokenFile(folder, split, meta)
        yield split, f"{len(file)} {hashlib.sha256(file.sample().tobytes()).hexdigest()}"


def threads(jobs: int) -> int | None:
    """The CPU threads of each run if `jobs` run at once; None if one runs alone, which may choose."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // jobs) if jobs > 1 else None


def conclude(folder: pathlib.Path, fail_unless: str | None = None) -> None:
    """Write the report of a study, and say its verdict.

    Ends the script with status 1 if `fail_unless` is "better" and no variant is. Raises UserError if no run finished.
    """
    results = outcomes.read(folder)
    missing = [each for each in results.outcomes if each.status == "missing"]
    if len(missing) == len(results.outcomes):
        raise UserError(f"no run of the study in {folder} has ended yet: give its command again")
    paths = report.write(folder)
    print((folder / "table.md").read_text(encoding="utf-8"))
    said = search.sentences(results) if results.design.kind == "search" else results.sentences()
    for line in (*results.warnings(), *said):
        print(line)
    print(f"wrote {paths[-1]}, and tables and figures beside it")
    if fail_unless and not any(each.word == fail_unless for each in results.comparisons()):
        sys.exit(f"error: no variant is {fail_unless} than {results.design.baseline}")


if __name__ == "__main__":
    with one_sentence():
        if sys.argv[1:2] == ["report"]:
            if {"-h", "--help"} & set(sys.argv):
                sys.exit(print(as_called(__doc__)))
            if len(sys.argv) != 3:
                raise UserError("name the folder of a study: python study.py report FOLDER")
            conclude(pathlib.Path(sys.argv[2]))
        else:
            try:
                main(sys.argv[1:])
            except Stopped as stopped:
                print("stopped: the runs have saved. Give the same command to go on", file=sys.stderr)
                sys.exit(128 + stopped.number)
