"""The kinds of benchmark by name, their settings, and how their contenders are measured."""

import dataclasses
import datetime
import functools
import json
import math
import os
import pathlib
import shlex
import subprocess
import sys
import time

import torch

from configurator import configure, separate
from fusedgpt import settings
from fusedgpt.attention.functions import digest
from fusedgpt.attention.table import OWN, is_own, located
from fusedgpt.bench import ladder, max_batch, numerics, peers, plan, prefill, rows, sweep
from fusedgpt.bench.comparison import InProcess, Measurement
from fusedgpt.bench.process import Contender
from fusedgpt.errors import UserError
from fusedgpt.home import ROOT, SCRIPTS
from fusedgpt.machine import files, memory
from fusedgpt.machine.device import resolve_device
from fusedgpt.machine.environment import environment
from fusedgpt.machine.turns import Turn

KINDS = {"ladder": ladder, "sweep": sweep, "prefill": prefill, "numerics": numerics, "max_batch": max_batch}
KINDS |= {"peers": peers}
TAKE_SETTINGS = KINDS | {"plan": plan}
TAKE_KERNELS = ("ladder", "sweep", "numerics")  # and measure those of users too
# settings that do not change what a contender does, only which ones there are and for how long
NOT_IDENTITY = ("results", "only", "precision", "seconds", "max_seconds", "lengths", "heads", "models")
NOT_IDENTITY += ("device", "nanogpt")  # the header names the device, and rows the commit of a clone
BEGAN = time.monotonic()  # about when bench.py started


@functools.cache  # each is asked for every kind's names
def settings_class(kind) -> type:
    """The dataclass of a kind's settings, which include train.py's if its contenders have them."""
    if not kind.TRAINS:
        return kind.Settings

    @dataclasses.dataclass
    class Both(kind.Settings, settings.Settings):
        pass

    return Both


def defaults(kind, gpu: bool):
    """The settings of a kind on this machine: the articles' sizes on a GPU, sizes for minutes on a CPU."""
    return settings_class(kind)(**(kind.GPU if gpu else kind.CPU))


def unused_settings(name: str) -> dict[str, str]:
    """{setting: a sentence} for each setting of train.py or of another kind that the kind `name` does not use."""
    names = {each: {f.name for f in dataclasses.fields(settings_class(kind))} for each, kind in TAKE_SETTINGS.items()}
    others = set().union(*names.values()) - names[name]
    others |= {*TAKE_SETTINGS[name].UNUSED, "real_data"}  # nanoGPT's
    return dict.fromkeys(others, f"bench.py {name} does not use it")


def read_settings(name: str, args: list[str], description: str = ""):
    """(settings, device) of the kind `name`: defaults for this machine, then config files, then flags."""
    kind, unused = KINDS[name], unused_settings(name)
    if name in TAKE_KERNELS:
        unused["attention"] = f"each row names its kernel; to measure one of your own too, give --attention={OWN}"
        if any(flag.startswith("--attention=") and is_own(flag) for flag in separate(args)[1]):
            del unused["attention"]
    flags = [arg for arg in args if arg not in ("-h", "--help")]
    device = resolve_device(configure(settings_class(kind)(), flags, description, unused).device)
    s = configure(defaults(kind, gpu=device.type == "cuda"), args, description, unused)
    if hasattr(s, "attention"):
        s = dataclasses.replace(s, attention=located(s.attention))
    for setting in ("precision", "seconds", "max_seconds", "memory_gb"):
        value = getattr(s, setting, None)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{setting}={value} must be more than 0, and finite")
    if kind.TRAINS:
        settings.validate(s)
    return s, device


def build(name: str, given: str, workload: dict, contender: str) -> tuple[Turn | None, dict]:
    """Build a contender in its own process. given: the settings of the kind `name`, as JSON."""
    kind = KINDS[name]
    s = settings_class(kind)(**json.loads(given))
    return kind.build(workload, contender, s, resolve_device(s.device))


def measure(name: str, args: list[str], s, device: torch.device, plan: list, folder: pathlib.Path) -> None:
    """Measure what `folder` lacks of the comparisons in `plan`, of the kind `name`. args: for the header's command."""
    kind, end = KINDS[name], BEGAN + (s.max_seconds or math.inf)
    if kind.TRAINS and s.dataset == "python_stdlib" and not (ROOT / "data" / s.dataset / "meta.json").exists():
        prepare = SCRIPTS / "data" / s.dataset / "prepare.py"
        if subprocess.run([sys.executable, prepare], check=False).returncode:  # the checkout may be read-only
            raise UserError(f"{prepare} failed, see above: run it with --out_dir=FOLDER, and give --dataset=FOLDER")
    machine = environment(device) | {"threads wait": os.environ.get("OMP_WAIT_POLICY", "actively").lower()}
    if kind.TOGETHER and device.type == "cpu":
        memory.keep_freed_memory(keep=True)  # as train.py does
    with files.lock(folder) as lock:  # two calls would overwrite each other's rows
        path = folder / "rows.jsonl"
        earlier, said = rows.begin(path, first := header(name, args, s, machine))
        if said:
            print(said)
        found = {tuple(result.workload.items()): result for result in earlier}
        lines, of_all = files.Lines(path), {"commit": machine["commit"], "date": f"{datetime.date.today()}"}
        of_all["command"] = first["command"]

        def write(line):
            files.check_lock(lock)
            if line["kind"] == "contender":
                line |= of_all | ({"own_kernel": digest(line["name"])} if is_own(line["name"]) else {})
            lines.add(files.json_line(line))
            return line

        for each in plan:
            if time.monotonic() >= end:
                break
            result = found.get(tuple(each.workload.items()), rows.Result(each.workload, each.baseline))
            start = functools.partial(_start, name, s, device, each, folder)
            many = 1  # of a CPU's contenders each compiles on all cores; a GPU's share them
            if device.type == "cuda" and not kind.TOGETHER:
                cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
                many = max(1, len(cores) // 2)
            for contender, line in result.contenders.items():
                if is_own(contender) and line.get("own_kernel") != digest(contender):
                    line["status"] = "changed"  # and so it is measured again
            stale = result.contenders.get(each.baseline, of_all)["commit"] != machine["commit"]
            limits = (s.precision, s.seconds, end, many, stale)
            Measurement(each, result, start, write, print, device, kind.TURN, *limits).run()


def _start(name, s, device, each, folder, contender):
    kind = KINDS[name]
    if kind.TOGETHER:
        return InProcess(*kind.build(each.workload, contender, s, device))
    log = folder / "logs" / f"{'-'.join(map(str, (*each.workload.values(), contender)))}.txt".replace("/", "-")
    given = json.dumps(dataclasses.asdict(s) | {"device": str(device)})
    variables = getattr(kind, "variables", lambda name: {})
    return Contender(build, (name, given, each.workload, contender), variables(contender), log)


def header(name: str, args: list[str], s, machine: dict) -> dict:
    """The header of rows.jsonl: the settings that the kind uses, and the machine."""
    used = {field.name: getattr(s, field.name) for field in dataclasses.fields(s)}
    used = {setting: value for setting, value in used.items() if setting not in {*NOT_IDENTITY, *KINDS[name].UNUSED}}
    usual = defaults(KINDS[name], gpu="cuda" in machine)
    changed = [setting for setting, value in used.items() if value != getattr(usual, setting, value)]
    command = shlex.join(["python", "bench.py", *args])
    return {"benchmark": name, "command": command, "settings": used, "set": changed, "environment": machine}
