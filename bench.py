"""Measure what each attention kernel gains on this machine: the experiments of two articles, one command each.

    python bench.py [KIND] [config/file.py ...] [--key=value ...]
    python bench.py report FOLDER [FOLDER ...]          draw report.md and figures again from rows.jsonl
    python bench.py check FOLDER [--key=value ...]      measure a published folder again here: do its claims hold?
    python bench.py gpu                                 run the tests that need a GPU, then every kind (make gpu)
    python bench.py plan [config/file.py ...] [--key=value ...]   memory and time of a run on GPUs you do not have

KIND is ladder (the default: PyTorch's article, rung by rung), sweep (attention over lengths), prefill (time to the
first token), numerics (errors against float64), max_batch (the largest micro-batch), peers (beside transformers'
GPT-2 and nanoGPT) or anatomy (where a training step's time goes). Each kind has its own settings: python bench.py KIND
--help. To continue an interrupted run, give the same command again. plan measures nothing: it computes.
"""

import dataclasses
import datetime
import difflib
import functools
import math
import os
import pathlib
import shlex
import statistics
import subprocess
import sys

if __name__ == "__main__" and sys.argv[1:2] in (["-h"], ["--help"]):
    sys.exit(print(__doc__))  # before the slow import of PyTorch, which KIND --help needs for this machine's defaults

from configurator import adopt, configure, subclass
from fusedgpt import files, memory, settings, timing
from fusedgpt.bench import (
    anatomy,
    campaign,
    check,
    ladder,
    max_batch,
    numerics,
    peers,
    plan,
    plan_sweep,
    prefill,
    report,
    rows,
    sweep,
    training,
)
from fusedgpt.bench.settings import EARLIER, admitted
from fusedgpt.device import resolve_device
from fusedgpt.environment import environment, machine_state
from fusedgpt.errors import UserError, one_sentence

ROOT = pathlib.Path(__file__).resolve().parent
KINDS = {"ladder": ladder, "sweep": sweep, "prefill": prefill, "numerics": numerics, "max_batch": max_batch}
KINDS |= {"peers": peers, "anatomy": anatomy}
TAKE_SETTINGS = KINDS | {"plan": plan}
NOT_IDENTITY = ("results", "only", "profile", "max_seconds")  # settings that do not change what a row measures


def settings_class(kind) -> type:
    """The dataclass of a kind's settings; it has those of train.py too if the kind's rows run train.py."""
    return subclass([], kind.Settings, settings.Settings) if kind.TRAINS else kind.Settings


def unused_settings(name: str) -> dict[str, str]:
    """{setting: why} for each setting of train.py or another kind that the kind `name` does not use."""
    own = {field.name for field in dataclasses.fields(settings_class(TAKE_SETTINGS[name]))}
    every = {f.name for kind in TAKE_SETTINGS.values() for f in dataclasses.fields(kind.Settings)}
    every |= {field.name for field in dataclasses.fields(settings.Settings)}
    unused = {setting: f"bench.py {name} does not use it" for setting in every - own}
    unused["real_data"] = "a benchmark trains on the tokens of --dataset, and peers' steps on random ids"  # nanoGPT's
    return unused | TAKE_SETTINGS[name].UNUSED


def read_settings(name: str, args: list[str]):
    """(settings, device) of the kind `name`: defaults that suit this machine, then config files, then flags."""
    kind, unused = KINDS[name], unused_settings(name)
    asked = [arg for arg in args if arg not in ("-h", "--help")]
    device = resolve_device(configure(settings_class(kind)(), asked, __doc__, unused).device)
    defaults = settings_class(kind)(**kind.defaults(device.type == "cuda"))
    return configure(defaults, args, __doc__, unused), device


def main(name: str, args: list[str]) -> None:
    """Run the kind of benchmark `name` with `args`, its config files and flags.

    Raises UserError for bad input, and at the end if no row could be measured.
    """
    kind, (s, device) = KINDS[name], read_settings(name, args)
    validate(kind, s)
    folder = pathlib.Path(s.results) / name
    measure(name, [name, *args], s, device, planned(name, s, device), folder)
    print(f"wrote {', '.join(map(str, report.write(folder, kind)))}")
    measured = [line["status"] == "measured" for line in report.read(folder)[1] if line["kind"] == "row"]
    if not measured:
        raise UserError(f"max_seconds={s.max_seconds:g} was over before any row of {name}: give the same command again")
    if not any(measured):
        raise UserError(f"no row of {name} could be measured: {folder / 'report.md'} gives the reason for each")


