"""Your own text: plain text, web pages, Word, EPUB, PDF, mail, CSV, JSON, Parquet …, and folders of them.

Each row of a table and each mail is a document, and each other file is one. Files may be packed, as .gz, .zst, .xz,
.bz2 or .zip. Documents need pypandoc-binary and pypdf[crypto]. Without --input, input.txt beside this script is read.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.errors import UserError, one_sentence


def main():
    """Write the bins of --input."""
    parser = prepare.parser(__file__, __doc__)
    tokenizers = "byte, char, gpt2 or another of tiktoken's, a tokenizer.json, train:SIZE; default: %(default)s"
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME", help=tokenizers)
    parser.add_argument("--val_fraction", type=float, default=0.1, help="share for validation; default: %(default)s")
    args = parser.parse_args()
    if not 0 < args.val_fraction < 1:
        raise UserError(f"--val_fraction={args.val_fraction} is not between 0 and 1")
    text = prepare.files(args, __file__)
    prepare.prepare(text, args.tokenizer, args.out_dir, prepare.by_text, args.val_fraction, "config/train_text_cpu.py")


if __name__ == "__main__":
    with one_sentence():
        main()
