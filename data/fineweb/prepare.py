"""FineWeb 1.4.0's sample of 10 billion tokens, in GPT-2's BPE, with an end-of-text id after each document.

About 0.05 % of the documents are for validation. The text is streamed. --input takes local texts instead.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.data.texts import Hub
from fusedgpt.errors import one_sentence

PARQUET = "hf://datasets/HuggingFaceFW/fineweb@9bb295ddab0e05d785b879661af7260fed5140fc/sample/10BT/*.parquet"


def main():
    """Write the bins of FineWeb's sample, or of --input."""
    args = prepare.parser(__file__, __doc__).parse_args()
    text = prepare.files(args) if args.input else Hub("HuggingFaceFW/fineweb", PARQUET)
    prepare.prepare(text, "gpt2", args.out_dir, prepare.by_text, 0.0005, "config/train_gpt2.py")


if __name__ == "__main__":
    with one_sentence():
        main()
