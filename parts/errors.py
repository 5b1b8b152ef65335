"""The one exception for what a user can mend, and how a script ends on it."""

import contextlib
import signal
import sys

import torch


class UserError(ValueError):
    """Bad input or a request that this machine cannot meet: what was got, what is allowed, what to do."""


def out_of_memory(error):
    """Whether an exception says that the device's memory is full; on a CPU that has no type of its own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


@contextlib.contextmanager
def one_sentence():
    """End the script on a UserError, an OSError or a full memory with one sentence, status 1 and no traceback."""
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
