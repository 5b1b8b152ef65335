"""Measure what each attention kernel gains on this machine: the experiments of two articles, one command each.

    python bench.py [KIND] [config/file.py ...] [--key=value ...] [--dry_run]
    python bench.py report FOLDER [FOLDER ...]          draw report.md and figures again
    python bench.py check FOLDER FOLDER                 do two folders, such as a published one and yours, say the same?
    python bench.py gpu                                 measure every kind, and run the tests that need a GPU (make gpu)
    python bench.py plan [config/file.py ...] [--key=value ...]   memory and time of a run on GPUs you do not have

KIND is ladder (PyTorch's article, rung by rung), sweep (attention over lengths), prefill (time to the first token),
numerics (errors against float64), max_batch (the largest micro-batch) or peers (beside transformers' GPT-2 and
nanoGPT); without KIND, two rungs of the ladder take turns for half a minute. --dry_run says what would be measured, and
for how long. Each kind has its own settings: python bench.py KIND --help. ladder, sweep and numerics also measure a
kernel of your own: --attention=path/to/file.py:function. The same command again adds what is missing, and more laps.
plan measures nothing: it computes.
"""

import difflib
import os
import pathlib
import sys

from fusedgpt.errors import UserError, one_sentence
from fusedgpt.home import as_called

if __name__ == "__main__" and sys.argv[1:2] in (["-h"], ["--help"], ["help"]):
    with one_sentence():
        sys.exit(print(as_called(__doc__)))  # before PyTorch, which takes seconds to import

if __name__ == "__main__":
    # Threads that wait actively lose a time slice at each barrier to whatever else runs: beside two busy programs a
    # call of attention took 32 ms in place of 0.6, and ratios were those of barriers. PyTorch reads it at its import
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from configurator import configure, separate
from fusedgpt import settings
from fusedgpt.bench import campaign, kinds, plan, report, rows
from fusedgpt.bench.options import admitted
from fusedgpt.machine import signals
from fusedgpt.machine.device import resolve_device

DRY_RUN = ("--dry_run", "--dry-run", "--dry_run=True")
BRIEF = ("--only=manual,flash", "--seconds=30")  # what the ladder is if no kind is named, as in nanoGPT's commands


def main(name: str, args: list[str]) -> None:
    """Say what the kind of benchmark `name` measures with its config files and flags, `args`, and measure it.

    However it ends, there is a report of what was measured. Raises UserError for bad input, and at the end if nothing
    could be measured.
    """
    dry, args = set(DRY_RUN) & set(args), [arg for arg in args if arg not in DRY_RUN]
    s, device = kinds.read_settings(name, args, __doc__)
    kind = kinds.KINDS[name]
    chosen = admitted(kind.comparisons(s, device), s.only)
    many = f"{len(chosen)} comparison{'s' * (len(chosen) > 1)} of {sum(len(each.names) for each in chosen)} contenders"
    turns = f", which take turns for {s.seconds:g} s at most in each, once they are built" * bool(kind.TURN)
    print(f"{name}, on {device}: {many}{turns}")
    if dry:
        for each in chosen:
            print(*each.workload.values(), ", ".join(each.names), sep=" | ")
        return
    folder = pathlib.Path(s.results) / name
    try:
        kinds.measure(name, [name, *args], s, device, chosen, folder)
    finally:
        if (folder / "rows.jsonl").exists():
            print(f"wrote {', '.join(map(str, report.write(folder, kind.SHOWN)))}")
    if not any(result.measured for result in rows.results(rows.read(folder / "rows.jsonl")[1])):
        raise UserError(f"nothing of {name} could be measured: {folder / 'report.md'} gives the reasons")


def run_campaign(args: list[str]) -> None:
    """Run the tests for a GPU and every kind. Raises UserError if there is no GPU."""
    s = configure(campaign.Settings(), args, campaign.__doc__)
    print(campaign.run(s, resolve_device("cpu" if s.rehearse else "auto")))


def say_plan(args: list[str]) -> None:
    """Say what a run takes. Raises UserError if it does not fit; the message names the nearest settings that do."""
    s = configure(kinds.settings_class(plan)(**plan.DEFAULTS), args, __doc__, kinds.unused_settings("plan"))
    settings.validate(s)
    plan.answer(s, print)


def write_reports(args: list[str]) -> None:
    """Draw the report and figures of each folder again. Raises UserError if a folder has no rows of a benchmark."""
    folders, flags = separate(args)
    if not folders or flags:
        raise UserError("name the folder of a benchmark: python bench.py report FOLDER [FOLDER ...]")
    for folder in map(pathlib.Path, folders):
        name = rows.read(folder / "rows.jsonl")[0]["benchmark"]
        if name not in kinds.KINDS:
            raise UserError(f"this version has no benchmark {name!r}, only {', '.join(kinds.KINDS)}")
        print(f"wrote {', '.join(map(str, report.write(folder, kinds.KINDS[name].SHOWN)))}")


def check_folders(args: list[str]) -> None:
    """Say whether two folders agree. Raises UserError if they are not two of one kind."""
    folders, flags = separate(args)
    if len(folders) != 2 or flags:
        raise UserError("name two folders of one kind: python bench.py check results/cpu/ladder out-bench/ladder")
    print(*report.agreement(list(map(pathlib.Path, folders))), sep="\n")


COMMANDS = {"report": write_reports, "check": check_folders, "gpu": run_campaign, "plan": say_plan}


def parse(args: list[str]) -> tuple[str, list[str]]:
    """(kind or command, the other arguments): a brief ladder if the first is a flag, a config file or missing.

    Raises UserError if the first argument is no kind, command, flag or file.
    """
    names = [*kinds.KINDS, *COMMANDS]
    if args and args[0] in names:
        return args[0], args[1:]
    if not args or args[0].startswith("-") or args[0].endswith(".py") or os.path.exists(args[0]):
        return "ladder", [*BRIEF, *args]
    near = difflib.get_close_matches(args[0], names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it can be {', '.join(names)}"
    raise UserError(f"there is no benchmark {args[0]!r}: {hint}")


if __name__ == "__main__":
    # as Ctrl-C does, end as an exception does, so that contenders end and there is a report
    with one_sentence(), signals.handled_by(lambda number, frame: sys.exit(128 + number), signals.ENDING[1:]):
        name, args = parse(sys.argv[1:])
        if sys.argv[1:2] != [name]:
            print(f"no kind is named, so this is: python bench.py ladder {' '.join(args)}")
        if name in ("report", "check") and {"-h", "--help"} & set(args):
            sys.exit(print(as_called(__doc__)))
        if name in COMMANDS:
            COMMANDS[name](args)
        else:
            main(name, args)
