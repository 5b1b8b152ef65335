"""Text for a terminal: lines that fit its width, nothing that it would obey. A file or a pipe gets all as it is."""

import shutil
import textwrap
from typing import TextIO

# characters that move the cursor, ring, or begin a command to the terminal; a byte model draws them at first
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


def width() -> int:
    """The columns of the terminal; 80 if there is none."""
    return shutil.get_terminal_size().columns


def filled(line: str, columns: int) -> str:
    """`line`, broken between words at `columns`. Later lines are indented; a word is never broken."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def fit(text: str, stream: TextIO) -> str:
    """`text` with each line filled, and harmless, if `stream` is a terminal."""
    lines = (harmless(line, stream) for line in text.splitlines())
    return "\n".join(filled(line, width()) for line in lines) if stream.isatty() else text


def cut(line: str, stream: TextIO) -> str:
    """`line`, cut to one row, if `stream` is a terminal. Wide characters, such as Chinese ones, count twice."""
    from tqdm.utils import disp_len, disp_trim  # here, because a script without tqdm still says what is missing

    if not stream.isatty() or disp_len(line) <= width():
        return line
    return disp_trim(line, width() - 1) + "…"


def harmless(text: str, stream: TextIO) -> str:
    """`text`, with control characters as escapes if `stream` is a terminal, which might obey them."""
    return text.translate(CONTROL) if stream.isatty() else text
