"""A model in the Hub's cache, on a machine without a network."""

import types

import pytest

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
