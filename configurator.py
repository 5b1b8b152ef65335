"""Settings from defaults, then config files, then flags, in that order.

    python train.py config/train_shakespeare_char.py --batch_size=32

A config file is Python that assigns to names of settings. Files and flags pass the same check. Reading values and
writing the help is tyro's work.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import os
import runpy
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fusedgpt.errors import UserError, first_line, one_sentence, shown

COMMAND_LINE = "the command line"
LARGEST = 2**63 - 1  # PyTorch's and numpy's whole numbers end there


def configure(
    defaults: Any,
    args: list[str],
    description: str,
    unused: Mapping[str, str] = types.MappingProxyType({}),
    earlier: Callable[[Any], Any] = lambda settings: None,
):
    """`defaults`, an instance of a dataclass of settings, as `args` change it: config files and `--name=value` flags.

    `unused` maps each setting that this script does not use to the reason. A config file may set it, because the file
    may be another script's; a flag may not, and `--help` does not show it. `--help` prints every other setting with its
    value so far and exits. `earlier` is given these settings and may return those of an earlier run: files and flags
    then change the earlier ones instead. Raises UserError for an unknown name, a value of the wrong type or choice, a
    flag of `unused`, or a file that is missing or fails.
    """
    files = [a for a in args if not a.startswith("-")]
    flags = [a for a in args if a.startswith("-") and a not in ("-h", "--help")]
    settings, assigned = defaults, []
    for file in files:
        for name, value in _assignments(file, settings).items():
            if name not in unused:
                settings = _set(settings, name, value, file)
                assigned.append((name, value, file))
    for flag in flags:
        name, equals, text = flag.lstrip("-").partition("=")
        if name in unused:
            raise UserError(f"{COMMAND_LINE}: --{name} has no effect here: {unused[name]}")
        if not equals:
            _field(settings, name, COMMAND_LINE)
            raise UserError(f"{flag} has no value: flags are written --name=value, as in --{name}=True")
        settings = _set(settings, name, text, COMMAND_LINE)
        assigned.append((name, text, COMMAND_LINE))
    if (base := earlier(settings)) is not None:
        settings = functools.reduce(lambda settings, each: _set(settings, *each), assigned, base)
    if {"-h", "--help"} & set(args):
        _print_help(_without(settings, unused), description)
    return settings


def answer_help(defaults: Any, args: list[str], description: str, **how: Any) -> None:
    """If `args` have --help, answer it as `configure` does, and exit."""
    if {"-h", "--help"} & set(args):
        with one_sentence():
            configure(defaults, args, description, **how)


def adopt(settings: Any, values: dict[str, Any], where: str) -> Any:
    """`settings` with those of `values` that it has fields for. They are an earlier run's settings, read from `where`.

    Raises UserError for a value of the wrong type or choice.
    """
    for field in dataclasses.fields(settings):
        if field.name in values and values[field.name] != getattr(settings, field.name):
            settings = _set(settings, field.name, values[field.name], where)
    return settings


def _assignments(file, settings):
    """What a config file assigns. It may read the settings so far, and keep names of its own that begin with _."""
    if not os.path.isfile(file):
        there = "is no regular file" if os.path.exists(file) else "does not exist"
        raise UserError(f"config file {file} {there}; flags are written --name=value")
    so_far = dataclasses.asdict(settings)
    try:
        found = runpy.run_path(file, init_globals=so_far)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # exit() too, which would end the script as if all were well
        raise UserError(f"config file {file} fails: {type(error).__name__}: {first_line(error)}") from error
    assigned = {k: v for k, v in found.items() if isinstance(k, str) and (k not in so_far or v is not so_far[k])}
    own = {k for k, v in assigned.items() if k.startswith("_") or callable(v) or isinstance(v, types.ModuleType)}
    return {k: v for k, v in assigned.items() if k not in own}


def _set(settings, name, value, where):
    """`settings` with the field `name` read from `value`: a flag's text, or a file's value, of the right type."""
    field = _field(settings, name, where)
    refused = f"{where}: {name}={shown(value)} is not allowed: it takes"
    try:
        new = _read(str(value), field)
        if where != COMMAND_LINE and new != value:  # in a file, steps = "5" is a mistake
            raise ValueError
    except ImportError:  # tyro is missing: no fault of the value
        raise
    except (Exception, SystemExit) as error:  # a file's value may be of any class, whose methods may raise anything
        raise UserError(f"{refused} {_allowed(field.type)}") from error
    if isinstance(new, int) and abs(new) > LARGEST:
        raise UserError(f"{refused} whole numbers below 2**63")
    if isinstance(new, str) and "\0" in new:
        raise UserError(f"{refused} text without the character NUL")
    return dataclasses.replace(settings, **{name: new})


def _read(text, field):
    """`text` as tyro reads it for a field. Raises ValueError if it does not fit."""
    import tyro

    # a parser for all fields is slow to build, and tyro searches source files for help that is not given
    annotation = typing.Annotated[field.type, tyro.conf.arg(help="-")]
    alone = dataclasses.make_dataclass("Alone", [(field.name, annotation)])
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            read = tyro.cli(alone, args=[f"--{field.name}={text}"], use_underscores=True, config=_plain())
    except SystemExit as error:
        raise ValueError(text) from error
    return getattr(read, field.name)


def _field(settings, name, where):
    fields = {f.name: f for f in dataclasses.fields(settings)}
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists every setting"
        if where != COMMAND_LINE:
            hint += " (a name of the file's own begins with _)"
        raise UserError(f"{where}: there is no setting {shown(name)}: {hint}")
    return fields[name]


def _allowed(annotation):
    """A type in words: `bool | Literal['auto']` is "True, False or 'auto'"."""
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
    """A dataclass with the `fields` (as dataclasses.make_dataclass takes them) and those of `bases`.

    It has the name and module of the first base, because tyro reads help from the comments in a class's source.
    """
    made = dataclasses.make_dataclass(bases[0].__name__, fields, bases=bases)
    made.__module__ = bases[0].__module__  # make_dataclass sets its own from Python 3.12 on
    if hasattr(bases[0], "__firstlineno__"):  # Python finds the source by it, from 3.13 on
        made.__firstlineno__ = bases[0].__firstlineno__
    return made


def _print_help(settings, description):
    import tyro

    options = dict(default=settings, use_underscores=True, config=_plain(), description=description)
    tyro.cli(type(settings), args=["--help"], **options)


def _plain():
    import tyro

    return (tyro.conf.FlagConversionOff,)  # --flag=True, not --flag and --no-flag
