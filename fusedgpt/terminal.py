"""Text for a terminal: nothing that it would obey. A file or a pipe gets all as it is."""

from typing import TextIO

# characters that move the cursor, ring, or begin a command to the terminal; a byte model draws them at first
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


def harmless(text: str, stream: TextIO) -> str:
    """`text`, with control characters as escapes if `stream` is a terminal, which might obey them."""
    return text.translate(CONTROL) if stream.isatty() else text


def in_words(seconds: float) -> str:
    """A duration in words: '40 s', '12 min', '3 h 20 min', '4.2 days'."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes / 60 / 24:.1f} days"
