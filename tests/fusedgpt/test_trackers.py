"""TensorBoard's and wandb's own files, read by their own readers."""

import glob
import json
import sys

import pytest

from fusedgpt import trackers
from fusedgpt.errors import UserError
from tests.conftest import flags, rows, run, script, small


def test_tensorboard_reads_what_was_logged(tmp_path, data):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = dict(tensorboard_log=True, sample_interval=5, sample_prompts="!")
    run(tmp_path, data, **settings)
    run(tmp_path, data, **settings, max_iters=15, init_from="resume")
    read = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name, kind, key in (("val/loss", "eval", "val_loss"), ("step/loss", "train", "loss"), ("lr", "train", "lr")):
        found = [(event.step, event.value) for event in read.Scalars(name)]
        assert found == [(row["iter"], pytest.approx(row[key], rel=1e-6)) for row in rows(tmp_path, kind)]
    assert {"val/bits_per_byte", "mfu", "step/grad_norm"} <= set(read.Tags()["scalars"])
    # where a run was resumed, TensorBoard drops the numbers of before, and keeps both texts
    assert [event.step for event in read.Tensors("sample/1/text_summary")] == [0, 5, 10, 10, 15]


def test_wandb_keeps_its_run_when_it_is_resumed(tmp_path, data):
    # a resumed run used to become a second one, and its curve to start in the middle
    pytest.importorskip("wandb")
    offline = dict(WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    for more in ({}, dict(max_iters=15, init_from="resume")):
        script("train.py", *flags(small(tmp_path / "out", data, wandb_log=True, **more)), **offline)
    own = json.loads((tmp_path / "out" / "run.json").read_text())["wandb_id"]
    written = glob.glob(f"{tmp_path}/wandb/offline-run-*/run-*.wandb")
    assert len(written) == 2 and all(path.endswith(f"run-{own}.wandb") for path in written)


@pytest.mark.parametrize(("setting", "package"), [("wandb_log", "wandb"), ("tensorboard_log", "tensorboard")])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, setting, package):
    # wandb's absence was a traceback
    for name in (package, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    s = dict(wandb_log=False, tensorboard_log=False, wandb_project="", wandb_run_name="") | {setting: True}
    with pytest.raises(UserError, match=f"{setting}=True needs the package {package}: pip install {package}"):
        trackers.start(s, {}, tmp_path, 0, None)
