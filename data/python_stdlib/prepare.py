"""The source of Python's standard library as bytes. Every machine that runs this script has it.

About a tenth of the files are for validation. Folders of tests and of installed packages are left out.
"""

import os
import pathlib
import platform
import sys
import sysconfig
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.errors import one_sentence

LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}


def main():
    """Write the bins of the standard library's source as bytes."""
    args = prepare.parser(__file__, __doc__, reading=False).parse_args()
    root, splits = pathlib.Path(sysconfig.get_path("stdlib")), {"train": [], "val": []}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if file.is_file() and not LEFT_OUT.intersection(path.parts):  # by its name, so that a file keeps its split
            tenth = zlib.crc32(os.fsencode(path.as_posix())) % 10 == 0
            splits["val" if tenth else "train"].append(bytearray(file.read_bytes() + b"\n"))
    count = sum(map(len, splits.values()))
    source = f"standard library of {platform.python_implementation()} {platform.python_version()} ({count} files)"
    prepare.write(args.out_dir, splits, source, "byte", 256, "config/quickstart.py")


if __name__ == "__main__":
    with one_sentence():
        main()
