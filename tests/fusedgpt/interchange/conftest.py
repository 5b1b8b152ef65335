"""A model in the Hub's cache, on a machine without a network; encodings of tiktoken that are quickly converted."""

import types

import pytest

from fusedgpt.data import tokenizer
from fusedgpt.interchange import tokenizer_json
from tests.conftest import why_no_bpe

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
    """shorter(name): an encoding of tiktoken with its own pattern and special tokens, but GPT-2's first 3,000 tokens.

    All 50,000 take seconds, and those of other encodings are not here. The project takes it for the whole encoding.
    """
    if reason := why_no_bpe():
        pytest.skip(reason)
    import tiktoken
    from tiktoken_ext import openai_public

    def made(name, **changes):
        ranks = tokenizer.tiktoken_bpe("gpt2")._mergeable_ranks
        few = dict(sorted(ranks.items(), key=lambda each: each[1])[:3000])
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            monkeypatch.setattr(openai_public, loader, lambda *args, **kwargs: few)
        bpe = tiktoken.Encoding(**getattr(openai_public, name)() | {"explicit_n_vocab": None} | changes)
        for module in (tokenizer, tokenizer_json):
            monkeypatch.setattr(module, "tiktoken_bpe", lambda name: bpe)
        return bpe

    return made
