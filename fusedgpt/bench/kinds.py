"""The kinds of benchmark by name, their settings, and how their rows are measured."""

import dataclasses
import datetime
import functools
import math
import pathlib
import statistics
import subprocess
import sys

from configurator import adopt, configure, separate, subclass
from fusedgpt import settings
from fusedgpt.attention.functions import digest
from fusedgpt.attention.table import is_own
from fusedgpt.bench import check, child, ladder, max_batch, numerics, peers, plan, prefill, rows, sweep
from fusedgpt.bench.options import EACH_ROW_NAMES_IT, EARLIER, admitted
from fusedgpt.errors import UserError
from fusedgpt.home import ROOT, SCRIPTS
from fusedgpt.machine import files, memory, timing
from fusedgpt.machine.device import resolve_device
from fusedgpt.machine.environment import commit, environment, machine_state

KINDS = {"ladder": ladder, "sweep": sweep, "prefill": prefill, "numerics": numerics, "max_batch": max_batch}
KINDS |= {"peers": peers}
TAKE_SETTINGS = KINDS | {"plan": plan}
NOT_IDENTITY = ("results", "only", "profile", "max_seconds")  # settings that do not change what a row measures


@functools.cache  # each is asked for every kind's names
def settings_class(kind) -> type:
    """The dataclass of a kind's settings, which include train.py's if its rows run train.py."""
    return subclass([], kind.Settings, settings.Settings) if kind.TRAINS else kind.Settings


def _setting_names(kind):
    return [field.name for field in dataclasses.fields(settings_class(kind))]


def unused_settings(name: str) -> dict[str, str]:
    """{setting: why} for each setting of train.py or of another kind that the kind `name` does not use."""
    every = set().union(*map(_setting_names, TAKE_SETTINGS.values()))
    others = every.difference(_setting_names(TAKE_SETTINGS[name]))
    unused = dict.fromkeys(others, f"bench.py {name} does not use it")
    unused["real_data"] = "a benchmark trains on the tokens of --dataset, and peers' steps on random ids"  # nanoGPT's
    return unused | TAKE_SETTINGS[name].UNUSED


def read_settings(name: str, args: list[str], description: str = ""):
    """(settings, device) of the kind `name`: defaults for this machine, then config files, then flags."""
    kind, unused = KINDS[name], unused_settings(name)
    names_own_kernel = any(flag.startswith("--attention=") and is_own(flag) for flag in separate(args)[1])
    if names_own_kernel and unused.get("attention") == EACH_ROW_NAMES_IT:
        del unused["attention"]
    asked = [arg for arg in args if arg not in ("-h", "--help")]
    device = resolve_device(configure(settings_class(kind)(), asked, description, unused).device)
    defaults = settings_class(kind)(**kind.defaults(device.type == "cuda"))
    return configure(defaults, args, description, unused), device


def validate(kind, s) -> None:
    """Raise UserError if a number is out of range."""
    for setting in ("max_seconds", "train_seconds", "memory_gb"):
        value = getattr(s, setting, None)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{setting}={value} must be more than 0, and finite")
    if kind.TRAINS:
        settings.validate(s)
    least_of = {"repeats": 1, "warmup": 0, "rounds": 1, "new_tokens": 1, "batch_size": 1}
    least_of |= dict.fromkeys(("steps", "iterations"), child.WARM_UP + 1)
    for setting, least in least_of.items():
        if getattr(s, setting, least) < least:
            raise UserError(f"{setting}={getattr(s, setting)} must be {least} or more")


def planned(name: str, s, device) -> list[dict]:
    """The rows of the kind `name` that --only selects. Raises UserError if a name in --only is in no row."""
    return admitted(KINDS[name].plan(s, device), s.only)


