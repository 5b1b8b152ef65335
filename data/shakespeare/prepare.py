"""Tiny Shakespeare, or any text, in GPT-2's BPE; the last tenth of the text is for validation."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.data.tokenizer import GPT2, Tokenizer
from fusedgpt.errors import one_sentence


def main():
    """Write the bins of Shakespeare, or of --input. The text is cut before it is tokenized, as in nanoGPT."""
    args = prepare.parser(__file__, __doc__).parse_args()
    corpus = prepare.files(args, __file__, *prepare.TINY_SHAKESPEARE)
    text = "".join(text + "\n" * last for file in corpus.files for text, last in corpus.read(file))[:-1]
    encode = Tokenizer(GPT2).encode_text
    cut = int(0.9 * len(text))
    splits = {"train": [encode(text[:cut])], "val": [encode(text[cut:])]}
    prepare.write(args.out_dir, splits, corpus.source, config="config/finetune_shakespeare.py", **GPT2)


if __name__ == "__main__":
    with one_sentence():
        main()
