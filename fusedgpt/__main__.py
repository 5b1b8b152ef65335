"""The command `fusedgpt`: the scripts by their names, in any folder.

    fusedgpt train config/quickstart.py              as python train.py config/quickstart.py
    fusedgpt prepare python_stdlib                   as python data/python_stdlib/prepare.py
    torchrun --nproc_per_node=8 -m fusedgpt train    as torchrun --nproc_per_node=8 train.py

A config file that is not in the current folder is taken from the project.
"""

import pathlib
import runpy
import sys

from fusedgpt import home
from fusedgpt.errors import UserError, one_sentence

COMMANDS = ("train", "sample", "plot", "export", "study", "bench")  # each is a script


def data_sets() -> dict[str, pathlib.Path]:
    """The prepare scripts by the names of their data sets."""
    return {path.parent.name: path for path in sorted((home.SCRIPTS / "data").glob("*/prepare.py"))}


def script_of(args: list[str]) -> tuple[pathlib.Path, list[str]]:
    """The script that `args` name, and the arguments for it. Raises UserError for an unknown name."""
    command, *rest = args
    if command in COMMANDS:
        return home.SCRIPTS / f"{command}.py", rest
    if command != "prepare":
        raise UserError(f"there is no command {command!r}: it can be prepare, {', '.join(COMMANDS)}")
    name, *rest = rest or [""]
    if name not in data_sets():
        raise UserError(f"there is no data set {name!r}: it can be {', '.join(data_sets())}")
    return data_sets()[name], rest


def main() -> None:
    """Run the script that the command line names, as `python SCRIPT` would. Without a command, print the help."""
    with one_sentence():
        if sys.argv[1:2] in ([], ["-h"], ["--help"], ["help"]):
            print(__doc__, f"Commands: prepare, {', '.join(COMMANDS)}; each takes --help.", sep="\n")
            sys.exit(print(f"Data sets to prepare: {', '.join(data_sets())}"))
        script, args = script_of(sys.argv[1:])
    sys.argv = [str(script), *args]
    sys.path[: 0 if sys.flags.safe_path else 1] = [str(script.parent)]  # as Python does for a script
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
