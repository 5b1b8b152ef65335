"""What a terminal shows, and that no by-product of a run can end the run."""

import dataclasses
import errno
import math
import os
import re
import select
import types
from unittest import mock

from fusedgpt.machine.files import lock
from fusedgpt.runs import logger
from fusedgpt.settings import Settings
from tests.conftest import flags, rows, run, small, weights
from tests.launch import on_terminal


def opened(out_dir):
    """A logger with the folder of a new run."""
    out_dir.mkdir(exist_ok=True)
    log = logger.Logger(main=True)
    log.lock = lock(out_dir)
    log.open(out_dir, 0, {"settings": dataclasses.asdict(Settings()), "wandb_id": "own"}, math.inf)
    return log


LOSSES = {"iter": 0, "train_loss": 1.0, "val_loss": 1.0}


def test_a_tracker_or_a_page_that_fails_ends_no_run_and_is_said(tmp_path, data, monkeypatch, capsys):
    # what it raised ended the run before the evaluated state was saved
    tracker = mock.Mock(**{"log.side_effect": [None, OSError(errno.ENOSPC, "No space left on device")]})
    monkeypatch.setattr(logger.tracker, "begin", lambda *_: tracker)
    monkeypatch.setattr(logger.report_page, "write", lambda *_: {}["page"])
    run(tmp_path, data, wandb_log=True)
    said = capsys.readouterr().out
    assert "NOT WRITTEN: report.html: KeyError: 'page'" in said
    assert said.count("NOT LOGGED to wandb: OSError: [Errno 28] No space left on device; the run goes on") == 1
    assert (tracker.log.call_count, tracker.finish.call_count) == (2, 0)
    assert len(rows(tmp_path)) == 10 and weights(tmp_path)


def test_a_disk_that_refuses_lines_is_said_once_and_tried_again(tmp_path, monkeypatch, capsys):
    def refuse():
        raise OSError(errno.ENOSPC, "No space left on device")

    log = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(log.lines, "flush", refuse)
        patch.setattr(log, "_write_record", refuse)
        log.evaluation(LOSSES)
        log.evaluation(LOSSES)
        log.shorten(5)  # it ended the run, with nothing saved
    log.evaluation(LOSSES)
    said = capsys.readouterr().out
    assert "NOT WRITTEN: run.json: OSError" in said
    assert said.count("NOT WRITTEN: ") == 2 and "No space left on device; lines wait in memory" in said
    assert len(rows(tmp_path, "eval")) == 3


def test_a_resumed_run_forgets_losses_below_its_best(tmp_path):
    # they are of another text or mask, and patience ended a run that was improving
    log = opened(tmp_path)
    for n, loss in enumerate((1.7, 1.5, 2.0, 1.8)):  # 1.7 was forgotten too, and patience did not end a resumed run
        log.evaluation({"iter": n, "train_loss": 1.0, "val_loss": loss})
    log.scores({"iter": 2000, "acc": 0.5})  # was lost without eval_tasks, and wandb's id without wandb_log
    log.open(tmp_path, 2000, {"settings": dataclasses.asdict(Settings(init_from="resume"))}, 1.8)
    assert [row["val_loss"] for row in log.evaluations] == [1.7, 2.0, 1.8]
    assert rows(tmp_path, "score") and log.record["wandb_id"] == "own"
    log.tracker = tracker = mock.Mock()
    log.__exit__()
    tracker.finish.assert_called_once_with(1)  # its last words stood behind an error, and a study took them for it


def test_the_page_takes_its_share_of_the_time(tmp_path, monkeypatch):
    began, clock = [], [1000.0]
    monkeypatch.setattr(logger, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    def write(*_):
        began.append(clock[0])
        clock[0] += 5

    monkeypatch.setattr(logger.report_page, "write", write)
    log = opened(tmp_path)
    while clock[0] < 3000:
        log.ends_in(1.0)
        clock[0] += 1
    assert began == [1000, 1500, 2000, 2500]  # 5 seconds each, a hundredth of the time


def on_a_terminal(columns, settings):
    """All that train.py wrote on a terminal of so many columns, and its status."""
    with on_terminal("train.py", *flags(settings), columns=columns) as (child, keys):
        shown = b""
        while child.is_alive() or select.select([keys], [], [], 0)[0]:
            if select.select([keys, child.sentinel], [], [])[0][0] == keys:
                shown += os.read(keys, 10_000)
        return shown.decode(), child.exitcode


def rows_left(shown):
    """The rows of a terminal after the text `shown`, whose carriage returns begin a row again."""
    for line in shown.split("\n"):
        row = ""
        for part in line.split("\r"):
            row = part + row[len(part) :]
        yield row.rstrip()


def test_a_terminal_shows_a_bar_below_the_lines(tmp_path, data):
    # the bar knew neither loss nor speed, and its time left no evaluations
    samples = dict(sample_interval=50, sample_prompts="!")
    longer = small(tmp_path, data, attention="auto", max_iters=50, eval_interval=50, eval_iters=0, **samples)
    shown, status = on_a_terminal(70, longer)
    assert status == 0 and "\x1b" not in shown
    drawn = [part for line in shown.split("\n") for part in line.split("\r")]
    facts = r"\d+/50, \d+ (s|min) left, loss \d\.\d{3}, [\d,]+ tok/s"
    assert any(re.search(rf"training: +\d+%\|.+\| {facts}", part) for part in drawn), shown
    assert re.search(r"evaluating, batch \d+ of \d+: ", shown) and "sampling: " in shown
    rows = list(rows_left(shown))
    assert rows[-1] == "" and not any("%|" in row or "left" in row for row in rows)  # no bar is left
    assert len([row for row in rows if re.match(r"(iter|step) \d+: (loss|train loss)", row)]) == 52  # as nanoGPT's


def test_an_error_does_not_begin_behind_the_bar(tmp_path, data):
    # "timing attention, dtype and compileerror: attention='flash' cannot train"
    shown, status = on_a_terminal(80, small(tmp_path, data, attention="flash", dropout=0.1))
    assert "timing attention" in shown and status == 1
    assert next(row for row in rows_left(shown) if "error: " in row).startswith("error: attention='flash' cannot train")
