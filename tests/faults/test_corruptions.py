"""Corrupt a checkpoint. A run goes on from a whole one, or ends in one sentence."""

import shutil

import pytest
import torch

from fusedgpt.errors import UserError
from fusedgpt.runs import checkpoint
from fusedgpt.runs.run_folder import load_best, load_latest
from tests.conftest import assert_same_bytes, tensors
from tests.faults.processes import rng

CORRUPTIONS = 20


def corrupt(raw, chance):
    """Bytes as a bad sector, a cut, a stray write or a flipped bit leave them."""
    raw = bytearray(raw)
    at, length = chance.randrange(len(raw)), chance.randint(1, 4096)
    kind = chance.choice(("flip", "cut", "zeros", "insert", "remove"))
    if kind == "flip":
        raw[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del raw[at:]
    elif kind == "zeros":
        raw[at : at + length] = bytes(len(raw[at : at + length]))
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
