"""Any text: .txt, .md, .csv, .json, .jsonl and .parquet, also with .gz or .zst, and folders of any mixture of them.

Each row of a table is a document; any other file is one. Whole documents are drawn for validation; from a single one,
the end is taken. Without --input, the file input.txt beside this script is read.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.data.corpus import Files
from fusedgpt.errors import UserError, one_sentence


def main():
    """Write the bins of --input."""
    parser = prepare.parser(__file__, __doc__)
    parser.add_argument("--text_column", default="text", metavar="NAME", help="column of a table; default: %(default)s")
    tokenizers = "byte, char, gpt2 or another of tiktoken's, a tokenizer.json, train:SIZE; default: %(default)s"
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME", help=tokenizers)
    parser.add_argument("--val_fraction", type=prepare.fraction, default=0.1, help="default: %(default)s")
    parser.add_argument("--documents", choices=["file", "paragraph"], default="file", help="a document in .txt and .md")
    args = parser.parse_args()
    paths = args.input or [prepare.beside(__file__)]
    if paths == [None]:
        raise UserError("no text was named: give files or folders with --input=PATH")
    text = Files(paths, args.text_column, args.documents == "paragraph", besides=args.out_dir / "meta.json")
    prepare.prepare(text, args.tokenizer, args.out_dir, lambda ends: prepare.draw(ends, args.val_fraction))


if __name__ == "__main__":
    with one_sentence():
        main()
