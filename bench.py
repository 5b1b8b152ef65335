"""Measure what each attention kernel gains on this machine: the experiments of two articles, one command each.

    python bench.py [KIND] [config/file.py ...] [--key=value ...]
    python bench.py report FOLDER [FOLDER ...] [--format=pdf] [--title=TEXT]   draw report.md and figures again
    python bench.py check FOLDER [--key=value ...]      measure a published folder again here: do its claims hold?
    python bench.py gpu                                 measure every kind, and run the tests that need a GPU (make gpu)
    python bench.py plan [config/file.py ...] [--key=value ...]   memory and time of a run on GPUs you do not have

KIND is ladder (the default: PyTorch's article, rung by rung), sweep (attention over lengths), prefill (time to the
first token), numerics (errors against float64), max_batch (the largest micro-batch) or peers (beside transformers'
GPT-2 and nanoGPT). Each kind has its own settings: python bench.py KIND --help. ladder, sweep and numerics also measure
a kernel of your own: --attention=path/to/file.py:function. To continue an interrupted run, give the same command again.
plan measures nothing: it computes.
"""

import dataclasses
import difflib
import os
import pathlib
import sys

from fusedgpt.errors import UserError, one_sentence
from fusedgpt.home import as_called

if __name__ == "__main__" and sys.argv[1:2] in (["-h"], ["--help"]):
    with one_sentence():
        sys.exit(print(as_called(__doc__)))  # before PyTorch, which takes seconds to import

from configurator import answer_help, configure, separate
from fusedgpt import settings
from fusedgpt.bench import campaign, check, kinds, plan, report, rows
from fusedgpt.machine.device import resolve_device
from fusedgpt.machine.environment import environment


def main(name: str, args: list[str]) -> None:
    """Run the kind of benchmark `name` with its config files and flags, `args`.

    Raises UserError for bad input, and at the end if no row could be measured.
    """
    kind, (s, device) = kinds.KINDS[name], kinds.read_settings(name, args, __doc__)
    kinds.validate(kind, s)
    folder = pathlib.Path(s.results) / name
    kinds.measure(name, [name, *args], s, device, kinds.planned(name, s, device), folder)
    print(f"wrote {', '.join(map(str, report.write(folder, kind)))}")
    statuses = {line["status"] for line in report.read(folder)[1] if line["kind"] == "row"}
    if not statuses:
        raise UserError(f"max_seconds={s.max_seconds:g} was over before any row of {name}: give more seconds")
    if "measured" not in statuses:
        raise UserError(f"no row of {name} could be measured: {folder / 'report.md'} gives the reason for each")


def run_campaign(args: list[str]) -> None:
    """Run missing tests and rows; the last line says what is still missing. Raises UserError if there is no GPU."""
    s = configure(campaign.Settings(), args, campaign.__doc__)
    print(campaign.run(s, resolve_device("cpu" if s.rehearse else "auto"), kinds.left))


def say_plan(args: list[str]) -> None:
    """Say what a run takes. Raises UserError if it does not fit; the message names the nearest settings that do."""
    s = configure(kinds.settings_class(plan)(**plan.DEFAULTS), args, __doc__, kinds.unused_settings("plan"))
    settings.validate(s)
    plan.answer(s, print)


def write_reports(args: list[str]) -> None:
    """Draw the report and figures of each folder again. Raises UserError if a folder has no rows of a benchmark."""
    folders, flags = separate(args)
    s, folders = configure(report.Settings(), flags, report.__doc__), list(map(pathlib.Path, folders))
    if not folders:
        raise UserError("name the folder of a benchmark: python bench.py report FOLDER [FOLDER ...]")
    for folder in folders:
        header, _ = report.read(folder)
        print(f"wrote {', '.join(map(str, report.write(folder, kinds.kind_of(header), s.format, s.title)))}")


def check_folder(args: list[str]) -> None:
    """Measure the rows of a published folder again, with the settings of its header, and say which claims hold here.

    Raises UserError if the folder has no rows, if --only selects no claim, or if the new rows would go into it.
    """
    answer_help(check.Settings(), [arg for arg in args if arg.startswith("-")], check.__doc__)
    folders, flags = separate(args)
    asked, folders = configure(check.Settings(), flags, check.__doc__), list(map(pathlib.Path, folders))
    if len(folders) != 1:
        raise UserError("name one published folder: python bench.py check FOLDER")
    header, lines = report.read(folders[0])
    folder = pathlib.Path(asked.results) / folders[0].resolve().name
    if folder.resolve() == folders[0].resolve():
        raise UserError(f"{folder} is the published folder itself: name another for the new rows with --results")
    kind, name, there = kinds.kind_of(header), header["benchmark"], report.rows_in(lines)
    claims = check.published(kind, there, asked.only)
    wanted = {rows.key_of(row): row for claim in claims for row in claim.rows}
    try:
        s, device, assumed = kinds.published_settings(header, there)
        obstacles = check.obstacles(wanted, s, device, kind.plan(s, device))
    except UserError as error:  # for example, this machine has no GPU, or a value is no longer allowed
        assumed, obstacles = {}, dict.fromkeys(wanted, str(error))
    todo = check.measurable(claims, obstacles)
    print(check.outlook(claims, todo))
    here, machine = [], environment(resolve_device("auto"))["device"]
    if todo:
        s = dataclasses.replace(s, max_seconds=asked.max_seconds)
        kinds.measure(name, ["check", *args], s, device, list(map(rows.spec_of, todo)), folder)
        report.write(folder, kind)
        found = report.read(folder)
        here, machine = report.rows_in(found[1]), report.machine(*found, kind)
    verdicts = check.compare(claims, kind.claims(here), here, obstacles)
    print(*check.columns(verdicts), check.summary(verdicts), sep="\n")
    there_on = report.machine(header, lines, kind)
    print(f"wrote {check.write(folder, folders[0], verdicts, there_on, machine, assumed)}")


COMMANDS = {"report": write_reports, "check": check_folder, "gpu": run_campaign, "plan": say_plan}


def parse(args: list[str]) -> tuple[str, list[str]]:
    """(kind or command, the other arguments). The kind is ladder if the first argument is a flag, a file or missing.

    Raises UserError if the first argument is no kind, command, flag or file.
    """
    names = [*kinds.KINDS, *COMMANDS]
    if args and args[0] in names:
        return args[0], args[1:]
    if not args or args[0].startswith("-") or args[0].endswith(".py") or os.path.exists(args[0]):
        return "ladder", args
    near = difflib.get_close_matches(args[0], names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it can be {', '.join(names)}"
    raise UserError(f"there is no benchmark {args[0]!r}: {hint}")


if __name__ == "__main__":
    with one_sentence():
        name, args = parse(sys.argv[1:])
        if name == "report" and {"-h", "--help"} & set(args):
            sys.exit(print(as_called(__doc__)))
        if name in COMMANDS:
            COMMANDS[name](args)
        else:
            main(name, args)
