"""Settings from defaults, then config files, then flags, in that order.

    python train.py config/train_shakespeare_char.py --batch_size=32

A config file is Python code that assigns to settings. Files and flags pass the same checks. tyro writes the help. A
script that executes the text of this file, as nanoGPT's do, gets both applied to its globals:

    exec(open("configurator.py").read())
"""

if __name__ != "configurator":  # a script executes this text
    _script = dict(globals())  # before names of ours, such as `re`, replace the script's

import builtins
import contextlib
import dataclasses
import difflib
import functools
import math
import os
import pathlib
import pickle
import re
import sys
import time
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fusedgpt.aliases import PROCESSES, VALUES, settings_called
from fusedgpt.errors import UserError, first_line, one_sentence, shown
from fusedgpt.home import as_called

COMMAND_LINE = "the command line"
LARGEST = 2**63 - 1  # the largest whole number of PyTorch and numpy
LENT = {module.__name__: module for module in (os, time, math, pickle)}  # nanoGPT's train.py has imported these
# types of settings
PLAIN = {bool: "True or False", int: "a whole number", float: "a number", str: "text", types.NoneType: "None"}


def configure(
    defaults: Any,
    args: list[str],
    description: str,
    unused: Mapping[str, str] = types.MappingProxyType({}),
    earlier: Callable[[Any], Any] = lambda settings: None,
    places: tuple[str, ...] = (),
):
    """Return `defaults`, an instance of a dataclass of settings, as config files and `--name=value` flags change it.

    `--help` prints all settings that are not in `unused` with their values, and exits.
    unused: the settings that this script does not use, each with the reason. A config file may set them, because it may
    be written for another script. A flag may not.
    earlier: called with the new settings. If it returns the settings of an earlier run, files and flags change those.
    places: the settings that arguments without a name or .py at their end set, such as out_dir in `sample.py out-text`.
    Raises UserError for whatever is wrong in a file or a flag.
    """
    unnamed, flags = separate(args)
    for arg in unnamed:  # name=value, or a dash that a word processor put in the place of two
        flag = arg.lstrip("\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}")
        if flag.partition("=")[0] in vars(defaults):
            raise UserError(f"{arg} has no name: flags begin with two plain dashes: --{flag}")
    files = [arg for arg in unnamed if not places or arg.endswith(".py")]
    values = [arg for arg in unnamed if arg not in files]
    if extra := values[len(places) :]:
        raise UserError(f"{COMMAND_LINE}: {shown(extra[0])} is one argument too many: flags are --name=value")
    flags = [f"--{name}={value}" for name, value in zip(places, values)] + flags  # flags of one's own count more

    settings, assigned = defaults, []
    for file in files:
        for name, value in _assignments(file, settings).items():
            if name not in unused:
                settings = _set(settings, name, value, file)
                assigned.append((name, value, file))
    for flag in flags:
        name, text = _name_and_text(flag, settings, unused)
        settings = _set(settings, name, text, COMMAND_LINE)
        assigned.append((name, text, COMMAND_LINE))
    if (base := earlier(settings)) is not None:
        settings = functools.reduce(lambda settings, each: _set(settings, *each), assigned, base)
    if {"-h", "--help"} & set(args):
        _print_help(settings, unused, description)
    return settings


def separate(args: list[str]) -> tuple[list[str], list[str]]:
    """The arguments that have no name, and flags as --name=value: `--na-me value` is read too. --help is left out."""
    unnamed, flags, open_flag = [], [], False  # whether the last flag still needs a value
    for arg in args:
        if open_flag and (not arg.startswith("-") or re.match(r"-[\d.]", arg)):
            flags[-1], open_flag = f"{flags[-1]}={arg}", False
        elif arg.startswith("-") and arg not in ("-h", "--help"):
            name, equals, value = arg.partition("=")
            flags.append("--" + name.lstrip("-").replace("-", "_") + equals + value)
            open_flag = not equals
        elif not arg.startswith("-"):
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
        field = _field(settings, name, COMMAND_LINE)
        value = True if bool in (field.type, *typing.get_args(field.type)) else getattr(settings, name)
        raise UserError(f"{flag} has no value: flags are written --name=value, as in --{name}={value}")
    return name, text


def answer_help(defaults: Any, args: list[str], description: str, **how: Any) -> None:
    """Print the help as `configure` does and exit, if `args` have --help."""
    if {"-h", "--help"} & set(args):
        with one_sentence():
            configure(defaults, args, description, **how)


def adopt(settings: Any, values: dict[str, Any], where: str) -> Any:
    """Return `settings` with the `values` of an earlier run, which were read from the file `where`.

    Values that `settings` has no field for are ignored. Raises UserError for a value of the wrong type or choice.
    """
    for name, was in vars(settings).items():
        if values.get(name, was) != was:
            settings = _set(settings, name, values[name], where)
    return settings


class _Assigned(dict):
    """The globals of a config file: all that it assigns, also what was so before. It reads what is in `there` too."""

    def __init__(self, there):
        super().__init__()
        self.there = there

    def __missing__(self, name):
        return self.there[name]  # KeyError: builtins are next


def _assignments(file, settings):
    """The settings that a config file assigns. It may have functions, modules and _names of its own."""
    if not os.path.isfile(file):
        path = file.replace("\\", "/")
        near = [path for path in (path, f"{path}.py", f"config/{path}", f"config/{path}.py") if os.path.isfile(path)]
        hint = f": did you mean {near[0]}?" if near else "; flags are written --name=value"
        raise UserError(f"config file {file} does not exist{hint}")
    hint = ": config files are Python code with lines like batch_size = 8, and a run is named by its folder"
    hint *= not file.endswith(".py")
    names = _Assigned(vars(settings) | LENT | {"__name__": "<config file>", "__file__": file})
    try:
        # not `compile`, which may be a setting of the script that executes this text
        exec(builtins.compile(pathlib.Path(file).read_bytes(), file, "exec"), names)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also exit(), which would end the script with status 0
        raise UserError(f"config file {file} fails: {type(error).__name__}: {first_line(error)}{hint}") from error
    found = {name: v for name, v in names.items() if not (callable(v) or isinstance(v, types.ModuleType))}
    found = {name: v for name, v in found.items() if not name.startswith("_")}
    if hint and not found:  # YAML and JSON may be Python code that does nothing
        raise UserError(f"config file {file} assigns to no setting{hint}")
    return found