def measure(name: str, args: list[str], s, device, plan: list[dict], folder: pathlib.Path) -> None:
    """Measure the rows of `plan` that `folder` lacks. name: their kind; args: bench.py's arguments, for the header."""
    kind = KINDS[name]
    if kind.TRAINS and s.dataset == "python_stdlib" and not (ROOT / "data" / s.dataset / "meta.json").exists():
        prepare = ROOT / "data" / s.dataset / "prepare.py"
        if subprocess.run([sys.executable, prepare], check=False).returncode:  # such as in a read-only checkout
            raise UserError(f"{prepare} failed, see above: run it with --out_dir=FOLDER, and give --dataset=FOLDER")
    machine = environment(device) | {"date": datetime.date.today().isoformat()}
    own = {key: value for key, value in machine.items() if key not in rows.COMPARED}  # may differ between calls
    if device.type == "cpu" and getattr(s, "freed_memory", "kept") == "kept":
        memory.keep_freed_memory(keep=True)  # as train.py does
    run = functools.partial(
        rows.run,
        plan,
        functools.partial(kind.measure, s=s, device=device, folder=folder),
        folder / "rows.jsonl",
        header(name, args, s, machine),
        reference=functools.partial(timing.reference, device),
        state=lambda: machine_state(device) | {"commit": machine["commit"], "machine": own},
        say=print,
        group=kind.GROUP,
        profile=s.profile,
        max_seconds=s.max_seconds,
    )
    with files.lock(folder) as lock:  # two calls would overwrite each other's rows
        run(still_ours=functools.partial(lock.check, "the same command and that --results"))


def planned(name: str, s, device) -> list[dict]:
    """The rows of the kind `name` that --only selects. Raises UserError if --only has a name that no row has."""
    return admitted(KINDS[name].plan(s, device), s.only)


def left(name: str, args: list[str]) -> tuple[int, int, int]:
    """(missing, disturbed, all): how many such rows the kind `name` has if it is run with `args`."""
    s, device = read_settings(name, args)
    plan = planned(name, s, device)
    path = pathlib.Path(s.results) / name / "rows.jsonl"
    return *rows.left(plan, path, header(name, [name, *args], s, environment(device))), len(plan)


def run_campaign(args: list[str]) -> None:
    """Run what is missing of tests and rows; the last line says what still is. Raises UserError without a GPU."""
    s = configure(campaign.Settings(), args, campaign.__doc__)
    print(campaign.run(s, resolve_device("cpu" if s.rehearse else "auto"), left))


def write_plan(args: list[str]) -> None:
    """Compute what a run takes, or the sweep if --sweep=True; print it, and write it to `results`/plan.

    Raises UserError if a GPU's memory is too small for the run, with the nearest settings that fit.
    """
    defaults, unused = settings_class(plan)(**plan.DEFAULTS), unused_settings("plan")
    s = configure(defaults, args, __doc__, unused)
    if s.sweep:
        s = configure(defaults, args, __doc__, unused | plan_sweep.UNUSED)
    settings.validate(s)
    command = f"python bench.py plan {shlex.join(args)}".rstrip()
    paths = (plan_sweep if s.sweep else plan).answer(s, command, print)
    print(f"wrote {', '.join(map(str, paths))}")


def validate(kind, s) -> None:
    """Raise UserError for a number that is out of range, before anything is measured."""
    for setting in ("max_seconds", "train_seconds"):
        if (seconds := getattr(s, setting, None)) is not None and not 0 < seconds < math.inf:
            raise UserError(f"{setting}={seconds} must be more than 0, and finite")
    if kind.TRAINS:
        settings.validate(s)
    least_of = {"repeats": 1, "warmup": 0, "rounds": 1, "new_tokens": 1, "batch_size": 1}
    least_of |= dict.fromkeys(("steps", "iterations"), training.WARM_UP + 1)
    for setting, least in least_of.items():
        if getattr(s, setting, least) < least:
            raise UserError(f"{setting}={getattr(s, setting)} must be {least} or more")
    if not 0 < getattr(s, "memory_gb", 1) < math.inf:
        raise UserError(f"memory_gb={s.memory_gb} must be more than 0, and finite")


def header(name: str, args: list[str], s, machine: dict) -> dict:
    """The header that identifies a benchmark's rows: the settings that it uses, and the machine."""
    used = {field.name: getattr(s, field.name) for field in dataclasses.fields(s)}
    used = {setting: value for setting, value in used.items() if setting not in {*NOT_IDENTITY, *KINDS[name].UNUSED}}
    defaults = type(s)()
    changed = [setting for setting, value in used.items() if value != getattr(defaults, setting)]
    command = " ".join(["python bench.py", *args])
    return {"benchmark": name, "command": command, "settings": used, "set": changed, "environment": machine}


