"""The source of Python's standard library as bytes. Every machine that runs this script has it.

About a tenth of the files are for validation. --input takes another folder of Python files, or one file, whose last
tenth is for validation. Folders of tests and of installed packages are left out.
"""

import os
import pathlib
import platform
import sys
import sysconfig
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.data.inputs import name_of
from fusedgpt.errors import UserError, one_sentence

LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}


def main():
    """Write the bins of the standard library's source, or of --input, as bytes."""
    args = prepare.parser(__file__, __doc__).parse_args()
    root = prepare.one_input(args) or pathlib.Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        raw = root.read_bytes()
        cut = int(0.9 * len(raw))
        splits, source = {"train": [raw[:cut]], "val": [raw[cut:]]}, root.name
    else:
        found = (f for f in root.rglob("*.py") if not LEFT_OUT.intersection(f.relative_to(root).parts))
        files = sorted(f for f in found if f.is_file())
        splits = {"train": [], "val": []}
        for file in files:  # by a checksum of the name, so that a file keeps its split if others come or go
            tenth = zlib.crc32(os.fsencode(file.relative_to(root).as_posix())) % 10 == 0
            splits["val" if tenth else "train"].append(file.read_bytes() + b"\n")
        if not files:
            raise UserError(f"{root} holds no .py files: give text with --input=PATH")
        if not all(splits.values()):
            empty = "train" if splits["val"] else "val"
            raise UserError(
                f"{root} has {len(files)} .py files, none of them for {empty}: give more, or only one, which is cut"
            )
        name = f"standard library of {platform.python_implementation()} {platform.python_version()}"
        if args.input:
            name = name_of(root)
        source = f"{name} ({len(files)} files)"
    import numpy as np  # after fusedgpt, which says what to do if it is missing

    ids = {split: (np.frombuffer(raw, np.uint8) for raw in raws) for split, raws in splits.items()}
    prepare.write(args.out_dir, ids, source, tokenizer="byte", vocab_size=256)
    prepare.say_next(args.out_dir, "config/quickstart.py", "python_stdlib")


if __name__ == "__main__":
    with one_sentence():
        main()
