"""Text on a terminal and in a pipe."""

from unittest import mock

from fusedgpt import terminal


def test_a_terminal_obeys_nothing_that_a_model_draws():
    # an escape sequence cleared the screen or changed its title
    drawn = "a\tb\r\n\x1b[2J\x07\x9bé漢"
    assert terminal.harmless(drawn, mock.Mock(**{"isatty.return_value": True})) == "a\tb\r\n\\x1b[2J\\x07\\x9bé漢"
    assert terminal.harmless(drawn, mock.Mock(**{"isatty.return_value": False})) == drawn
