"""Corrupt every file of a run 400 times. The run goes on from a whole file, or ends in one sentence."""

import json
import shutil

import pytest
import torch

import plot
from fusedgpt.errors import UserError
from fusedgpt.machine.files import lock
from fusedgpt.runs import checkpoint
from fusedgpt.runs.logger import Logger
from fusedgpt.runs.metrics import Run, read_metrics, record_of
from fusedgpt.runs.run_folder import load_best, load_latest
from tests.conftest import assert_same_bytes, run, small, tensors, weights
from tests.faults.processes import finish, rng, start

pytestmark = pytest.mark.slow

CORRUPTIONS = 400
TIMES = 5  # corruptions of each file before train.py itself resumes the run


@pytest.fixture(scope="module")
def folder(tmp_path_factory, data):
    """A finished run that has all the files a run can have. Tests corrupt copies."""
    folder = run(tmp_path_factory.mktemp("run") / "out", data, profile=True, dropout=0.1)
    plot.draw([Run(folder)], folder / "loss.png", "loss")
    return folder


def corrupt(raw, chance):
    """Bytes as a bad sector, a cut, a stray write or a flipped bit leave them."""
    raw = bytearray(raw)
    at, length = chance.randrange(len(raw)), chance.randint(1, 4096)
    kind = chance.choice(("flip", "cut", "zeros", "noise", "insert", "remove"))
    if kind == "flip":
        raw[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del raw[at:]
    elif kind == "zeros":
        raw[at : at + length] = bytes(len(raw[at : at + length]))
    elif kind == "noise":
        raw[at : at + length] = chance.randbytes(len(raw[at : at + length]))
    elif kind == "insert":
        raw[at:at] = chance.randbytes(length)
    else:
        del raw[at : at + length]
    return bytes(raw)


def content(saved):
    """All that a checkpoint says, as text and tensors that can be compared."""
    kept = {name: value.clone() for name, value in tensors(saved).items()}  # not mapped from a file that changes
    rest = {key: value for key, value in saved.items() if key not in ("model", "optimizer")}
    return kept, repr([sorted(rest.items()), saved["optimizer"]["param_groups"]])


@pytest.mark.parametrize(
    ("name", "load", "others"),
    [("ckpt.pt", load_latest, {}), ("best.pt", load_best, {"ckpt.pt": 5}), ("ckpt-5.pt", load_latest, None)],
)
def test_checkpoints(folder, tmp_path, tell, name, load, others):
    # others: best_iter to write into other files, so that best.pt counts; None: no other checkpoint is there
    chance, ends, broken = rng(f"corrupt {name}"), {"unharmed": 0, "fell back": 0, "refused": 0}, tmp_path / "out"
    shutil.copytree(folder, broken)
    for path in broken.glob("*.pt") if others is None else ():
        if path.name != name:
            path.unlink()
    for other, best_iter in (others or {}).items():
        torch.save(torch.load(folder / other, weights_only=True) | {"best_iter": best_iter}, broken / other)
    originals = {path.name: content(checkpoint.load(path)) for path in broken.glob("*.pt")}
    raw = (broken / name).read_bytes()
    for _ in range(CORRUPTIONS):
        (broken / name).write_bytes(corrupt(raw, chance))
        said = []
        try:
            saved, path = load(broken, said.append)
        except UserError:
            assert others is None  # nothing to fall back to
            ends["refused"] += 1
            continue
        (found, rest), original = content(saved), originals[path.name]
        assert rest == original[1]
        assert_same_bytes(found, original[0])
        assert bool(said) == (others is None or path.name != name)  # never in silence
        ends["unharmed" if path.name == name else "fell back"] += 1
    assert ends["refused" if others is None else "fell back"] > 0.8 * CORRUPTIONS
    tell(f"{CORRUPTIONS} corruptions of {name}: {ends}")


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_what_stands_beside(folder, tmp_path, tell, name):
    chance, lines = rng(f"corrupt {name}"), []
    raw, record = (folder / name).read_bytes(), record_of(folder)
    record["settings"] |= dict(init_from="resume", max_iters=20)  # a finished run would keep its record
    for _ in range(CORRUPTIONS):
        broken = tmp_path / "out"
        shutil.copytree(folder, broken, dirs_exist_ok=True)
        (broken / name).write_bytes(corrupt(raw, chance))
        logger = Logger(main=True)
        logger.open(broken, 10, dict(record), lock(broken))
        logger.iteration({"iter": 10, "loss": float("nan")}, to_console=False)
        logger.close()
        text = (broken / "metrics.jsonl").read_text()
        strict = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
        assert strict[-1] == {"kind": "train", "iter": 10, "loss": None}
        lines.append(len(read_metrics(broken)))
        assert record_of(broken)["settings"] == record["settings"]
    assert min(lines) < max(lines) == len(read_metrics(folder)) or name == "run.json"
    plot.draw([Run(broken)], tmp_path / "loss.png", "loss")
    tell(f"{CORRUPTIONS} corruptions of {name}")


def test_resumed_by_train_itself(folder, tmp_path, data, tell):
    chance, log = rng("corrupt and resume"), tmp_path / "log"
    whole = run(tmp_path / "whole", data, max_iters=20, dropout=0.1)
    names = sorted(path.name for path in folder.iterdir() if path.name != "ckpt-5.pt")
    for name in names * TIMES:
        broken = tmp_path / "out"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(folder, broken)
        (broken / name).write_bytes(corrupt((folder / name).read_bytes(), chance))
        finish(start(small(broken, data, max_iters=20, dropout=0.1, init_from="auto"), log), log)
        for kept in ("ckpt.pt", "ckpt-15.pt", "best.pt"):
            assert_same_bytes(weights(broken, kept), weights(whole, kept))
    tell(f"{len(names) * TIMES} runs with a corrupted file ended with the bytes of a whole one")
