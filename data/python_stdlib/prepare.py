"""The source of Python's standard library as bytes. Every machine that runs this script has it.

About a tenth of the files are for validation. --input takes another folder of Python files. Folders of tests and of
installed packages are left out.
"""

import os
import pathlib
import platform
import sys
import sysconfig
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.data.texts import require_there
from fusedgpt.errors import UserError, one_sentence

LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}


def main():
    """Write the bins of the standard library's source, or of --input, as bytes."""
    import numpy as np  # after fusedgpt, which says what to do if it is missing

    args = prepare.parser(__file__, __doc__, reading=False).parse_args()
    name = f"standard library of {platform.python_implementation()} {platform.python_version()}"
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    if args.input:
        root, name = args.input[0], args.input[0].absolute().name
        require_there(root)
    splits = {"train": [], "val": []}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if file.is_file() and not LEFT_OUT.intersection(path.parts):  # by its name, so that a file keeps its split
            tenth = zlib.crc32(os.fsencode(path.as_posix())) % 10 == 0
            splits["val" if tenth else "train"].append(np.frombuffer(file.read_bytes() + b"\n", np.uint8))
    count = sum(map(len, splits.values()))
    if not all(splits.values()) or len(args.input) > 1:
        raise UserError(f"{root} has {count} .py files, too few for two splits: name one folder with more")
    prepare.write(args.out_dir, splits, f"{name} ({count} files)", tokenizer="byte", vocab_size=256)
    prepare.say_next(args.out_dir, "config/quickstart.py")


if __name__ == "__main__":
    with one_sentence():
        main()
