"""What the ranks of a run tell each other."""

import sys

import pytest
import torch

from fusedgpt import distributed
from fusedgpt.errors import UserError
from tests.conftest import script

DRIFT = """
import sys, torch
from fusedgpt import distributed
ranks = distributed.ranks()
distributed.join(ranks, "gloo", torch.device("cpu"))
model = torch.nn.Linear(3, 2)
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.5)
distributed.require_same_weights(model, ranks, 6)
print("same at first")
if ranks.rank == 1:
    model.bias.data[1] = torch.nextafter(model.bias.data[1], torch.tensor(1.0))
try:
    distributed.require_same_weights(model, ranks, 7)
except ValueError as error:
    print(f"rank {ranks.rank}: {error}")
distributed.leave(ranks)
"""


def test_a_rank_that_drifts_by_one_bit_is_named_on_every_rank(tmp_path):
    (tmp_path / "drift.py").write_text(DRIFT)
    prefix = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = script(tmp_path / "drift.py", prefix=prefix, PYTHONPATH=".")
    assert done.stdout.count("same at first") == 2
    for rank in (0, 1):
        assert f"rank {rank}: after 7 steps, rank 1 no longer has the weights of rank 0 (1 differ, such as bias)" in (
            done.stdout
        )


def test_one_process_has_nobody_to_compare_with():
    distributed.require_same_weights(torch.nn.Linear(2, 2), distributed.Ranks(), 0)
    assert distributed.Ranks().gather("a") == ["a"]


def test_micro_steps_are_shared_evenly_or_refused():
    shares = [list(distributed.Ranks(rank, rank, 3).micro_steps(9)) for rank in range(3)]
    assert sorted(n for share in shares for n in share) == list(range(9)) and all(len(share) == 3 for share in shares)
    with pytest.raises(UserError, match="gradient_accumulation_steps=8 cannot be shared by 3 processes"):
        distributed.Ranks(0, 0, 3).micro_steps(8)


def test_a_launch_is_known_by_its_id_and_its_agent(monkeypatch):
    assert distributed.launch() is None and not distributed.restarted()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert distributed.launch()["id"] == "7" and distributed.restarted()
