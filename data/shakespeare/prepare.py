"""Tiny Shakespeare, or any text, in GPT-2's BPE; the last tenth of the text is for validation."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from parts import bins, tokens
from parts.errors import one_sentence


def main():
    """Write the bins of tiny Shakespeare, or of --input, in GPT-2's BPE."""
    args = bins.arguments(__file__, __doc__)
    text, source = bins.text(args, *bins.TINY_SHAKESPEARE)
    encode = tokens.gpt2_bpe().encode_ordinary
    cut = int(0.9 * len(text))
    splits = {"train": [encode(text[:cut])], "val": [encode(text[cut:])]}
    bins.write(args.out_dir, splits, source, **tokens.GPT2)


if __name__ == "__main__":
    with one_sentence():
        main()
