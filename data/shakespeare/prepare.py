"""Tiny Shakespeare, or any text, in GPT-2's BPE; the last tenth of the text is for validation."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.data.corpus import Halves
from fusedgpt.errors import one_sentence


def split(ends):
    """The ranges (start, stop) of the two parts."""
    import numpy as np  # after fusedgpt, which says what to do if it is missing

    return {"train": np.array([[0, ends[0]]]), "val": np.array([[ends[0], ends[-1]]])}


def main():
    """Write the bins of Shakespeare, or of --input. The text is split before it is tokenized, as in nanoGPT."""
    parser = prepare.parser(__file__, __doc__)
    prepare.add_reading(parser)
    args = parser.parse_args()
    text = prepare.one_text(__file__, args, *prepare.TINY_SHAKESPEARE)
    prepare.prepare(Halves(text, 0.9), "gpt2", args.out_dir, split, ended=False)
    prepare.say_next(args.out_dir, "config/finetune_shakespeare.py", "shakespeare")


if __name__ == "__main__":
    with one_sentence():
        main()
