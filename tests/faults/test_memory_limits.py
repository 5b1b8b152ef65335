"""Memory runs out in an evaluation or in a save. The run ends in one sentence and loses no checkpoint."""

import functools
import resource
import sys

import pytest
import torch

from fusedgpt.runs import checkpoint
from fusedgpt.training import evaluation
from tests.conftest import run, small
from tests.faults.processes import start
from tests.launch import sentence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits all private memory on Linux only"),
]

# weights of 10 MB and hardly any activations, so that a save's copy does not fit into memory that a step has freed
SHAPE = dict(n_layer=3, n_embd=256, n_head=2, block_size=8, batch_size=1, eval_interval=5, eval_iters=1, dropout=0.1)
PLACES = {"evaluation": (evaluation, "evaluate"), "write": (checkpoint, "save")}


def limit():
    """Leave this process the memory that it has."""
    with open("/proc/self/status") as file:
        has = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (has, resource.RLIM_INFINITY))


def limit_at(place):
    """Leave no memory at the first call of a place. An evaluation needs more there than a step has freed."""
    module, name = PLACES[place]
    whole = getattr(module, name)

    def limited(*args, **kwargs):
        limit()
        setattr(module, name, whole)
        if place == "evaluation":
            torch.zeros(2**28)
        return whole(*args, **kwargs)

    setattr(module, name, limited)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_whose_memory_runs_out_ends_in_one_sentence_and_goes_on_later(place, data, tmp_path):
    out_dir, log = run(tmp_path / "out", data, max_iters=10, **SHAPE), tmp_path / "log"
    settings = dict(max_iters=15, init_from="resume", **SHAPE)
    (process,) = start(small(out_dir, data, **settings), log, before=functools.partial(limit_at, place))
    process.join(120)
    said = log.read_text()
    assert process.exitcode in (0, 1) and ("error: " in said) == process.exitcode, said[-3000:]
    assert process.exitcode or place == "write"  # memory that a step has freed may be enough for the write
    assert checkpoint.load(out_dir / "ckpt.pt")["iter_num"] >= 10 and not list(out_dir.glob("previous-*"))
    if process.exitcode:
        assert "memory" in sentence(said)
        run(out_dir, data, **settings)
        assert checkpoint.load(out_dir / "ckpt.pt")["iter_num"] == 15
