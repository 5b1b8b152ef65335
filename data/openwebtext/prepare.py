"""OpenWebText in GPT-2's BPE, with an end-of-text id after each document.

A fixed seed draws 0.05 % of the documents for validation. The preparation needs some 54 GB in the cache of Hugging
Face's `datasets`, and 36 GB for the bins while they are written, then 18 GB. In nanoGPT's preparation the splits have
9,035,582,198 and 4,434,897 tokens. --input takes the same files and folders as data/text instead; each paragraph is
a document.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.data.corpus import Hub
from fusedgpt.errors import one_sentence

# the Parquet files of one commit, by their paths, because `datasets` refuses the loading script beside them
PARQUET = "hf://datasets/Skylion007/openwebtext@7577b918bd30b25df0b88bb718dc8a6c80cb619b/data/train-*.parquet"


def main():
    """Write the bins of OpenWebText, or of --input, with documents in the same order as nanoGPT's."""
    parser = prepare.parser(__file__, __doc__)
    prepare.add_reading(parser)
    args = parser.parse_args()
    text = Hub("Skylion007/openwebtext", streaming=False, path="parquet", data_files=PARQUET)
    if args.input:
        text = prepare.files(args, paragraphs=True)
    prepare.prepare(text, "gpt2", args.out_dir, lambda ends: prepare.draw(ends, 0.0005, shuffled=True))
    prepare.say_next(args.out_dir, "config/train_gpt2.py", "openwebtext")


if __name__ == "__main__":
    with one_sentence():
        main()
