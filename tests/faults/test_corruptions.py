"""Corrupt every file of a run. The run goes on from a whole file, or ends in one sentence."""

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
from tests.conftest import assert_same_bytes, run, tensors, weights
from tests.faults.processes import rng

CORRUPTIONS = 20


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
    ("name", "load"), [("ckpt.pt", load_latest), ("best.pt", load_best), ("ckpt-5.pt", load_latest)]
)
def test_a_corrupted_checkpoint_is_never_taken_for_a_whole_one(small_run, tmp_path, tell, name, load):
    # of ckpt-5.pt, no other checkpoint is there; of best.pt, ckpt.pt says that it counts
    chance, broken, alone = rng(f"corrupt {name}"), tmp_path / "out", name == "ckpt-5.pt"
    shutil.copytree(small_run, broken)
    if alone:
        (broken / "ckpt.pt").unlink()
        (broken / "best.pt").unlink()
    if name == "best.pt":
        torch.save(torch.load(small_run / "ckpt.pt", weights_only=True) | {"best_iter": 5}, broken / "ckpt.pt")
        (broken / name).unlink()
        shutil.copy(small_run / "ckpt-5.pt", broken / name)
    originals = {path.name: content(checkpoint.load(path)) for path in broken.glob("*.pt")}
    raw, ends = (broken / name).read_bytes(), {"unharmed": 0, "fell back": 0, "refused": 0}
    for _ in range(CORRUPTIONS):
        (broken / name).write_bytes(corrupt(raw, chance))
        said = []
        try:
            saved, path = load(broken, said.append)
        except UserError:
            assert alone  # nothing to fall back to
            ends["refused"] += 1
            continue
        (found, rest), original = content(saved), originals[path.name]
        assert rest == original[1]
        assert_same_bytes(found, original[0])
        assert bool(said) == (alone or path.name != name)  # never in silence
        ends["unharmed" if path.name == name else "fell back"] += 1
    assert ends["refused" if alone else "fell back"] > 0.7 * CORRUPTIONS
    tell(f"{CORRUPTIONS} corruptions of {name}: {ends}")


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_a_corrupted_log_is_read_as_far_as_it_is_whole(small_run, tmp_path, tell, name):
    chance, lines, broken = rng(f"corrupt {name}"), [], tmp_path / "out"
    raw, record = (small_run / name).read_bytes(), record_of(small_run)
    record["settings"] |= dict(init_from="resume", max_iters=20)  # a finished run would keep its record
    for _ in range(CORRUPTIONS):
        shutil.copytree(small_run, broken, dirs_exist_ok=True)
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
    assert min(lines) < max(lines) == len(read_metrics(small_run)) or name == "run.json"
    tell(f"{CORRUPTIONS} corruptions of {name}")


@pytest.mark.slow
def test_a_run_goes_on_whichever_of_its_files_is_corrupted(tmp_path, data, tell):
    chance, folder, broken = rng("corrupt and resume"), tmp_path / "run", tmp_path / "out"
    run(folder, data, profile=True, dropout=0.1)  # all the files that a run can have
    plot.draw([Run(folder)], folder / "loss.png", "loss")
    whole = run(tmp_path / "whole", data, max_iters=20, dropout=0.1)
    names = sorted(path.name for path in folder.iterdir() if path.name != "ckpt-5.pt")
    for name in names:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(folder, broken)
        (broken / name).write_bytes(corrupt((folder / name).read_bytes(), chance))
        run(broken, data, max_iters=20, dropout=0.1, init_from="auto")
        for kept in ("ckpt.pt", "ckpt-15.pt", "best.pt"):
            assert_same_bytes(weights(broken, kept), weights(whole, kept))
    tell(f"{len(names)} runs with a corrupted file ended with the bytes of a whole one")
