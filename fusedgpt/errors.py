"""The one exception for what a user can correct, and how a script ends on it."""

import contextlib
import reprlib
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from fusedgpt import terminal
from fusedgpt.home import as_called

SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxlong, SHORT.maxother = 3, 180, 180, 180


class UserError(ValueError):
    """Bad input, or a request that this machine cannot meet: what was got, what is allowed, what to do."""


def shown(value: Any) -> str:
    """The repr of `value` for a message, at most some 200 characters."""
    text = SHORT.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def first_line(error: BaseException | str) -> str:
    """The first line of an exception or its message, at most 300 characters of it, without the full stop."""
    return str(error).strip().partition("\n")[0][:300].rstrip(". \r")


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic in a Rust package, such as tokenizers. A panic is no Exception."""
    return type(error).__module__ == "pyo3_runtime"  # its class cannot be imported


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory is full. On a CPU, PyTorch and threading raise a plain RuntimeError."""
    full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, without its import
    signs = ("DefaultCPUAllocator", "MPS backend out of memory", "Cannot allocate memory", "can't start new thread")
    return full or (isinstance(error, (RuntimeError, OSError)) and any(sign in first_line(error) for sign in signs))


@contextlib.contextmanager
def one_sentence(if_memory_is_full: str = "") -> Iterator[None]:
    """End the script with one sentence and status 1 on a UserError, an OSError, a missing package, or full memory.

    if_memory_is_full: advice to print then. From here on, characters that the console lacks become escapes, and files
    and pipes get each line at once, so that both streams stay in order.
    """
    expected = (UserError, OSError, ModuleNotFoundError)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # the stream of a notebook, into which %run runs a script, has none
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) or isinstance(error, expected) or out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # a notebook would keep them, and the run's memory
            raise
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the line on the console may be half written
        sys.exit(128 + signal.SIGINT)
    except expected as error:
        sentence = "error: " + as_called(" ".join(line.strip() for line in str(error).splitlines()))
        sys.exit(terminal.harmless(sentence, sys.stderr))
    except Exception as error:
        if not out_of_memory(error):
            raise
        sys.exit(f"error: out of memory.{if_memory_is_full} PyTorch said: {error!s:.200}")
