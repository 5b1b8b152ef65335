"""Ctrl-C, SIGTERM, hang-ups and readers that go away: a run ends with a checkpoint and says so."""

import os
import signal
import sys

import pytest

from fusedgpt.runs.logger import Logger
from tests.conftest import checkpoint_of, flags, rows, run, small
from tests.launch import script

ENDLESS = dict(max_iters=100_000, eval_interval=100_000)


def after_step(monkeypatch, do):
    """Call `do` once the run in this process has made step 7."""
    log = Logger.iteration

    def iteration(logger, metrics, to_console):
        log(logger, metrics, to_console)
        if metrics["iter"] == 7:
            do()

    monkeypatch.setattr(Logger, "iteration", iteration)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_with_a_checkpoint(tmp_path, data, monkeypatch, number):
    after_step(monkeypatch, lambda: signal.raise_signal(number))
    done = script("train.py", *flags(small(tmp_path, data, **ENDLESS)), check=False)
    assert done.returncode == 128 + number
    steps = len(rows(tmp_path))
    assert f"stopped after {steps} iterations, saved: go on with the same command and --init_from=resume" in done.stdout
    assert checkpoint_of(tmp_path)["iter_num"] == steps < 12


def test_nohup_keeps_a_hang_up_away(tmp_path, data, monkeypatch):
    after_step(monkeypatch, lambda: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(tmp_path, data)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(rows(tmp_path)) == 10


def test_a_reader_that_goes_away_is_a_hang_up(tmp_path, data, monkeypatch, capfd):
    # `python train.py | head` used to end without a checkpoint
    read, write = os.pipe()
    after_step(monkeypatch, lambda: os.close(read))
    with open(write, "w") as pipe, monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "stdout", pipe)
        run(tmp_path, data, **ENDLESS)
    assert ended.value.code == 128 + signal.SIGHUP
    assert "SIGHUP: stopping with a checkpoint\n" in capfd.readouterr().err
    assert checkpoint_of(tmp_path)["iter_num"] == len(rows(tmp_path)) > 7


def test_ctrl_c_is_acknowledged_at_once_in_an_evaluation_too(tmp_path, data, monkeypatch, capfd):
    # an evaluation used to run to its end first, in silence
    seen, status = [], Logger.status

    def interrupted(logger, doing):
        status(logger, doing)
        if doing.startswith("evaluating, "):
            seen.append(capfd.readouterr().err)
            if len(seen) == 3:
                signal.raise_signal(signal.SIGINT)
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # the second ends the run

    monkeypatch.setattr(Logger, "status", interrupted)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, data, eval_iters=100)
    assert ended.value.code == 128 + signal.SIGINT and len(seen) <= 4
    said = "".join([*seen, capfd.readouterr().err])
    assert said == "\nSIGINT: stopping with a checkpoint; Ctrl-C again ends at once, without saving\n"
    assert rows(tmp_path, "eval") == []