def write_reports(folders: list[str]) -> None:
    """Draw the report and figures of each folder again. Raises UserError if a folder has no rows of a benchmark."""
    if not folders or any(folder.startswith("-") for folder in folders):
        raise UserError("name the folder of a benchmark: python bench.py report FOLDER [FOLDER ...]")
    for folder in map(pathlib.Path, folders):
        header, _ = report.read(folder)
        print(f"wrote {', '.join(map(str, report.write(folder, kind_of(header))))}")


def check_folder(args: list[str]) -> None:
    """Measure the rows of a published folder again, with the settings of its header, and say which claims hold here.

    Raises UserError if the folder has no rows of a benchmark, if --only names none, or if new rows would go into it.
    """
    asked = configure(check.Settings(), [arg for arg in args if arg.startswith("-")], check.__doc__)
    folders = [pathlib.Path(arg) for arg in args if not arg.startswith("-")]
    if len(folders) != 1:
        raise UserError("name one published folder: python bench.py check FOLDER")
    header, lines = report.read(folders[0])
    folder = pathlib.Path(asked.results) / folders[0].resolve().name
    if folder.resolve() == folders[0].resolve():
        raise UserError(f"{folder} is the published folder itself: name another for the new rows with --results")
    name, there = header["benchmark"], report.rows_in(lines)
    claims = check.published(kind_of(header), there, asked.only)
    wanted = {rows.key_of(row): row for claim in claims for row in claim.rows}
    try:
        s, device, assumed = published_settings(header, there)
        obstacles = check.obstacles(wanted, s, device, KINDS[name].plan(s, device))
    except UserError as error:  # such as a GPU that is not here, or a setting that is no longer allowed
        assumed, obstacles = {}, dict.fromkeys(wanted, str(error))
    todo = check.measurable(claims, obstacles)
    print(check.outlook(claims, todo))
    here = []
    if todo:
        s = dataclasses.replace(s, max_seconds=asked.max_seconds)
        measure(name, ["check", *args], s, device, list(map(rows.spec_of, todo)), folder)
        report.write(folder, KINDS[name])
        here = report.rows_in(report.read(folder)[1])
    verdicts = check.compare(claims, KINDS[name].claims(here), here, obstacles)
    this_one = environment(resolve_device("auto"))["device"]
    machine = report.machine(*report.read(folder), KINDS[name]) if here else this_one
    print(*check.columns(verdicts), check.summary(verdicts), sep="\n")
    there_on = report.machine(header, lines, KINDS[name])
    print(f"wrote {check.write(folder, folders[0], verdicts, there_on, machine, assumed)}")


def published_settings(header: dict, there: list[dict]) -> tuple:
    """(settings that published rows were measured with, device for them here, {name: value} that their header lacks).

    A device or dtype "auto" becomes what it was there. A setting that the header lacks has EARLIER's value, or today's
    default. Raises UserError if this machine lacks the device, or a setting is no longer allowed.
    """
    kind, gpu = kind_of(header), "cuda" in header["environment"]
    defaults = settings_class(kind)(**kind.defaults(gpu))
    used = [f.name for f in dataclasses.fields(defaults) if f.name not in {*NOT_IDENTITY, *kind.UNUSED}]
    named = {name: header["settings"][name] for name in used if name in header["settings"]}
    s = adopt(defaults, {name: EARLIER[name] for name in used if name in EARLIER} | named, "the header")
    if s.device == "auto":
        s = dataclasses.replace(s, device="cuda" if gpu else "cpu")
    if getattr(s, "dtype", None) == "auto" and (dtypes := [d for row in there if (d := check.dtype_of(row))]):
        s = dataclasses.replace(s, dtype=statistics.mode(dtypes))
    validate(kind, s)
    return s, resolve_device(s.device), {name: getattr(s, name) for name in used if name not in named}


def kind_of(header: dict):
    """The module of a header's kind of benchmark. Raises UserError if this version has no such kind."""
    if header["benchmark"] not in KINDS:
        raise UserError(f"this version has no benchmark {header['benchmark']!r}, only {', '.join(KINDS)}")
    return KINDS[header["benchmark"]]


def parse(args: list[str]) -> tuple[str, list[str]]:
    """(KIND, other arguments): the kind is ladder without arguments, or if the first is a flag or a config file.

    Raises UserError if the first argument is no kind, flag or config file.
    """
    names = [*KINDS, "report", "check", "gpu", "plan"]
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
            sys.exit(print(__doc__))
        if name == "report":
            write_reports(args)
        elif name == "check":
            check_folder(args)
        elif name == "gpu":
            run_campaign(args)
        elif name == "plan":
            write_plan(args)
        else:
            main(name, args)
