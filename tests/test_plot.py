"""The loss of runs, drawn."""

import json
import shutil

from tests.conftest import fails, script


def test_the_loss_of_runs_is_drawn(small_run, tmp_path):
    run = shutil.copytree(small_run, tmp_path / "run")
    script("plot.py", str(run), str(run))
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "python plot.py OUT_DIR" in script("plot.py", "--help").stdout
    assert "metrics.jsonl does not exist" in fails("plot.py", str(tmp_path))
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "eval"
