"""The one exception for what a user can correct, and how a script ends on it."""

import contextlib
import signal
import sys
from collections.abc import Iterator

import torch


class UserError(ValueError):
    """Bad input, or a request that this machine cannot meet: what was got, what is allowed, what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without the full stop; empty if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else ""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device's memory is full. On a CPU PyTorch raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """End the script with one sentence, status 1 and no traceback on a UserError, an OSError, or if memory runs out."""
    try:
        yield
    except BrokenPipeError:  # the reader of a pipe (`| head`) has gone: nobody is left to tell
        sys.stderr.close()
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        sys.exit(
            "error: out of memory. Halve --batch_size (and double --gradient_accumulation_steps: the step stays the"
            f" same), or take a fused --attention. PyTorch said: {error!s:.200}"
        )
