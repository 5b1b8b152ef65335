"""The loss of runs, drawn."""

import json
import math
import shutil

import plot
from tests.conftest import fails, script


def test_the_loss_of_runs_is_drawn(small_run, tmp_path):
    run = shutil.copytree(small_run, tmp_path / "run")
    script("plot.py", str(run), str(run))
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "python plot.py OUT_DIR" in script("plot.py", "--help").stdout
    assert "metrics.jsonl does not exist" in fails("plot.py", str(tmp_path))
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "eval"


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path):
    # null in metrics.jsonl, because JSON has no NaN
    lines = [{"kind": "train", "iter": n, "loss": None if n == 1 else 2.0} for n in range(3)]
    lines += [{"kind": "eval", "iter": n, "train_loss": 1.0, "val_loss": None} for n in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps, losses = plot.series(tmp_path, "train", "loss")
    assert steps == [0, 1, 2] and losses[::2] == [2.0, 2.0] and math.isnan(losses[1])
    plot.draw([str(tmp_path)], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_damaged_lines_are_left_out(tmp_path):
    # a line without its loss used to be a KeyError
    lines = [
        '{"kind": "train", "iter": 1}',
        '{"kind": "train", "iter": "x", "loss": 1}',
        '{"iter": 2, "loss": 3}',
        "[]",
    ]
    lines.append('{"kind": "train", "iter": 4, "loss": 2.5}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert plot.series(tmp_path, "train", "loss") == ([4], [2.5])
