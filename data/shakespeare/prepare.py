"""Tiny Shakespeare, or any text, in GPT-2's BPE; the last tenth of the text is for validation."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt import prepare, tokenizer
from fusedgpt.errors import one_sentence


def main():
    """Write the bins of tiny Shakespeare, or of --input, in GPT-2's BPE."""
    args = prepare.arguments(__file__, __doc__)
    text, source = prepare.read_text(__file__, args, *prepare.TINY_SHAKESPEARE)
    encode = tokenizer.tiktoken_bpe("gpt2").encode_ordinary
    cut = int(0.9 * len(text))
    splits = {"train": [encode(text[:cut])], "val": [encode(text[cut:])]}
    prepare.write(args.out_dir, splits, source, **tokenizer.GPT2)


if __name__ == "__main__":
    with one_sentence():
        main()
