"""The loss of a model, in nats per token and in bits per byte."""

import math
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fusedgpt.data import dataset, prepare, tokenizer
from fusedgpt.data.dataloader import DataLoader
from fusedgpt.errors import UserError
from fusedgpt.parallel.distributed import Ranks
from fusedgpt.training import evaluation
from model import GPT, GPTConfig
from tests.conftest import rows, run

CPU = torch.device("cpu")
TEXT = "Ein Käse für zwei Euro, drei Käse für fünf 🧀. " * 8


@pytest.fixture
def characters(tmp_path):
    """A data folder of TEXT by characters, of one to four bytes each."""
    itos = sorted(set(TEXT))
    ids = np.array([itos.index(c) for c in TEXT])
    prepare.write(tmp_path, {"train": [ids], "val": [ids[:101]]}, "cheese", "char", len(itos), itos=itos)
    return tmp_path


def losses(folder, model, windows, meta=None, stopped_by=()):
    meta = meta or dataset.read_meta(folder)
    loader = DataLoader(folder, meta, 8, 4, 0, CPU)
    sizes, status = evaluation.token_bytes(meta, Ranks(), CPU, [].append, [].append), []
    cast = torch.autocast("cpu", enabled=False)
    found = evaluation.evaluate(model, loader, cast, Ranks(), sizes, stopped_by, status.append, windows)
    assert stopped_by or status[-1] == f"evaluating, batch {len(status)} of {len(status)}"
    return found


def test_all_of_a_split_against_a_sum_in_float64(characters):
    torch.manual_seed(0)
    meta = dataset.read_meta(characters)
    model = GPT(GPTConfig(8, meta["vocab_size"], 1, 2, 16, dropout=0.5)).train()
    found = losses(characters, model, 0)
    assert model.training
    model.eval()  # as the evaluation must: with dropout, each loss would differ
    ids = torch.from_numpy(np.fromfile(characters / "val.bin", "<u2").astype(np.int64))
    nats = 0.0
    with torch.no_grad():
        for start in range(0, 100, 8):  # the evaluation's windows; the last one is moved back
            place = min(start, 92)
            z, _ = model(ids[None, place : place + 8], ids[None, place + 1 : place + 9])
            each = F.cross_entropy(z[0].double(), ids[place + 1 : place + 9], reduction="none")
            nats += each[start - place :].sum().item()
    assert found["val_loss"] == pytest.approx(nats / 100, rel=1e-6)
    size = len("".join(TEXT[1:101]).encode())
    assert found["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_without_a_tokenizer_there_is_a_loss_alone(characters):
    # a meta.pkl of nanoGPT's that has only a size must not end the run
    meta = {"tokenizer": "unknown", "vocab_size": dataset.read_meta(characters)["vocab_size"]}
    found = losses(characters, GPT(GPTConfig(8, meta["vocab_size"], 1, 2, 16)), 0, meta)
    assert found.keys() == {"train_loss", "val_loss"}


def test_a_tokenizer_that_is_not_here_is_said_once(tmp_path, data, capsys, monkeypatch):
    # tiktoken was asked in silence, and bits per byte were missing without a word
    monkeypatch.setattr(tokenizer, "tiktoken_bpe", Mock(side_effect=UserError("cannot load the BPE files of gpt2")))
    for name in ("train.bin", "val.bin"):
        shutil.copy(data / name, tmp_path)
    (tmp_path / "meta.json").write_text('{"tokenizer": "gpt2", "vocab_size": 50257, "dtype": "uint16"}')
    run(tmp_path / "out", tmp_path, max_iters=1)
    said = capsys.readouterr().out
    assert said.count("evaluations have no bits per byte: cannot load the BPE files of gpt2\n") == 1
    assert len(rows(tmp_path / "out", "eval")) == 2
