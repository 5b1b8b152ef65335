"""Tiny Shakespeare, or any text, one id a character; the last tenth is for validation."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from parts import bins
from parts.errors import one_sentence

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def main():
    args = bins.arguments(__file__, __doc__)
    text, source = bins.text(args, URL, SHA256)
    itos = sorted(set(text))
    stoi = {c: i for i, c in enumerate(itos)}
    ids = np.array([stoi[c] for c in text])
    cut = int(0.9 * len(ids))
    splits = {"train": [ids[:cut]], "val": [ids[cut:]]}
    bins.write(args.out_dir, splits, source, tokenizer="char", vocab_size=len(itos), itos=itos)


if __name__ == "__main__":
    with one_sentence():
        main()
