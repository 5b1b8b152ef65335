"""Signals that end a run: caught, so that the loop can finish its step and save."""

import signal


def catch_signals() -> list[int]:
    """A list that gets the number of the first SIGTERM or Ctrl-C. A second Ctrl-C ends the program at once."""
    caught = []

    def catch(number, frame):
        caught.append(number)
        if number == signal.SIGINT:  # not SIGTERM, which torchrun and schedulers may send twice
            signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, catch)
    signal.signal(signal.SIGINT, catch)
    return caught
