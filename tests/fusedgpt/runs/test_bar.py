"""What the bar of a run says, by its width and by what the run is doing."""

import math
import types

import pytest

from fusedgpt.runs import bar
from tests.conftest import run

METRICS = {"loss": 1.83456, "tokens_per_s": 14512.3}


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move: a list with the time."""
    now = [1000.0]
    monkeypatch.setattr(bar, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def drawn(capsys):
    """The last text that was drawn."""
    return capsys.readouterr().err.split("\r")[-1].rstrip()


def begun():
    shown = bar.Bar(shown=True)
    shown.begin(240, 600)
    return shown


@pytest.mark.parametrize(
    ("columns", "end"),
    [
        (79, "| 1 h 40 min left, loss 1.835, 14,512 tok/s, 241/600"),
        (60, "| 1 h 40 min left, loss 1.835, 14,512 tok/s"),
        (45, "| 1 h 40 min left, loss 1.835"),
        (39, "| 1 h 40 min left"),
        (20, "training:  40%|█"),
    ],
)
def test_a_narrow_bar_leaves_out_whole_facts(clock, capsys, monkeypatch, columns, end):
    # a text that is too long would be cut in the middle of a number
    monkeypatch.setattr(bar, "columns", lambda: columns)
    shown = begun()
    shown.step(METRICS)
    shown.ends_in(6000.0)
    text = drawn(capsys)
    assert text.startswith("training:  40%|") and end in text and len(text) <= columns
    assert columns < 39 or text.endswith(end)
    shown.close()
    assert drawn(capsys) == ""


def test_the_time_left_is_counted_down_while_an_evaluation_makes_no_step(clock, capsys):
    shown = begun()
    shown.ends_in(60.0)
    clock[0] += 45
    shown.status("evaluating, batch 3 of 40")
    assert "evaluating, batch 3 of 40:  40%|" in (text := drawn(capsys)) and "| 15 s left, " in text
    clock[0] += 45
    shown.status("evaluating, batch 4 of 40")
    assert "| 0 s left, " in drawn(capsys)


def test_another_activity_is_shown_at_once_and_a_part_of_one_not_always(clock, capsys):
    # "sampling", which comes once, was not shown if the bar had just been drawn
    shown = begun()
    shown.status("training")
    shown.status("sampling")
    assert "sampling: " in drawn(capsys)
    shown.status("evaluating, batch 1 of 40")
    shown.status("evaluating, batch 2 of 40")
    assert "batch 1 of 40" in drawn(capsys)
    clock[0] += 1
    shown.status("evaluating, batch 9 of 40")
    assert "batch 9 of 40" in drawn(capsys)


class EnoughError(Exception):
    """The run has said enough."""


@pytest.mark.parametrize(("limit", "least", "most"), [(None, 1e4, math.inf), (3600.0, 0.0, 3660.0)])
def test_a_run_with_a_time_limit_ends_by_then(tmp_path, data, monkeypatch, limit, least, most):
    # max_iters may be days away
    def ends_in(_, seconds):
        assert least < seconds < most  # and one evaluation
        raise EnoughError

    monkeypatch.setattr(bar.Bar, "ends_in", ends_in)
    with pytest.raises(EnoughError):
        run(tmp_path, data, max_iters=10**9, max_seconds=limit, eval_interval=10**9)