def measure(name: str, args: list[str], s, device, plan: list[dict], folder: pathlib.Path) -> None:
    """Measure those rows of `plan` that `folder` lacks. name: their kind; args: for the header's command."""
    kind = KINDS[name]
    if kind.TRAINS and s.dataset == "python_stdlib" and not (ROOT / "data" / s.dataset / "meta.json").exists():
        prepare = SCRIPTS / "data" / s.dataset / "prepare.py"
        if subprocess.run([sys.executable, prepare], check=False).returncode:  # the checkout may be read-only
            raise UserError(f"{prepare} failed, see above: run it with --out_dir=FOLDER, and give --dataset=FOLDER")
    machine = environment(device) | {"date": datetime.date.today().isoformat()}
    of_this_call = {key: value for key, value in machine.items() if key not in rows.COMPARED}
    if device.type == "cpu" and getattr(s, "freed_memory", "kept") == "kept":
        memory.keep_freed_memory(keep=True)  # as train.py does
    with files.lock(folder) as lock:  # two calls would overwrite each other's rows
        rows.run(
            plan,
            functools.partial(kind.measure, s=s, device=device, folder=folder),
            folder / "rows.jsonl",
            header(name, args, s, machine),
            reference=functools.partial(timing.reference, device),
            state=lambda: machine_state(device) | {"commit": machine["commit"], "machine": of_this_call},
            say=print,
            still_ours=functools.partial(lock.check, "the same command and that --results"),
            group=kind.GROUP,
            profile=s.profile,
            max_seconds=s.max_seconds,
        )


def left(name: str, args: list[str]) -> tuple[int, dict[str, int], int]:
    """(missing rows, {what is wrong with others: their number}, planned rows) of the kind `name` if run with `args`."""
    s, device = read_settings(name, args)
    plan = planned(name, s, device)
    path = pathlib.Path(s.results) / name / "rows.jsonl"
    missing, wrong = rows.left(plan, path, header(name, [name, *args], s, environment(device)))
    return missing, wrong, len(plan)


def header(name: str, args: list[str], s, machine: dict) -> dict:
    """The header of rows.jsonl, which identifies its rows by the settings that their kind uses and the machine."""
    used = {field.name: getattr(s, field.name) for field in dataclasses.fields(s)}
    used = {setting: value for setting, value in used.items() if setting not in {*NOT_IDENTITY, *KINDS[name].UNUSED}}
    if is_own(getattr(s, "attention", "")):
        used["own_kernel"] = digest(s.attention)  # rows of another version of the file do not count
    if clone := getattr(s, "nanogpt", ""):
        used["nanogpt_commit"] = commit(clone)  # nor do rows of another version of nanoGPT
    defaults = type(s)()
    changed = [setting for setting, value in used.items() if value != getattr(defaults, setting, value)]
    command = " ".join(["python bench.py", *args])
    return {"benchmark": name, "command": command, "settings": used, "set": changed, "environment": machine}


def published_settings(published: dict, there: list[dict]) -> tuple:
    """(settings of published rows, the device for them here, {name: value} of settings that their header lacks).

    published: the header; there: the rows. A device or dtype "auto" becomes what it was there. A setting that the
    header lacks has its value in EARLIER, or today's default. Raises UserError if this machine lacks the device, or a
    setting is no longer allowed.
    """
    kind, gpu = kind_of(published), "cuda" in published["environment"]
    defaults = settings_class(kind)(**kind.defaults(gpu))
    used = [name for name in _setting_names(kind) if name not in {*NOT_IDENTITY, *kind.UNUSED}]
    named = {name: published["settings"][name] for name in used if name in published["settings"]}
    s = adopt(defaults, {name: EARLIER[name] for name in used if name in EARLIER} | named, "the header")
    if s.device == "auto":
        s = dataclasses.replace(s, device="cuda" if gpu else "cpu")
    dtypes = list(filter(None, map(check.dtype_of, there)))
    if dtypes and getattr(s, "dtype", None) == "auto":
        s = dataclasses.replace(s, dtype=statistics.mode(dtypes))
    validate(kind, s)
    return s, resolve_device(s.device), {name: getattr(s, name) for name in used if name not in named}


def kind_of(published: dict):
    """The module for the kind of benchmark in a header. Raises UserError if this version has no such kind."""
    name = published["benchmark"]
    if name not in KINDS:
        raise UserError(f"this version has no benchmark {name!r}, only {', '.join(KINDS)}")
    return KINDS[name]
