"""Train many runs that differ in what is varied and in nothing else; compare them seed by seed, and end with a verdict.

    python study.py config/train_shakespeare_cpu.py --learning_rate=4e-3,8e-3,1.2e-2 --optimizer=adamw,muon --seed=1,2,3
    python study.py config/quickstart.py --against=HEAD~1 --seed=1..5      did my change to the code help?
    python study.py config/quickstart.py --search='learning_rate=1e-3..2e-2:log, optimizer=adamw|muon' --trials=40
    python study.py report out-study [out-larger ...]       write tables, figures, verdict again; of several one figure

Any setting that changes what a run learns takes several values: a,b,c, or 1..5 for whole numbers. Two vary together if
they are given as --learning_rate,min_lr=1e-3:1e-4,2e-3:2e-4. A config file may name variants of any settings:
variants = {"small": dict(n_layer=2), "large": dict(n_layer=8)}. Each run is train.py in a process of its own. The plan
is fixed by the first run; what is changed after it is exploratory. To continue a study that was broken off, give the
same command again.
"""

import dataclasses
import os
import pathlib
import shlex
import sys

from configurator import answer_help, separate
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.studies import command

if __name__ == "__main__" and "report" not in sys.argv[1:2]:
    answer_help(command.AllSettings(), sys.argv[1:], __doc__, unused=command.SET_BY_THE_STUDY)

from tqdm import tqdm

from fusedgpt.data import dataset
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.home import SCRIPTS
from fusedgpt.machine import files
from fusedgpt.studies import design, outcomes, runner, search, step_time, study_report, versions
from fusedgpt.studies.design import Design
from fusedgpt.studies.runner import Roots, Runner, order

WORKING_TREE = "working tree"


def main(args: list[str]) -> None:
    """Run the study that the command line asks for, and report it. Raises UserError for bad input."""
    request = command.read(args, __doc__)
    s, folder = request.study, pathlib.Path(request.study.study_dir)
    if s.search:
        request = search.prepared(request)
    configs, flags = separate(args)
    new, roots = plan_of(request, search.without_password(shlex.join(["python", "study.py", *configs, *flags])))
    with files.lock(folder, shared=bool(s.storage)) as lock:
        plan = design.continued(new, folder, s.baseline)
        if not design.has_begun(folder):
            plan.diff = versions.save_diff(SCRIPTS, folder / "working-tree.diff")
        plan.save(folder)
        own = Runner(plan, folder, roots, lock, tqdm.write)
        if s.search:
            search.run(request, own)
        else:
            time_steps(plan, roots, folder)
            train(own, s.jobs)
        conclude(folder)


def plan_of(request: command.Request, line: str) -> tuple[Design, Roots]:
    """The design of a study, and its versions of the code. line: the command line.

    Raises UserError if the data or the other version are missing.
    """
    s, roots, against = request.study, {WORKING_TREE: SCRIPTS}, None
    if s.against:
        if any(request.variants.values()):
            raise UserError("--against compares two versions of the code: leave the settings the same, one value each")
        name, there, against = versions.other(SCRIPTS, s.against, pathlib.Path(s.study_dir) / "code")
        roots = {name: there} | roots
        folder = dataset.find_folder(request.shared.dataset).resolve()  # data are not in git
        own = dataclasses.replace(request.shared, dataset=str(folder))
        request = dataclasses.replace(request, shared=own, variants={name: {}, WORKING_TREE: {}})
    shared = dataclasses.asdict(request.shared)
    runs = [shared | changes for changes in request.variants.values()]
    if s.metric == "bits_per_byte":
        for name in {run["dataset"] for run in runs}:
            Tokenizer(dataset.read_meta(dataset.find_folder(name))).byte_lengths()  # raises if it has none
    code = {name: versions.digest(root) for name, root in roots.items()}
    kind = next((name for name in ("against", "search") if getattr(s, name)), "grid")
    plan = design.of(request, kind, line, code, versions.data(runs), threads(s.jobs))
    plan.against = against
    return plan, roots


def threads(jobs: int) -> int | None:
    """The CPU threads of each run if `jobs` run at once; None if one runs alone, which may choose."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // jobs) if jobs > 1 else None


def time_steps(plan: Design, roots: Roots, folder: pathlib.Path) -> None:
    """Time a step of each variant in turns, once, and say how many iterations fit into --minutes."""
    missing = [name for name in plan.variants if name not in plan.times]
    if missing and (len(plan.variants) > 1 or plan.minutes):
        plan.times |= step_time.measure(plan, missing, roots, folder)
        plan.save(folder)
    for name in plan.variants:
        if steps := plan.iterations(name):
            s, ms = plan.settings | plan.variants[name], plan.times[name]["ms"]
            never = ", all in the warm-up: lower warmup_iters" * (s["decay_lr"] and steps <= s["warmup_iters"])
            tqdm.write(f"{name}: {steps:,} iterations of {ms:.4g} ms are {ms * steps / 1e3:.3g} s of steps{never}")


def train(own: Runner, at_once: int) -> None:
    """Make the runs that are missing, look by look, until the verdict is decided."""
    plan = own.plan
    for look in plan.looks:
        seeds = set(plan.seeds[:look])
        left = outcomes.left(own.folder, [job for job in order(plan) if job[1] in seeds])
        with tqdm(total=len(left), disable=None, leave=False, unit="run", dynamic_ncols=True) as bar:
            for job in own.run(left, at_once):
                this = outcomes.outcome(plan, *job, outcomes.statuses(own.folder)[job])
                tqdm.write(f"{runner.name_of(job)} {this.status}: {this.why or f'{plan.metric} {this.value:.5g}'}")
                bar.update()
        results = outcomes.read(own.folder)
        if results.counted == look < plan.looks[-1] and results.decided:
            return tqdm.write(f"decided after {look} of {len(plan.seeds)} seeds: the others are not needed")


def conclude(folder: pathlib.Path) -> None:
    """Report a study, and say its verdict. Raises UserError if no run has ended."""
    results = outcomes.read(folder)
    if not any(o.row for o in results.outcomes):
        raise UserError(f"no run of the study in {folder} has ended, or outcomes.jsonl is gone: nothing to report")
    said = search.sentences(results) if results.design.kind == "search" else study_report.sentences(results)
    paths = study_report.write(results, said)
    print(study_report.markdown(results), "", *results.warnings(), *said, sep="\n")
    print(f"wrote {', '.join(map(str, paths))}")


if __name__ == "__main__":
    with one_sentence():
        if sys.argv[1:2] == ["report"]:
            folders = list(map(pathlib.Path, sys.argv[2:]))
            if not folders or sys.argv[2].startswith("-"):
                raise UserError("name the folder of a study: python study.py report FOLDER [FOLDER ...]")
            for folder in folders:
                conclude(folder)
            if len(folders) > 1:
                print(f"drew {study_report.side_by_side(folders)}")
        else:
            main(sys.argv[1:])
