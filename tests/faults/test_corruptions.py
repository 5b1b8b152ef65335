"""Corrupt a checkpoint. A run goes on from a whole one."""

from fusedgpt.runs import checkpoint
from fusedgpt.runs.run_folder import load_latest
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


def test_a_corrupted_checkpoint_is_never_taken_for_a_whole_one(done):
    chance, originals = rng("corruptions"), {path.name: content(checkpoint.load(path)) for path in done.glob("*.pt")}
    raw, fell_back = (done / "ckpt.pt").read_bytes(), 0
    for _ in range(CORRUPTIONS):
        (done / "ckpt.pt").write_bytes(corrupt(raw, chance))
        said = []
        saved, path = load_latest(done, said.append)
        (found, rest), original = content(saved), originals[path.name]
        assert rest == original[1]
        assert_same_bytes(found, original[0])
        assert bool(said) == (path.name != "ckpt.pt")  # never in silence
        fell_back += path.name != "ckpt.pt"
    assert fell_back > 0.7 * CORRUPTIONS
