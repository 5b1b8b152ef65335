"""A model in the Hub's cache, on a machine without a network; encodings of tiktoken that are quickly converted."""

import types

import pytest

from fusedgpt.data import tokenizer
from fusedgpt.data.tokenizer import byte_characters
from fusedgpt.interchange import tokenizer_json
from tests.fusedgpt.data.test_tokenizer import TEXT

COMMIT = "a" * 40


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """What the Hub's cache has of owner/name: the folder of its files, and that of files that the Hub said are absent.

    Both are empty.
    """
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models--owner--name"
    found = types.SimpleNamespace(files=folder / "snapshots" / COMMIT, absent=folder / ".no_exist" / COMMIT)
    for each in (found.files, found.absent, folder / "refs"):
        each.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return found


@pytest.fixture
def shorter(monkeypatch):
    """shorter(name): an encoding of tiktoken with its own pattern and special tokens, but 400 tokens of a text here.

    The project takes it for the whole encoding, whose file may not be here, and whose conversion takes seconds.
    """
    import tiktoken
    import tokenizers
    from tiktoken_ext import openai_public

    def made(name, **changes):
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        bpe.train_from_iterator([TEXT, "don't (2000) (2000) (2000) we'll the 漢字 they \n\n  I'll"] * 9, trainer)
        byte = {character: number for number, character in enumerate(byte_characters())}
        ranks = {bytes(byte[c] for c in token): rank for token, rank in bpe.get_vocab().items()}
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            monkeypatch.setattr(openai_public, loader, lambda *args, **kwargs: ranks)
        few = tiktoken.Encoding(**getattr(openai_public, name)() | {"explicit_n_vocab": None} | changes)
        for module in (tokenizer, tokenizer_json):
            monkeypatch.setattr(module, "tiktoken_bpe", lambda name: few)
        return few

    return made
