"""wandb's own file, and the names in it."""

import glob
import json
import pathlib
import struct
import sys

import pytest

from fusedgpt.runs import tracker
from tests.conftest import flags, record, rows, run, small
from tests.launch import script


def test_wandb_keeps_its_run_when_it_is_resumed(tmp_path, data):
    # a resumed run used to become a second one with half a curve; nanoGPT's dashboards were empty
    wandb = pytest.importorskip("wandb")
    offline = dict(WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    named = dict(wandb_log=True, wandb_project="walks", wandb_run_name="first")
    for more in ({}, dict(max_iters=15, init_from="resume")):
        script("train.py", *flags(small(tmp_path / "out", data, **named, **more)), **offline)
    wandb.teardown()  # as at the end of a process: wandb's own process then has written all
    own = record(tmp_path / "out")["wandb_id"]
    written = glob.glob(f"{tmp_path}/wandb/offline-run-*/run-*.wandb")
    assert len(written) == 2 and all(path.endswith(f"run-{own}.wandb") for path in written)
    records = in_wandbs_file(min(written)) + in_wandbs_file(max(written))
    begun = [record.run for record in records if record.HasField("run")]
    assert {(run.project, run.display_name) for run in begun} == {("walks", "first")}
    logged = [values_in(record.history) for record in records if record.HasField("history")]
    evals = {"train/loss": "train_loss", "val/loss": "val_loss", "val/bits_per_byte": "val_bits_per_byte"}
    for kind, names in (("eval", evals), ("train", {"step/loss": "loss", "lr": "lr", "step/grad_norm": "grad_norm"})):
        for name, key in names.items():
            found = {values["iter"]: values[name] for values in logged if name in values}
            assert found == {row["iter"]: pytest.approx(row[key]) for row in rows(tmp_path / "out", kind)}


def test_dashboards_get_nanogpts_names_and_mfu_in_per_cent():
    said = {"iter": 3, "mfu": 0.5, "val_loss": 2.0, "val_bits_per_byte": 1.0, "ms": 9.0}
    assert tracker.names(said) == {"iter": 3, "mfu": 50.0, "val/loss": 2.0, "val/bits_per_byte": 1.0, "step/ms": 9.0}


def values_in(history):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}


def in_wandbs_file(path):
    """The records in an offline file of wandb's, which has no reader of its own in Python.

    After 7 bytes come LevelDB's blocks of 32 KiB: checksum, length and kind of a part (1 whole, 2 first, 3, 4 last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, message, found = pathlib.Path(path).read_bytes(), 7, b"", []
    while at < len(raw):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, part = struct.unpack_from("<IHB", raw, at)
        message += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):
            found.append(Record.FromString(message))
            message = b""
    return found


def test_a_run_goes_on_without_wandb_if_it_is_missing(tmp_path, data, monkeypatch, capsys):
    # config/train_gpt2.py logs to wandb: on a machine without it, training ended before its first step
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(tmp_path, data, wandb_log=True, max_iters=1)
    assert capsys.readouterr().out.count("NOT LOGGED to wandb: ModuleNotFoundError: ") == 1
    assert "wandb_id" not in record(tmp_path)
