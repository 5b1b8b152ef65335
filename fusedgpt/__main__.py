"""The command `fusedgpt`: the scripts by their names, in any folder.

    fusedgpt train config/quickstart.py              as python train.py config/quickstart.py
    fusedgpt prepare python_stdlib                   as python data/python_stdlib/prepare.py
    torchrun --nproc_per_node=8 -m fusedgpt train    as torchrun --nproc_per_node=8 train.py

A config file that is not in the current folder is taken from the project.
"""

import difflib
import pathlib
import runpy
import sys

from fusedgpt import home
from fusedgpt.errors import UserError, one_sentence

COMMANDS = ("train", "sample", "plot", "export", "study", "bench")  # each is a script


def data_sets() -> dict[str, pathlib.Path]:
    """The prepare scripts by the names of their data sets."""
    return {path.parent.name: path for path in sorted((home.SCRIPTS / "data").glob("*/prepare.py"))}


def _require(name, known, what):
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it can be {', '.join(known)}"
        raise UserError(f"there is no {what} {name!r}: {hint}")


def script_of(args: list[str]) -> tuple[pathlib.Path, list[str]]:
    """The script that `args` name, and the arguments for it. Raises UserError for an unknown name."""
    command, *rest = args
    _require(command, ("prepare", *COMMANDS), "command")
    if command != "prepare":
        return home.SCRIPTS / f"{command}.py", [_here_or_ours(arg) for arg in rest]
    name, *rest = rest or [""]
    _require(name, data_sets(), "data set")
    return data_sets()[name], rest


def _here_or_ours(arg):
    """`arg`, or the path of the project's own file if `arg` names a config file that is not here."""
    ours = home.SCRIPTS / arg
    if not arg.endswith(".py") or pathlib.Path(arg).exists() or not ours.is_file():
        return arg
    print(f"there is no {arg} here: taking {ours}", file=sys.stderr)
    return str(ours)


def main() -> None:
    """Run the script that the command line names, as `python SCRIPT` would. Without a command, print the help."""
    with one_sentence():
        if not sys.argv[1:] or sys.argv[1] in ("-h", "--help", "help") or sys.argv[1:] == ["prepare", "--help"]:
            print(__doc__, f"Commands: prepare, {', '.join(COMMANDS)}; each takes --help.", sep="\n")
            sys.exit(print(f"Data sets to prepare: {', '.join(data_sets())}"))
        script, args = script_of(sys.argv[1:])
    sys.argv, home.by_command = [str(script), *args], True
    sys.path[: 0 if sys.flags.safe_path else 1] = [str(script.parent)]  # as Python does for a script
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
