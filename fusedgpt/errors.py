"""The one exception for what a user can correct, and how a script ends on it."""

import contextlib
import os
import reprlib
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from fusedgpt import INSTALL, terminal
from fusedgpt.home import as_called

SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxlong, SHORT.maxother = 3, 180, 180, 180


class UserError(ValueError):
    """Bad input, or a request that this machine cannot meet: what was got, what is allowed, what to do."""


def shown(value: Any) -> str:
    """The repr of `value` for a message, at most some 200 characters; the name of its type if repr fails."""
    try:
        text = SHORT.repr(value)
    except (Exception, SystemExit):  # a whole number of 5,000 digits, an object with a faulty repr
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}…"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without the full stop; empty if it has no message."""
    with contextlib.suppress(Exception):  # a faulty __str__
        return str(error).strip().splitlines()[0].rstrip(". ")
    return ""


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic in a Rust package, such as tokenizers. A panic is no Exception."""
    return type(error).__module__ == "pyo3_runtime"  # its class cannot be imported


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device's memory is full.

    On a CPU, PyTorch raises a plain RuntimeError if memory is full or a file cannot be mapped. Python raises one if
    there is no memory for the stack of a new thread.
    """
    full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, without its import
    signs = ("DefaultCPUAllocator", "Cannot allocate memory", "can't start new thread")
    return full or (isinstance(error, (RuntimeError, OSError)) and any(sign in first_line(error) for sign in signs))


# advice for a script that trains, if memory runs out
TRAIN_WITH_LESS = (
    " Halve --batch_size (and double --gradient_accumulation_steps: the step stays the same), take a fused --attention"
    " or --recompute=block, or share the model among processes with --parallel=fsdp."
)


def _open_closed_streams():
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed, so the next file would get this number, and what C code and children print
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the stream was closed when Python started
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open to the end)


def _reader_is_gone():
    """Whether the output is a pipe whose reader, such as `head`, has ended. Another pipe may break: one to wandb."""
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)  # 0: errors alone
    return bool(poll.poll(0))


@contextlib.contextmanager
def one_sentence(if_memory_is_full: str = "") -> Iterator[None]:
    """End the script with one sentence, status 1 and no traceback on a UserError, an OSError, or if memory runs out.

    The same holds for a package that is missing, for a warning that `python -W error` raises, and for a file name that
    the locale cannot encode.
    if_memory_is_full: advice to print if memory runs out. From here on, characters that the console cannot show, such
    as a lone surrogate, are shown as escapes. Files and pipes get each line at once, so that both streams stay in
    order. Closed streams, which a service may have, become /dev/null.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # the stream of a notebook, into which %run runs a script, has none
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        yield
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the line on the console may be half written
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            sys.stderr.close()  # nobody is left to tell
            sys.exit(1)
        sentence = "error: " + as_called(" ".join(line.strip() for line in str(error).splitlines()))
        sys.exit(terminal.fit(sentence, sys.stderr))
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] in ("configurator", "fusedgpt", "model"):
            raise
        sys.exit(f"error: {sys.executable} has no package {error.name}: {INSTALL}")
    except UnicodeEncodeError as error:
        if sys.getfilesystemencoding() == "utf-8":
            raise
        sys.exit(  # PYTHONUTF8=0 in the locale C, or a locale of the last century
            f"error: {shown(error.object)} cannot be a file name here, because file names are {error.encoding}: set"
            " PYTHONUTF8=1, or take another name"
        )
    except Warning as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        sys.exit(
            f"error: python -W or PYTHONWARNINGS turns a warning into an error, at line {place.lineno} of"
            f" {place.filename}: {type(error).__name__}: {first_line(error)}"
        )
    except BaseException as error:
        if is_panic(error):  # it came through another package, such as lm_eval
            sys.exit(f"error: a package failed, most likely at a damaged tokenizer.json: {first_line(error)}")
        if not out_of_memory(error):
            raise
        sys.exit(f"error: out of memory.{if_memory_is_full} PyTorch said: {error!s:.200}")
