"""Everything that the scripts beside this folder share; each file has one job."""

import importlib.util
import pathlib
import sys

_CLONE = pathlib.Path(__file__).resolve().parents[1]
_ACTIVATE = _CLONE / ".venv" / ("Scripts/activate" if sys.platform == "win32" else "bin/activate")
# what to do if a package is missing
if _ACTIVATE.exists() and pathlib.Path(sys.prefix).resolve() != _CLONE / ".venv":
    INSTALL = f"activate the environment of this project: {'' if sys.platform == 'win32' else 'source '}{_ACTIVATE}"
elif not (_CLONE / "pyproject.toml").exists():  # an installed package
    INSTALL = "install this project again, with all it needs: python -m pip install CLONE, the path of a clone"
else:
    INSTALL = f"install what this project needs: make setup, or python -m pip install {_CLONE}"

# every import of this project passes here first, so a script that cannot run says so in one sentence
if sys.version_info < (3, 11):  # noqa: UP036 (it is read by older ones)
    sys.exit(f"error: {sys.executable} is Python {sys.version.split()[0]}, and 3.11 or newer is needed: {INSTALL}")
for _name in ("numpy", "torch"):
    if importlib.util.find_spec(_name) is None:
        sys.exit(f"error: {sys.executable} has no package {_name}: {INSTALL}")
