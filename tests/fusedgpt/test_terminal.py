"""Text on a terminal and in a pipe."""

import io

from fusedgpt import terminal


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


def test_a_terminal_obeys_nothing_that_a_model_draws():
    # an escape sequence cleared the screen or changed its title
    drawn = "a\tb\r\n\x1b[2J\x07\x9bé漢"
    assert terminal.harmless(drawn, Stream(True)) == "a\tb\r\n\\x1b[2J\\x07\\x9bé漢"
    assert terminal.harmless(drawn, Stream(False)) == drawn
