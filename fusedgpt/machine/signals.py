"""Signals that end a run: caught, so that the loop can finish its step and save."""

import contextlib
import os
import signal


def catch_signals(main: bool) -> list[int]:
    """A list that gets the number of each SIGTERM, SIGHUP or Ctrl-C. A second Ctrl-C ends the program at once.

    The `main` rank says on stderr at once that a signal has come, because the current step may still take long.
    """
    caught = []

    def catch(number, frame):
        caught.append(number)
        if number == signal.SIGINT:  # not SIGTERM, which torchrun and schedulers may send twice
            signal.signal(number, signal.SIG_DFL)
        if main and len(caught) == 1:
            again = "; Ctrl-C again ends at once, without it" if number == signal.SIGINT else ""
            line = f"\n{signal.Signals(number).name}: stopping with a checkpoint{again}\n"
            with contextlib.suppress(OSError):  # the console may be gone
                os.write(2, line.encode())  # not print, which a signal may have interrupted

    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and so does its run
            signal.signal(number, catch)
    return caught
