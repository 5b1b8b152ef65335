"""Settings from defaults, then config files, then flags, in that order.

    python train.py config/train_shakespeare_char.py --batch_size=32

A config file is Python code that assigns to settings. Files and flags pass the same checks. tyro writes the help. A
script that executes the text of this file, as nanoGPT's do, gets both applied to its globals:

    exec(open("configurator.py").read())
"""

if __name__ != "configurator":  # a script executes this text
    _script = dict(globals())  # before names of ours, such as `re`, replace the script's

import ast
import builtins
import contextlib
import dataclasses
import difflib
import functools
import importlib
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
# what nanoGPT's train.py has imported when it executes a config file; those that take long only if they are named
LENT = {module.__name__: module for module in (os, time, math, pickle)}
LENT_LATE = {"np": "numpy", "torch": "torch"}
PLAIN = (types.NoneType, bool, int, float, str)  # types of settings


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
    places: the settings that arguments without a name set, in this order, such as out_dir in `sample.py out-text`,
    unless they end in .py: those are config files.
    Raises UserError for an unknown name, a value of the wrong type or choice, a flag of `unused`, or a file that is
    missing or fails.
    """
    unnamed, flags = separate(args)
    _require_dashes(unnamed, defaults)
    files = [arg for arg in unnamed if not places or arg.endswith(".py")]
    flags = [*_placed([arg for arg in unnamed if arg not in files], places), *flags]
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
        _print_help(_without(settings, unused), description)
    return settings


def separate(args: list[str]) -> tuple[list[str], list[str]]:
    """The arguments that have no name, and flags as --name=value: `--na-me value` is read too. --help is left out.

    Raises UserError if a config file stands where the value of a flag is missing.
    """
    unnamed, flags, open_flag = [], [], False  # whether the last flag still needs a value
    for arg in args:
        if open_flag and (not arg.startswith("-") or re.match(r"-[\d.]", arg)):
            if arg.endswith(".py") and os.path.isfile(arg):
                raise UserError(f"{flags[-1]} has no value before {arg}: name config files first, then --name=value")
            flags[-1], open_flag = f"{flags[-1]}={arg}", False
        elif arg.startswith("-") and arg not in ("-h", "--help"):
            name, equals, value = arg.partition("=")
            flags.append("--" + name.lstrip("-").replace("-", "_") + equals + value)
            open_flag = not equals
        elif not arg.startswith("-"):
            unnamed.append(arg)
    return unnamed, flags


def _name_and_text(flag, settings, unused):
    """The name of a setting and the text of its value, from a flag --name=text. Raises UserError if one is missing."""
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


def _require_dashes(unnamed, settings):
    """Raise UserError for name=value without dashes, or with the dashes that word processors put in their place."""
    for arg in unnamed:
        flag = arg.lstrip("\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}")
        if flag.partition("=")[0] in vars(settings):
            raise UserError(f"{arg} has no name: flags begin with two plain dashes: --{flag}")


def _placed(values, places):
    """Flags that set the settings `places` to `values`."""
    if extra := values[len(places) :]:
        raise UserError(f"{COMMAND_LINE}: {shown(extra[0])} is one argument too many: flags are --name=value")
    return [f"--{name}={value}" for name, value in zip(places, values)]


def answer_help(defaults: Any, args: list[str], description: str, **how: Any) -> None:
    """Print the help as `configure` does and exit, if `args` have --help."""
    if {"-h", "--help"} & set(args):
        with one_sentence():
            configure(defaults, args, description, **how)


def adopt(settings: Any, values: dict[str, Any], where: str) -> Any:
    """Return `settings` with the `values` of an earlier run, which were read from the file `where`.

    Values that `settings` has no field for are ignored. Raises UserError for a value of the wrong type or choice.
    """
    for field in dataclasses.fields(settings):
        if field.name in values and values[field.name] != getattr(settings, field.name):
            settings = _set(settings, field.name, values[field.name], where)
    return settings


def _assignments(file, settings):
    """The settings that a config file assigns. It may have functions, modules and _names of its own."""
    if not os.path.isfile(file):
        there = "is no regular file" if os.path.exists(file) else "does not exist"
        path = file.replace("\\", "/")
        near = [path for path in (path, f"{path}.py", f"config/{path}", f"config/{path}.py") if os.path.isfile(path)]
        hint = f": did you mean {near[0]}?" if near else "; flags are written --name=value"
        raise UserError(f"config file {file} {there}{hint}")
    so_far = dataclasses.asdict(settings)
    hint = ": config files are Python code with lines like batch_size = 8, and a run is named by its folder"
    hint *= not file.endswith(".py")
    names = _Names({**so_far, **LENT, "__name__": "<config file>", "__file__": file})
    try:
        tree = ast.parse(pathlib.Path(file).read_bytes(), file)
        _require_assignments(tree, file, so_far, hint)
        # not `compile`, which may be a setting of the script that executes this text
        exec(builtins.compile(tree, file, "exec"), names.seen, names)
    except UserError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also exit(), which would end the script with status 0
        raise UserError(f"config file {file} fails: {type(error).__name__}: {first_line(error)}{hint}") from error
    found = {k: v for k, v in names.seen.items() if isinstance(k, str)}
    assigned = {k: v for k, v in found.items() if k in names or k not in so_far or v is not so_far[k]}
    loops = [each.target for each in ast.walk(tree) if isinstance(each, ast.For)]
    counters = {each.id for target in loops for each in ast.walk(target) if isinstance(each, ast.Name)} - set(so_far)
    own = {k for k, v in assigned.items() if k.startswith("_") or callable(v) or isinstance(v, types.ModuleType)}
    own |= counters & set(assigned)
    if hint and assigned.keys() == own:  # YAML and JSON may be Python code that does nothing
        raise UserError(f"config file {file} assigns to no setting{hint}")
    return {k: v for k, v in assigned.items() if k not in own}


def _require_assignments(tree, file, settings, hint):
    """Raise UserError for `name: value` or `name == value`, which are Python that assigns nothing."""
    for line in tree.body:
        left = line.target if isinstance(line, ast.AnnAssign) and line.value is None else None
        left = line.value.left if isinstance(line, ast.Expr) and isinstance(line.value, ast.Compare) else left
        if isinstance(left, ast.Name) and left.id in settings:
            raise UserError(
                f"config file {file}, line {line.lineno}: {ast.unparse(line)} assigns nothing: write {left.id} ="
                f" VALUE{hint}"
            )


class _Names(dict):
    """What a config file assigns at its top level, even a value that was there before: an earlier run may have another.

    seen: the file's globals, which its functions read.
    """

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        self.seen[name] = value

    def __delitem__(self, name):
        super().__delitem__(name)
        del self.seen[name]

    def __missing__(self, name):
        if name not in self.seen and name in LENT_LATE:
            self.seen[name] = importlib.import_module(LENT_LATE[name])
        return self.seen[name]  # KeyError: builtins are next


def _set(settings, name, value, where):
    """Return `settings` with the field `name` set to `value`: a flag's text, or a file's value of the right type."""
    field = _field(settings, name, where)
    refused = f"{where}: {name}={shown(value)} is not allowed: it takes"
    text = ""
    try:
        if where != COMMAND_LINE:
            value = _of_nanogpt(value, field)
        text = str(value)  # raises for whole numbers of more than 4300 digits, and for some types of one's own
        new = _read(text, field)
        if where != COMMAND_LINE and new != value:  # in a file, steps = "5" is a mistake
            raise ValueError
    except (Exception, SystemExit) as error:  # a file's value may have methods that raise anything
        raise UserError(f"{refused} {_allowed(field.type)}{_meant(text, field)}") from error
    if isinstance(new, int) and abs(new) > LARGEST:
        raise UserError(f"{refused} whole numbers below 2**63")
    if isinstance(new, str) and "\0" in new:
        raise UserError(f"{refused} text without the character NUL")
    return dataclasses.replace(settings, **{name: new})


def _of_nanogpt(value, field):
    """A file's `value` as nanoGPT's scripts take it: any number for a whole one, and None for no name."""
    if type(value) is float and field.type is int:
        return round(value)
    return "" if value is None and field.type is str else value


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
    with contextlib.suppress(ValueError, OverflowError):  # 1e3 and 1,000 for a whole number
        guesses += [str(int(number))] if (number := float(text.replace(",", ""))).is_integer() else []
    for guess in guesses:
        with contextlib.suppress(ValueError):
            if guess not in (None, text):
                return f": did you mean {field.name}={_read(guess, field)}?"
    return ""


def _field(settings, name, where):
    fields = {f.name: f for f in dataclasses.fields(settings)}
    if name not in fields:
        near = settings_called(name, fields) or difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists every setting"
        if name.lower() in PROCESSES.split() and "backend" in fields:
            hint = "torchrun --standalone --nproc_per_node=N train.py trains on N GPUs"
        if where != COMMAND_LINE:
            hint += " (begin a name that is not a setting with _)"
        raise UserError(f"{where}: there is no setting {shown(name)}: {hint}")
    return fields[name]


def _allowed(annotation):
    """Describe a type in words: `bool | Literal['auto']` is "True or False or 'auto'"."""
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(annotation)))
    if typing.get_args(annotation):
        return " or ".join(map(_allowed, typing.get_args(annotation)))
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "text", types.NoneType: "None"}
    return words[annotation]


def _without(settings, unused):
    """A copy of `settings` whose --help hides the fields in `unused`."""
    import tyro

    hidden = [
        (f.name, tyro.conf.Suppress[f.type], dataclasses.field(default=f.default))
        for f in dataclasses.fields(settings)
        if f.name in unused
    ]
    return subclass(hidden, type(settings))(**vars(settings))


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
    Raises UserError as `configure` does.
    """
    values = {k: v for k, v in names.items() if type(v) in PLAIN and not k.startswith("_")}
    kinds = {types.NoneType: typing.Union[PLAIN]}  # noqa: UP007 (a tuple of types)
    fields = [(k, kinds.get(type(v), type(v)), dataclasses.field(default=v)) for k, v in values.items()]
    names |= vars(configure(dataclasses.make_dataclass("Settings", fields)(), args, ""))


def _print_help(settings, description):
    import tyro

    called = as_called(f"python {os.path.basename(sys.argv[0])}")
    options = dict(default=settings, use_underscores=True, config=_plain(), description=as_called(description))
    tyro.cli(type(settings), prog=called, args=["--help"], **options)


def _plain():
    import tyro

    return (tyro.conf.FlagConversionOff,)  # --flag=True, not --flag and --no-flag


if __name__ != "configurator":
    with one_sentence():
        apply(_script, sys.argv[1:])
    globals().update(_script)
