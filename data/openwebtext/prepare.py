"""OpenWebText in GPT-2's BPE, with an end-of-text id after each document.

A fixed seed draws 0.05 % of the documents for validation, as nanoGPT does. The text is streamed; the bins need 36 GB
while they are written, then 18 GB. --input takes the same files and folders as data/text instead.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.data.texts import Hub
from fusedgpt.errors import one_sentence

PARQUET = "hf://datasets/Skylion007/openwebtext@7577b918bd30b25df0b88bb718dc8a6c80cb619b/data/train-*.parquet"


def main():
    """Write the bins of OpenWebText, or of --input."""
    args = prepare.parser(__file__, __doc__).parse_args()
    text = prepare.files(args) if args.input else Hub("Skylion007/openwebtext", PARQUET)
    prepare.prepare(text, "gpt2", args.out_dir, prepare.as_nanogpt, 0.0005, "config/train_gpt2.py")


if __name__ == "__main__":
    with one_sentence():
        main()