def _set(settings, name, value, where):
    """Return `settings` with the field `name` set to `value`: a flag's text, or a file's value of the right type."""
    field, text, in_file = _field(settings, name, where), "", where != COMMAND_LINE
    if in_file and type(value) is float and field.type is int and math.isfinite(value):
        value = round(value)  # as in nanoGPT, whose scripts take any number
    if in_file and value is None and field.type is str:
        value = ""
    refused = f"{where}: {name}={shown(value)} is not allowed: it takes"
    try:
        text = str(value)
        new = _read(text, field)
        if in_file and new != value:  # in a file, steps = "5" is a mistake
            raise ValueError
    except (Exception, SystemExit) as error:  # a file's value may have methods that raise anything
        raise UserError(f"{refused} {_allowed(field.type)}{_meant(text, field)}") from error
    if isinstance(new, int) and abs(new) > LARGEST:
        raise UserError(f"{refused} whole numbers below 2**63")
    return dataclasses.replace(settings, **{name: new})


def _read(text, field):
    """`text` as the value of a field, as tyro would read it. Raises ValueError if it does not fit."""
    choice = typing.get_origin(field.type) is typing.Literal
    kinds = [field.type] if choice else typing.get_args(field.type) or [field.type]
    for kind in sorted(kinds, key=lambda kind: kind is str):  # last, because every text is one
        if values := {bool: (True, False), types.NoneType: (None,)}.get(kind, typing.get_args(kind)):
            named = {str(value): value for value in values}
            if text in named:
                return named[text]
        else:
            with contextlib.suppress(ValueError):
                return kind(text)
    raise ValueError(text)


def _meant(text, field):
    """A question with the value that `text` may stand for, such as float16 if it is fp16; empty if there is none."""
    guesses = [VALUES.get(text.lower()), text.strip("'\" "), text.lower(), text.capitalize()]
    with contextlib.suppress(ValueError):  # 1e3 and 1,000 for a whole number
        number = float(text.replace(",", ""))
        guesses += [f"{number:.0f}"] * number.is_integer()
    for guess in guesses:
        with contextlib.suppress(ValueError):
            if guess not in (None, text):
                return f": did you mean {field.name}={_read(guess, field)}?"
    return ""


def _field(settings, name, where):
    fields = {f.name: f for f in dataclasses.fields(settings)}
    if name in fields:
        return fields[name]
    near = settings_called(name, fields) or difflib.get_close_matches(name, fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists every setting"
    if name.lower() in PROCESSES.split() and "backend" in fields:
        hint = "torchrun --standalone --nproc_per_node=N train.py trains on N GPUs"
    if where != COMMAND_LINE:
        hint += " (begin a name that is not a setting with _)"
    raise UserError(f"{where}: there is no setting {shown(name)}: {hint}")


def _allowed(annotation):
    """Describe a type in words: `bool | Literal['auto']` is "True or False or 'auto'"."""
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(annotation)))
    return " or ".join(map(_allowed, typing.get_args(annotation))) or PLAIN[annotation]


def subclass(fields: list[tuple], *bases: type) -> type:
    """Make a dataclass with the `fields` (as dataclasses.make_dataclass takes them) and those of `bases`.

    It takes the name and module of the first base, because tyro reads help texts from the comments in its source.
    """
    made = dataclasses.make_dataclass(bases[0].__name__, fields, bases=bases)
    made.__module__ = bases[0].__module__  # make_dataclass sets another from Python 3.12 on
    if hasattr(bases[0], "__firstlineno__"):  # from Python 3.13 on, the source is found by this line number
        made.__firstlineno__ = bases[0].__firstlineno__
    return made


def apply(names: dict[str, Any], args: list[str]) -> None:
    """Change those of a script's globals `names` that config files and flags in `args` set, as nanoGPT does.

    A setting is a global of a plain type whose name does not begin with _. It keeps its type, unless it is None.
    """
    values = {k: v for k, v in names.items() if type(v) in PLAIN and not k.startswith("_")}
    kinds = {types.NoneType: typing.Union[tuple(PLAIN)]}  # noqa: UP007 (a tuple of types)
    fields = [(k, kinds.get(type(v), type(v)), dataclasses.field(default=v)) for k, v in values.items()]
    names |= vars(configure(dataclasses.make_dataclass("Settings", fields)(), args, ""))


def _print_help(settings, unused, description):
    """Print the settings that are not in `unused`, with their values, and exit."""
    import tyro

    hidden = [f for f in dataclasses.fields(settings) if f.name in unused]
    fields = [(f.name, tyro.conf.Suppress[f.type], dataclasses.field(default=f.default)) for f in hidden]
    shown = subclass(fields, type(settings))
    how = dict(prog=as_called(f"python {os.path.basename(sys.argv[0])}"), description=as_called(description))
    how |= dict(use_underscores=True, config=(tyro.conf.FlagConversionOff,))  # --flag=True, not --flag and --no-flag
    tyro.cli(shown, default=shown(**vars(settings)), args=["--help"], **how)


if __name__ != "configurator":
    with one_sentence():
        apply(_script, sys.argv[1:])
    globals().update(_script)
