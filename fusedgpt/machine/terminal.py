"""Lines that fit the terminal that they are shown on. What goes to a file or a pipe stays one line."""

import shutil
import textwrap
from typing import TextIO

from tqdm.utils import disp_len, disp_trim


def width() -> int:
    """The columns of the terminal; 80 if there is none."""
    return shutil.get_terminal_size().columns


def filled(line: str, columns: int) -> str:
    """`line`, broken between words at `columns`. Later lines are indented; a word is never broken."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def fit(text: str, stream: TextIO) -> str:
    """`text` with each line filled, if `stream` is a terminal."""
    return "\n".join(filled(line, width()) for line in text.splitlines()) if stream.isatty() else text


def cut(line: str, stream: TextIO) -> str:
    """`line`, cut to one row, if `stream` is a terminal. Wide characters, such as Chinese ones, count twice."""
    if not stream.isatty() or disp_len(line) <= width():
        return line
    return disp_trim(line, width() - 1) + "…"
