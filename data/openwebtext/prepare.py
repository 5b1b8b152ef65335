"""OpenWebText in GPT-2's BPE, an end-of-text id after each document; 0.05 % of them, drawn by seed, for validation.

Needs some 54 GB in the cache of Hugging Face's `datasets` and 18 GB for the bins. It counts 9,035,582,198 and 4,434,897
tokens in nanoGPT's preparation of it. --input takes a local .txt (paragraphs are documents), .jsonl or .parquet with
a `text` column, or a folder of one of them. All cores tokenize, through files on disk: memory stays flat.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt import prepare, tokenizer
from fusedgpt.errors import UserError, first_line, one_sentence

# the Parquet files by name at one commit: the loading script beside them, which `datasets` refuses, is never looked at
PARQUET = "hf://datasets/Skylion007/openwebtext@7577b918bd30b25df0b88bb718dc8a6c80cb619b/data/train-*.parquet"
BUILDERS = {".txt": ("text", {"sample_by": "paragraph"}), ".jsonl": ("json", {}), ".parquet": ("parquet", {})}


def load(path):
    """The documents of `path` (None: OpenWebText), as a dataset with a column `text`, and the name of the source."""
    import datasets

    if path is None:
        return datasets.load_dataset("parquet", data_files=PARQUET, split="train"), "Skylion007/openwebtext"
    found = path.rglob("*") if path.is_dir() else [path]
    files = sorted(f for f in found if f.is_file() and (f.suffix in BUILDERS or f == path))
    suffixes = {f.suffix for f in files}
    if len(suffixes) != 1 or not suffixes <= BUILDERS.keys():
        found = ", ".join(sorted(suffixes)) or "none"
        raise UserError(f"--input={path} must be files of one kind, {', '.join(BUILDERS)}: found {found}")
    files = [f for f in files if f.stat().st_size]  # of empty ones, `datasets` makes no table
    if not files:
        raise UserError(f"--input={path} is empty: name text")
    builder, options = BUILDERS[suffixes.pop()]
    dataset = datasets.load_dataset(builder, data_files=[str(f) for f in files], split="train", **options)
    if "text" not in dataset.column_names:
        raise UserError(f"--input={path} has no column 'text', but {', '.join(dataset.column_names)}")
    kind, missing = str(dataset.data.schema.field("text").type), dataset.data.column("text").null_count
    if kind not in ("string", "large_string") or missing:
        found = f"its column 'text' is {kind}, with {missing} null"
        raise UserError(f"--input={path} must have a text in each row: {found}. Remove the rows that have none")
    return dataset, path.name


def encode(batch):
    bpe = tokenizer.tiktoken_bpe("gpt2")
    return {"ids": [[*ids, bpe.eot_token] for ids in bpe.encode_ordinary_batch(batch["text"], num_threads=1)]}


def arrays(dataset):
    """The ids of a thousand documents at a time, as one array, without a Python object an id."""
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        yield table["ids"].combine_chunks().flatten().to_numpy(zero_copy_only=False)


def tokenized(path):
    """The documents of `path` as a dataset with a column `ids`, and the name of the source."""
    from datasets import Features, List, Value

    dataset, source = load(path)
    if len(dataset) < 2:
        raise UserError(f"{source} holds {len(dataset)} documents: a split needs 2 or more")
    cores = min(os.cpu_count() or 1, len(dataset))
    ids = Features({"ids": List(Value("uint16"))})
    options = {"batched": True, "batch_size": 200, "num_proc": cores, "remove_columns": "text", "features": ids}
    return dataset.select_columns("text").map(encode, **options, desc="tokenizing"), source


def main():
    """Write the bins of OpenWebText, or of --input: its documents, tokenized on all cores."""
    args = prepare.arguments(__file__, __doc__)
    try:
        dataset, source = tokenized(args.input)
    except UserError:
        raise
    except Exception as error:  # `datasets` wraps what a bad file or a lost connection raises in types of its own
        cause = error.__cause__ or error
        raise UserError(
            f"cannot read {args.input or 'OpenWebText'}: {type(cause).__name__}: {first_line(cause)}"
        ) from error
    held_out = max(1, round(0.0005 * len(dataset)))
    split = dataset.train_test_split(test_size=held_out, seed=2357, shuffle=True)
    splits = {"train": arrays(split["train"]), "val": arrays(split["test"])}
    prepare.write(args.out_dir, splits, source, **tokenizer.GPT2)


if __name__ == "__main__":
    with one_sentence():
        main()
