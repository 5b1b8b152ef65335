"""Text for a terminal: nothing that it would obey, samples in one row. A file or a pipe gets all as it is."""

import shutil
from typing import TextIO

# characters that move the cursor, ring, or begin a command to the terminal; a byte model draws them at first
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


def width() -> int:
    """The columns of the terminal; 80 if there is none."""
    return shutil.get_terminal_size().columns


def cut(line: str, stream: TextIO) -> str:
    """`line`, cut to one row, if `stream` is a terminal. Wide characters, such as Chinese ones, count twice."""
    from tqdm.utils import disp_len, disp_trim  # here, because a script without tqdm still says what is missing

    if not stream.isatty() or disp_len(line) <= width():
        return line
    return disp_trim(line, width() - 1) + "…"


def harmless(text: str, stream: TextIO) -> str:
    """`text`, with control characters as escapes if `stream` is a terminal, which might obey them."""
    return text.translate(CONTROL) if stream.isatty() else text
