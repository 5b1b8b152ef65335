"""Text for a terminal: nothing that it would obey. A file or a pipe gets all as it is."""

from typing import TextIO

# characters that move the cursor, ring, or begin a command to the terminal; a byte model draws them at first
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


def harmless(text: str, stream: TextIO) -> str:
    """`text`, with control characters as escapes if `stream` is a terminal, which might obey them."""
    return text.translate(CONTROL) if stream.isatty() else text


def in_words(seconds: float) -> str:
    """A duration in words: '40 s', '12.5 min', '3.33 h', '4.2 days'."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
