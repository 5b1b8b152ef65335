"""Ctrl-C, SIGTERM, hang-ups and readers that go away: a run ends with a checkpoint and says so."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from fusedgpt.runs import run_folder
from tests.conftest import ROOT, flags, rows, small, wait_for, wait_for_lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_with_a_checkpoint(tmp_path, data, number):
    settings = small(tmp_path, data, max_iters=100_000, eval_interval=100_000)
    child = subprocess.Popen(
        [sys.executable, "train.py", *flags(settings)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    wait_for_lines(child, tmp_path / "metrics.jsonl", 10)
    child.send_signal(number)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    steps = len(rows(tmp_path))
    assert f"stopped after {steps} iterations, saved: go on with the same command and --init_from=resume" in out
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] == steps


def test_nohup_keeps_a_hang_up_away(tmp_path, data):
    settings = small(tmp_path, data, max_iters=100_000, eval_interval=100_000)
    command = ["nohup", sys.executable, "train.py", *flags(settings)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for_lines(child, tmp_path / "metrics.jsonl", 10)
    child.send_signal(signal.SIGHUP)
    wait_for_lines(child, tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").read_text().count("\n") + 20)
    child.terminate()
    assert child.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_reader_that_goes_away_is_a_hang_up(tmp_path, data):
    # `python train.py | head` used to end without a checkpoint
    settings = small(tmp_path, data, max_iters=100_000, eval_interval=100_000)
    train_py = [sys.executable, "train.py", *flags(settings)]
    child = subprocess.Popen(train_py, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert any(b"iter 5:" in line for line in child.stdout)
    child.stdout.close()
    err = child.stderr.read().decode()
    assert child.wait(timeout=60) == 128 + signal.SIGHUP
    assert "Traceback" not in err and "Exception ignored" not in err and "SIGHUP: stopping with a checkpoint" in err
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] == len(rows(tmp_path)) > 5


def test_ctrl_c_is_acknowledged_at_once_in_an_evaluation_too(tmp_path, data):
    # an evaluation used to run to its end first, in silence
    settings = small(tmp_path, data, max_iters=10, eval_iters=10**9, batch_size=1, block_size=1)
    train_py = [sys.executable, "train.py", *flags(settings)]
    child = subprocess.Popen(train_py, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "run.json", seconds=60)
    time.sleep(1)  # the evaluation of 22,998 windows has begun
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.stderr.readline() == "\n"
    assert child.stderr.readline().startswith("SIGINT: stopping with a checkpoint; Ctrl-C again ends at once")
    assert child.wait(timeout=60) == 128 + signal.SIGINT
    assert time.monotonic() - began < 10
    assert rows(tmp_path, "eval") == []


def test_ctrl_c_at_the_start_ends_at_once_without_a_traceback(tmp_path, data):
    train_py = [sys.executable, "train.py", *flags(small(tmp_path, data, n_layer=2000))]
    for seconds in (0.3, 1.0, 5.0):  # while PyTorch is imported, twice, and while the model is built
        child = subprocess.Popen(train_py, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(seconds)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
        assert child.returncode == -signal.SIGINT, (seconds, err)
        assert "Traceback" not in err


def test_a_second_ctrl_c_leaves_the_last_checkpoint_whole(tmp_path, data):
    settings = small(tmp_path, data, max_iters=100_000, eval_interval=1, eval_iters=1, n_embd=128)
    train_py = [sys.executable, "train.py", *flags(settings)]
    child = subprocess.Popen(train_py, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(tmp_path / "ckpt.pt", seconds=60)
    child.send_signal(signal.SIGINT)
    child.stderr.readline()  # acknowledged: the step and its save may still be under way, or be done
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) in (-signal.SIGINT, 128 + signal.SIGINT)
    run_folder.load_latest(tmp_path, say=pytest.fail)
