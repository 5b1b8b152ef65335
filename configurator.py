"""Settings from defaults, then config files, then flags, in that order.

    python train.py config/train_shakespeare_char.py --batch_size=32

A config file is Python code that assigns to settings. Files and flags pass the same checks. tyro writes the help.
"""

if __name__ != "configurator":  # nanoGPT's scripts execute this text; without a word, flags would change nothing
    raise SystemExit("error: import configurator, and call configurator.configure(Settings(), sys.argv[1:], __doc__)")

import builtins
import contextlib
import dataclasses
import difflib
import math
import os
import pathlib
import pickle
import re
import shlex
import sys
import time
import types
import typing
from collections.abc import Mapping
from typing import Any

from fusedgpt.errors import UserError, first_line, one_sentence, shown
from fusedgpt.home import SCRIPTS, as_called

COMMAND_LINE = "the command line"
NONE = types.MappingProxyType({})
LARGEST = 2**63 - 1  # the largest whole number of PyTorch and numpy
LENT = {module.__name__: module for module in (os, time, math, pickle)}  # nanoGPT's train.py has imported these
# types of settings
PLAIN = {bool: "True or False", int: "a whole number", float: "a number", str: "text", types.NoneType: "None"}
# what other programs call a setting, if its name here is not near
ELSEWHERE = {"lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "hidden_size": "n_embd"}
ELSEWHERE |= {"epochs": "max_iters", "steps": "max_iters", "max_steps": "max_iters", "seq_len": "block_size"}
ELSEWHERE |= {"context_length": "block_size", "max_length": "block_size", "precision": "dtype", "prompt": "start"}
ELSEWHERE |= {"model": "init_from"}


def configure(
    defaults: Any, args: list[str], description: str, unused: Mapping[str, str] = NONE, places: tuple[str, ...] = ()
):
    """Return `defaults`, an instance of a dataclass of settings, as config files and `--name=value` flags change it.

    `--help` prints all settings that are not in `unused` with their values, and exits. unused, places: see `assigned`.
    Raises UserError for whatever is wrong in a file or a flag.
    """
    args = ["--help"] if args == ["help"] else args
    settings = changed(defaults, assigned(defaults, args, unused, places))
    if {"-h", "--help"} & set(args):
        _print_help(settings, unused, description)
    return settings


def assigned(
    defaults: Any, args: list[str], unused: Mapping[str, str] = NONE, places: tuple[str, ...] = ()
) -> list[tuple[str, Any, str]]:
    """What config files, which may read `defaults`, and then flags set: the name, the value and where it is from.

    unused: the settings that this script does not use, each with the reason. A config file may set them, because it may
    be written for another script. A flag may not.
    places: the settings that arguments without a name or .py at their end set, such as out_dir in `sample.py out-text`.
    """
    unnamed, flags = separate(args)
    files = [arg for arg in unnamed if not places or arg.endswith(".py")]
    values = [arg for arg in unnamed if arg not in files]
    if extra := values[len(places) :]:
        prompt = f", such as --start={shlex.quote(extra[0])}" * ("start" in vars(defaults))
        raise UserError(f"{COMMAND_LINE}: {shown(extra[0])} is one argument too many: flags are --name=value{prompt}")
    flags = [f"--{name}={value}" for name, value in zip(places, values)] + flags  # flags of one's own count more
    found = []
    for file in files:
        there = _assignments(file, changed(defaults, found))
        found += [(name, value, file) for name, value in there.items() if name not in unused]
    return found + [(*_name_and_text(flag, defaults, unused), COMMAND_LINE) for flag in flags]


def changed(settings: Any, assignments: list[tuple[str, Any, str]]) -> Any:
    """Return `settings` with what `assigned` has found. Raises UserError for an unknown name or a wrong value."""
    for name, value, where in assignments:
        settings = _set(settings, name, value, where)
    return settings


def separate(args: list[str]) -> tuple[list[str], list[str]]:
    """The arguments that have no name, and flags as --name=value: `--na-me value` is read too. --help is left out."""
    unnamed, flags = [], []
    for arg in args:
        if arg in ("-h", "--help"):
            continue
        if arg.startswith("-") and not re.match(r"-[\d.]", arg):
            name, equals, value = arg.partition("=")
            flags.append("--" + name.lstrip("-").replace("-", "_") + equals + value)
        elif flags and "=" not in flags[-1]:
            flags[-1] += f"={arg}"
        else:
            unnamed.append(arg)
    return unnamed, flags


def _name_and_text(flag, settings, unused):
    """The name of a setting and the text of its value, from a flag --name=text."""
    name, equals, text = flag.lstrip("-").partition("=")
    if name in unused:
        raise UserError(f"{COMMAND_LINE}: --{name} has no effect here: {unused[name]}")
    if text.endswith(".py") and name not in vars(settings):
        raise UserError(f"{flag}: config files are named without a flag, as in train.py {text}")
    if not equals:
        raise UserError(f"{flag} has no value: flags are written --name=value, as in --device=cpu or --compile=True")
    if text.startswith("~/") and name != "start":  # shells leave the ~ in --out_dir=~/run
        text = os.path.expanduser(text)
    return name, text


def answer_help(defaults: Any, args: list[str], description: str, **how: Any) -> None:
    """Print the help as `configure` does and exit, if `args` have --help."""
    if {"-h", "--help"} & set(args) or args == ["help"]:
        with one_sentence():
            configure(defaults, args, description, **how)


def _assignments(file, settings):
    """The settings that a config file assigns. It may have functions, modules and _names of its own."""
    path = next(filter(os.path.isfile, (file, SCRIPTS / file)), "")  # the project's own, if it is not in this folder
    if not (file.endswith(".py") and path):
        ours = {path.stem: path.relative_to(SCRIPTS) for path in (SCRIPTS / "config").rglob("*.py")}
        near = difflib.get_close_matches(pathlib.Path(file).stem, ours, n=1)
        if near and not os.path.exists(file):
            raise UserError(f"there is no config file {file}: did you mean {ours[near[0]]}?")
        files = "config files are NAME.py, with lines like batch_size = 8"
        flags = "flags are written --name=value, as in --init_from=resume --out_dir=FOLDER to train a run on"
        raise UserError(f"there is no config file {file}: {files}, and {flags}")
    # as builtins, what a file may read is not among the globals that it assigns
    read = vars(builtins) | vars(settings) | LENT
    names = {"__builtins__": read, "__name__": "<config file>", "__file__": str(path)}
    try:
        exec(compile(pathlib.Path(path).read_bytes(), file, "exec"), names)
    except (Exception, SystemExit) as error:  # exit() would end the script with status 0
        raise UserError(f"config file {file} fails: {type(error).__name__}: {first_line(error)}") from error
    own = {name for name, v in names.items() if callable(v) or isinstance(v, types.ModuleType)} - vars(settings).keys()
    found = {name: v for name, v in names.items() if name not in own}
    return {name: v for name, v in found.items() if not name.startswith("_")}


def _set(settings, name, value, where):
    """Return `settings` with the field `name` set to `value`: a flag's text, or a file's value of the right type."""
    field, in_file = _field(settings, name, where), where != COMMAND_LINE
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy's number
    if in_file and type(value) is float and field.type is int and math.isfinite(value):
        value = round(value)  # as in nanoGPT, whose scripts take any number
    # a file's value may be of any type, and steps = "5" is a mistake there
    found = _read(str(value), field.type) if type(value) in PLAIN else []
    if not found or (in_file and found[0] != value):
        takes = _allowed(field.type) + _near(str(value), field.type)
        raise UserError(f"{where}: {name}={shown(value)} is not allowed: it takes {takes}")
    if isinstance(found[0], int) and abs(found[0]) > LARGEST:
        raise UserError(f"{where}: {name}={shown(value)} is not allowed: it takes whole numbers below 2**63")
    return dataclasses.replace(settings, **{name: found[0]})


def _read(text, annotation):
    """What `text` may mean as a value of a type, first what tyro would take it for; [] if it does not fit."""
    found, choice = [], typing.get_origin(annotation) is typing.Literal
    kinds = [annotation] if choice else typing.get_args(annotation) or [annotation]
    for kind in sorted(kinds, key=lambda kind: kind is str):  # last, because every text is one
        if values := {bool: (True, False), types.NoneType: (None,)}.get(kind, typing.get_args(kind)):
            found += [value for value in values if str(value) == text]
        else:
            with contextlib.suppress(ValueError):
                found.append(kind(text))
    return found


def _near(text, annotation):
    """`: did you mean X?` if a choice of a type is like `text`, otherwise nothing."""
    kinds = [annotation, *typing.get_args(annotation)]
    choices = {str(choice).casefold(): choice for kind in kinds for choice in typing.get_args(kind)}
    near = difflib.get_close_matches(text.casefold(), choices, n=1, cutoff=0.8)  # 0.6 takes an A100-80GB for the 40GB
    return "".join(f": did you mean {choices[each]!r}?" for each in near)


def _field(settings, name, where):
    fields = {f.name: f for f in dataclasses.fields(settings)}
    if name in fields:
        return fields[name]
    near = [known for known in fields if known == ELSEWHERE.get(name)] or difflib.get_close_matches(name, fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists every setting"
    if where != COMMAND_LINE:
        hint += " (begin a name that is not a setting with _)"
    raise UserError(f"{where}: there is no setting {shown(name)}: {hint}")


def _allowed(annotation):
    """Describe a type in words: `bool | Literal['auto']` is "True or False or 'auto'"."""
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(annotation)))
    return " or ".join(map(_allowed, typing.get_args(annotation))) or PLAIN[annotation]


def _print_help(settings, unused, description):
    """Print the settings that are not in `unused`, with their values, and exit."""
    import tyro

    hidden = {f.name: tyro.conf.Suppress[f.type] for f in dataclasses.fields(settings) if f.name in unused}

    @dataclasses.dataclass
    class Visible(type(settings)):  # by a class statement, because tyro reads what each setting means in the source
        __annotations__ = hidden

    how = dict(prog=as_called(f"python {os.path.basename(sys.argv[0])}"), description=as_called(description))
    how |= dict(use_underscores=True, config=(tyro.conf.FlagConversionOff,))  # --flag=True, not --flag and --no-flag
    tyro.cli(Visible, default=Visible(**vars(settings)), args=["--help"], **how)
