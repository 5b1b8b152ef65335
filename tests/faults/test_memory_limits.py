"""Memory runs out in an evaluation, in a save, or anywhere. The run ends in one sentence and loses no checkpoint."""

import functools
import resource
import shutil
import sys

import pytest

from fusedgpt.runs import checkpoint, saver
from fusedgpt.training import evaluation
from tests.conftest import assert_same_bytes, run, small, weights
from tests.faults.processes import rng, start
from tests.launch import sentence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits all private memory on Linux only"),
]

MB = 10**6
# weights of 10 MB and hardly any activations, so that a save's copy does not fit into memory that a step has freed
SHAPE = dict(n_layer=3, n_embd=256, n_head=2, block_size=8, batch_size=1, eval_interval=5, eval_iters=1, dropout=0.1)
PLACES = {"evaluation": (evaluation, "evaluate"), "copy": (saver, "_copied"), "write": (checkpoint, "save")}
MARGINS = (0, 1, 16)  # MB that are left
HEIGHTS = 8


def limit(megabytes):
    """Limit the process to `megabytes` more than it has."""
    with open("/proc/self/status") as file:
        has = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (has + int(megabytes * MB), resource.RLIM_INFINITY))


def limit_at(place, megabytes):
    """Call `limit` at the first call of a place."""
    module, name = PLACES[place]
    whole = getattr(module, name)

    def limited(*args, **kwargs):
        limit(megabytes)
        setattr(module, name, whole)
        return whole(*args, **kwargs)

    setattr(module, name, limited)


@pytest.fixture(scope="module")
def begun(tmp_path_factory, data):
    """A run of 10 steps, which every case resumes, and the same run of 20."""
    folder = tmp_path_factory.mktemp("limits")
    for name, steps in (("begun", 10), ("whole", 20)):
        run(folder / name, data, max_iters=steps, **SHAPE)
    return folder


def resumed_with(limiting, begun, data, tmp_path):
    """Resume under the limit that `limiting` sets, and then without it. Returns whether the limit was hit."""
    out_dir, log = tmp_path / "out", tmp_path / "log"
    shutil.rmtree(out_dir, ignore_errors=True)
    log.unlink(missing_ok=True)
    shutil.copytree(begun / "begun", out_dir)
    settings = small(out_dir, data, max_iters=20, init_from="resume", **SHAPE)
    (process,) = start(settings, log, before=limiting)
    process.join(120)
    said = log.read_text()
    assert process.exitcode in (0, 1) and ("error: " in said) == process.exitcode, said[-3000:]
    assert checkpoint.load(out_dir / "ckpt.pt")["iter_num"] >= 10
    assert not list(out_dir.glob("previous-*"))
    if process.exitcode:
        assert "memory" in sentence(said)
        run(out_dir, data, max_iters=20, init_from="resume", **SHAPE)
    assert_same_bytes(weights(out_dir), weights(begun / "whole"))
    return process.exitcode


@pytest.mark.parametrize("place", PLACES)
def test_memory_runs_out_at(place, begun, data, tmp_path, tell):
    limits = [functools.partial(limit_at, place, megabytes) for megabytes in MARGINS]
    hit = [resumed_with(each, begun, data, tmp_path) for each in limits]
    assert any(hit) or place == "write"  # memory that a step has freed may be enough for the write
    tell(f"memory ran out after the begin of {place}: {sum(hit)} of {len(hit)} limits were hit")


def test_memory_runs_out_anywhere(begun, data, tmp_path, tell):
    chance = rng("memory")
    limits = [functools.partial(limit, chance.uniform(0, 130)) for _ in range(HEIGHTS)]
    hit = [resumed_with(each, begun, data, tmp_path) for each in limits]
    assert any(hit)
    tell(f"{HEIGHTS} limits on the memory of a run, {sum(hit)} of which it hit")
