"""What wandb is told."""

import sys
import types

import pytest

from fusedgpt import logger
from tests.conftest import rows, run


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package: what its functions were called with."""
    said = types.SimpleNamespace(settings=None, logged=[], finished=0)

    def finish():
        said.finished += 1

    module = types.SimpleNamespace(
        init=lambda **settings: setattr(said, "settings", settings),
        log=lambda metrics, step: said.logged.append((step, metrics)),
        finish=finish,
        errors=types.SimpleNamespace(Error=OSError),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return said


def test_wandb_gets_nanogpts_names_and_our_own_for_the_rest(tmp_path, data, wandb):
    # nanoGPT's dashboards plot train/loss, val/loss, lr and mfu in per cent: our own names left them empty
    names = dict(wandb_project="walks", wandb_run_name="first")
    run(tmp_path, data, max_iters=4, eval_interval=2, wandb_log=True, **names)
    want = [
        (
            m["iter"],
            {"iter": m["iter"]}
            | {f"{split}/loss": m[f"{split}_loss"] for split in ("train", "val")}
            | {f"{split}/bits_per_byte": m[f"{split}_bits_per_byte"] for split in ("train", "val")},
        )
        for m in rows(tmp_path, "eval")
    ]
    assert [(step, logged) for step, logged in wandb.logged if "val/loss" in logged] == want
    want = []
    for m in rows(tmp_path):
        logged = {"iter": m["iter"], "lr": m["lr"], "mfu": 100 * m["mfu"]}
        own = ("loss", "grad_norm", "ms", "tokens_per_s", "peak_memory")
        want.append((m["iter"], logged | {f"step/{name}": m[name] for name in own}))
    assert [(step, logged) for step, logged in wandb.logged if "val/loss" not in logged] == want
    steps = [step for step, _ in wandb.logged]
    assert steps == sorted(steps) == [0, 0, 1, 2, 2, 3, 4]  # wandb drops what is logged for an earlier step
    assert (wandb.settings["project"], wandb.settings["name"], wandb.finished) == ("walks", "first", 1)
    assert wandb.settings["config"]["settings"]["max_iters"] == 4


def test_the_page_of_a_long_run_is_made_by_another_process(tmp_path, data, monkeypatch):
    # to read 50,000 iterations took memory that the run then kept
    monkeypatch.setattr(logger, "READ_HERE", 0)
    monkeypatch.setattr(logger, "SHARE_OF_REPORTS", 1.0)
    monkeypatch.setattr(logger.run_report, "write", lambda *_: pytest.fail("here"))
    run(tmp_path, data)
    page = (tmp_path / "report.html").read_text()
    assert logger.run_report.RELOAD not in page and '"done": 10' in page
