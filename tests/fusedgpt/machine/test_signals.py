"""Ctrl-C, SIGTERM, hang-ups and readers that go away: a run ends with a checkpoint and says so."""

import signal
import subprocess
import sys
import time

import pytest

from fusedgpt.runs import run_folder
from tests.conftest import checkpoint_of, flags, rows, small, wait_for, wait_for_lines
from tests.launch import ROOT

ENDLESS = dict(max_iters=100_000, eval_interval=100_000)


def start(settings, prefix=(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE):
    command = [*prefix, sys.executable, "train.py", *flags(settings)]
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_with_a_checkpoint(tmp_path, data, number):
    child = start(small(tmp_path, data, **ENDLESS), stdout=subprocess.PIPE, stderr=None)
    wait_for_lines(child, tmp_path / "metrics.jsonl", 10)
    child.send_signal(number)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    steps = len(rows(tmp_path))
    assert f"stopped after {steps} iterations, saved: go on with the same command and --init_from=resume" in out
    assert checkpoint_of(tmp_path)["iter_num"] == steps


def test_nohup_keeps_a_hang_up_away(tmp_path, data):
    child = start(small(tmp_path, data, **ENDLESS), prefix=["nohup"], stderr=None)
    wait_for_lines(child, tmp_path / "metrics.jsonl", 10)
    child.send_signal(signal.SIGHUP)
    wait_for_lines(child, tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").read_text().count("\n") + 20)
    child.terminate()
    assert child.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_reader_that_goes_away_is_a_hang_up(tmp_path, data):
    # `python train.py | head` used to end without a checkpoint
    child = start(small(tmp_path, data, **ENDLESS), stdout=subprocess.PIPE)
    assert any("iter 5:" in line for line in child.stdout)
    child.stdout.close()
    err = child.stderr.read()
    assert child.wait(timeout=60) == 128 + signal.SIGHUP
    assert "Traceback" not in err and "Exception ignored" not in err and "SIGHUP: stopping with a checkpoint" in err
    assert checkpoint_of(tmp_path)["iter_num"] == len(rows(tmp_path)) > 5


def test_ctrl_c_is_acknowledged_at_once_in_an_evaluation_too(tmp_path, data):
    # an evaluation used to run to its end first, in silence
    child = start(small(tmp_path, data, max_iters=10, eval_iters=10**9, batch_size=1, block_size=1))
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
    for seconds in (0.3, 1.0, 5.0):  # while PyTorch is imported, twice, and while the model is built
        child = start(small(tmp_path, data, n_layer=2000))
        time.sleep(seconds)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
        assert child.returncode == -signal.SIGINT, (seconds, err)
        assert "Traceback" not in err


def test_a_second_ctrl_c_leaves_the_last_checkpoint_whole(tmp_path, data):
    child = start(small(tmp_path, data, max_iters=100_000, eval_interval=1, eval_iters=1, n_embd=128))
    wait_for(tmp_path / "ckpt.pt", seconds=60)
    child.send_signal(signal.SIGINT)
    child.stderr.readline()  # the signal is acknowledged; the step and its save may be under way or done
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) in (-signal.SIGINT, 128 + signal.SIGINT)
    run_folder.load_latest(tmp_path, say=pytest.fail)
