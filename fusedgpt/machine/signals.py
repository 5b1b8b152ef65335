"""Handle the signals that end a program, so that it can save, and end its processes, before it ends."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence

# the last, of a terminal or an ssh session that is gone, is not on Windows
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def handled_by(handler: Callable, numbers: Sequence[int] = ENDING) -> Iterator[None]:
    """A context in which `handler` takes these signals. Under nohup, SIGHUP stays ignored."""
    with contextlib.ExitStack() as at_the_end:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                at_the_end.callback(signal.signal, number, signal.signal(number, handler) or signal.SIG_DFL)
        yield


@contextlib.contextmanager
def catch_signals(main: bool) -> Iterator[list[int]]:
    """A context in which a list gets the numbers of SIGTERM, SIGHUP and Ctrl-C. A second Ctrl-C interrupts.

    The `main` rank reports the first signal on stderr at once, because the current step may still take long.
    """
    caught = []

    def catch(number, frame):
        caught.append(number)
        if number == signal.SIGINT:  # not SIGTERM, which torchrun and schedulers may send twice
            signal.signal(number, signal.default_int_handler)  # SIG_DFL would end a notebook's kernel
        if main and len(caught) == 1:
            line = f"\n{signal.Signals(number).name}: stopping with a checkpoint"
            if number == signal.SIGINT:
                line += "; Ctrl-C again ends at once, without saving"
            with contextlib.suppress(OSError):  # the console may be gone
                os.write(2, f"{line}\n".encode())  # not print, because the signal may have interrupted one

    with handled_by(catch):
        yield caught
