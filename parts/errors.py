"""The one exception for what a user can mend, and how a script ends on it."""

import contextlib
import sys


class UserError(ValueError):
    """Bad input or a request that this machine cannot meet: what was got, what is allowed, what to do."""


@contextlib.contextmanager
def one_sentence():
    """End the script on a UserError or OSError with its sentence and status 1: no traceback."""
    try:
        yield
    except BrokenPipeError:  # the reader of a pipe (`| head`) has gone: nobody is left to tell
        sys.stderr.close()
        sys.exit(1)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
