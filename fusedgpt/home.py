"""Where the scripts are, and where data sets go: in a clone, and if the package was installed without one."""

import os
import pathlib
import re
import shlex

_IN_A_WHEEL = pathlib.Path(__file__).resolve().parent / "scripts"  # pyproject.toml puts the top of a clone there
INSTALLED = _IN_A_WHEEL.is_dir()  # an editable install is a clone too
# the folder with train.py and the other scripts, config/ and data/*/prepare.py
SCRIPTS = _IN_A_WHEEL if INSTALLED else _IN_A_WHEEL.parents[1]
# data sets are in ROOT/data: in the clone, or in the current folder, because installed files are not to be written to
ROOT = pathlib.Path() if INSTALLED else SCRIPTS


def as_called(sentence: str) -> str:
    """A sentence that names commands of a clone, with the commands that are here, so that they run in this folder."""
    if not INSTALLED:
        if os.path.samefile(".", SCRIPTS):
            return sentence
        ours = r"(?<=python )[\w/]+\.py|(?<=\.py )config/[\w/-]+\.py"
        return re.sub(ours, lambda found: shlex.quote(str(SCRIPTS / found[0])), sentence)
    sentence = re.sub(r"python data/(\w+)/prepare\.py", r"fusedgpt prepare \1", sentence)
    sentence = re.sub(r"(torchrun .*?) (\w+)\.py", r"\1 -m fusedgpt \2", sentence)
    return re.sub(r"python (\w+)\.py", r"fusedgpt \1", sentence)


def data_folder(script: str) -> pathlib.Path:
    """The folder for the data of a prepare script, the path `script`: its own, or data/NAME here if installed."""
    own = pathlib.Path(script).resolve().parent
    return ROOT / own.relative_to(SCRIPTS) if own.is_relative_to(SCRIPTS) else own
