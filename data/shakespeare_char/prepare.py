"""Tiny Shakespeare, or any text, one id a character; the last tenth is for validation."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from fusedgpt import prepare
from fusedgpt.errors import one_sentence


def main():
    """Write the bins of tiny Shakespeare, or of --input, by characters."""
    args = prepare.arguments(__file__, __doc__)
    text, source = prepare.read_text(__file__, args, *prepare.TINY_SHAKESPEARE)
    itos = sorted(set(text))
    stoi = {c: i for i, c in enumerate(itos)}
    ids = np.array([stoi[c] for c in text])
    cut = int(0.9 * len(ids))
    splits = {"train": [ids[:cut]], "val": [ids[cut:]]}
    prepare.write(args.out_dir, splits, source, tokenizer="char", vocab_size=len(itos), itos=itos)


if __name__ == "__main__":
    with one_sentence():
        main()
