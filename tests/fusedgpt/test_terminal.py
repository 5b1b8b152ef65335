"""Text on a terminal and in a pipe."""

import io

import pytest
from tqdm.utils import disp_len

from fusedgpt import terminal


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture(autouse=True)
def _forty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")


def test_a_line_is_cut_by_what_it_takes_on_the_screen():
    for line in ("x" * 41, "漢" * 21):  # the second has 21 characters, but takes 42 columns
        cut = terminal.cut(line, Stream(True))
        assert cut.endswith("…") and 38 < disp_len(cut) <= 40 and line.startswith(cut[:-1])
    for line in ("x" * 40, "漢" * 20):
        assert terminal.cut(line, Stream(True)) == line
    assert terminal.cut("x" * 41, Stream(False)) == "x" * 41


def test_a_terminal_obeys_nothing_that_a_model_draws():
    # an escape sequence cleared the screen or changed its title
    drawn = "a\tb\r\n\x1b[2J\x07\x9bé漢"
    assert terminal.harmless(drawn, Stream(True)) == "a\tb\r\n\\x1b[2J\\x07\\x9bé漢"
    assert terminal.harmless(drawn, Stream(False)) == drawn
