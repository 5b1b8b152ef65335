"""Any text: .txt, .md, .csv, .json, .jsonl and .parquet files, also with .gz or .zst, and folders of them.

Each row of a table is a document, and each other file is one. Validation gets whole documents, or the end of the text
if there is only one. Without --input, the script reads input.txt in its own folder.
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
    parser.add_argument("--text_column", default="text", metavar="NAME", help="column with text; default: %(default)s")
    tokenizers = "byte, char, gpt2 or another of tiktoken's, a tokenizer.json, train:SIZE; default: %(default)s"
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME", help=tokenizers)
    share = "share of the text for validation; default: %(default)s"
    parser.add_argument("--val_fraction", type=prepare.fraction, default=0.1, help=share)
    documents = "what is a document in .txt and .md files; default: %(default)s"
    parser.add_argument("--documents", choices=["file", "paragraph"], default="file", help=documents)
    args = parser.parse_args()
    paths = args.input or [prepare.beside(__file__)]
    if paths == [None]:
        raise UserError("no text was named: give files or folders with --input=PATH")
    text = Files(paths, args.text_column, args.documents == "paragraph", besides=args.out_dir / "meta.json")
    prepare.prepare(text, args.tokenizer, args.out_dir, lambda ends: prepare.draw(ends, args.val_fraction))


if __name__ == "__main__":
    with one_sentence():
        main()
