"""nanoGPT's recipe by two programs: their times, their losses, and nothing that they leave behind."""

import os
import subprocess
import sys
import types

import pytest

from fusedgpt.bench import child, recipe
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.nanogpt import TRAIN
from tests.fusedgpt.bench.small import run
from tests.fusedgpt.bench.test_peers import SIZES

NANOGPT = os.environ.get("NANOGPT")


def test_nanogpts_train_py_runs_as_it_is_and_leaves_nothing_behind(tmp_path, data):
    (tmp_path / "model.py").touch()
    (tmp_path / "train.py").write_text(f"import model\n{TRAIN}")
    s = types.SimpleNamespace(dataset=str(data), iterations=8, nanogpt=str(tmp_path))
    theirs = recipe.run("nanoGPT", s, tmp_path)
    assert theirs["samples_ms"] == [5.25, 6.25, 7.25, 8.25] and theirs["median_ms"] == pytest.approx(6.75)
    assert (theirs["first_loss"], theirs["val_loss"]) == (4.0, 4.1234)
    assert {path.name for path in tmp_path.iterdir()} == {"model.py", "train.py"}
    (tmp_path / "train.py").write_text("print('step 0: train loss 1.0, val loss 1.0')")
    with pytest.raises(UserError, match="printed 0 lines like"):
        recipe.run("nanoGPT", s, tmp_path)


def test_a_command_counts_the_cpu_time_of_its_process(tmp_path, data, monkeypatch):
    def theirs(*_):
        spin = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
        return {"done": subprocess.run([sys.executable, "-c", spin], check=True)}

    monkeypatch.setattr(recipe, "_theirs", theirs)
    s = types.SimpleNamespace(dataset=str(data), nanogpt="")
    assert 0.25 < recipe.command("nanoGPT", s, tmp_path)["cpu_seconds"] < 2


@pytest.mark.timeout(600)
@pytest.mark.slow  # whole commands, whose seconds were once measured by hand: the start of Python and PyTorch counts
def test_whole_commands_are_timed(tmp_path, data, clone, short_recipe, processes):
    changes = SIZES | dict(nanogpt=str(clone), only="*manual,command")
    visit, ours, theirs = run("peers", tmp_path, data, **changes)
    assert visit["peer"] == "ours, float32, manual" and visit["median_ms"] > 0
    assert ours["tokens"] == 10 * 24 * 64 and theirs["tokens"] == 2000 * 12 * 64
    for row in (ours, theirs):
        assert row["samples_ms"] == [row["median_ms"]] == [1e3 * row["seconds"]]
    assert ours["seconds"] > 1
    text = (tmp_path / "results" / "peers" / "report.md").read_text()
    assert "A whole command: nanoGPT " in text and "`ours` is `train.py config/train_shakespeare_cpu.py`" in text


@pytest.mark.skipif(not NANOGPT, reason="NANOGPT names no clone of nanoGPT")
def test_nanogpts_own_train_py(tmp_path, data):
    s = types.SimpleNamespace(dataset=str(data), iterations=8, nanogpt=NANOGPT)
    found = recipe.run("nanoGPT", s, tmp_path)
    assert len(found["samples_ms"]) == 9 - child.WARM_UP and 3 < found["val_loss"] < 5
