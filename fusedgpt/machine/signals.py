"""Catch signals that end a run, so that the loop can finish its step and save."""

import contextlib
import os
import signal


def catch_signals(main: bool, stack: contextlib.ExitStack) -> list[int]:
    """Catch SIGTERM, SIGHUP and Ctrl-C until `stack` ends: a list gets their numbers. A second Ctrl-C interrupts.

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

    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            stack.callback(signal.signal, number, signal.signal(number, catch) or signal.SIG_DFL)
    return caught
