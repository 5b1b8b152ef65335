"""Tiny Shakespeare, or any text, with one id per character; the last tenth is for validation."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.errors import one_sentence


def main():
    """Write the bins of tiny Shakespeare, or of --input."""
    args = prepare.parser(__file__, __doc__).parse_args()
    text = prepare.files(args, __file__, *prepare.TINY_SHAKESPEARE)
    prepare.prepare(text, "char", args.out_dir, prepare.by_text, 0.1, "config/train_shakespeare_cpu.py")


if __name__ == "__main__":
    with one_sentence():
        main()
