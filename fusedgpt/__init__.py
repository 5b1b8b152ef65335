"""Everything that the scripts beside this folder share; each file has one job."""

import importlib.util
import sys

# what to do if a package is missing
INSTALL = "activate the environment (source .venv/bin/activate), or make one in a clone: make setup, or pip install ."

# every import of this project passes here first, so a script that cannot run says so in one sentence
if sys.version_info < (3, 11):  # noqa: UP036 (it is read by older ones)
    sys.exit(f"error: {sys.executable} is Python {sys.version.split()[0]}, and 3.11 or newer is needed: {INSTALL}")
for _name in ("numpy", "torch"):
    if importlib.util.find_spec(_name) is None:
        sys.exit(f"error: {sys.executable} has no package {_name}: {INSTALL}")
