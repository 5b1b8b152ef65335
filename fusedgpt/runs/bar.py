"""The bar of a run on a terminal: what the run is doing, how much is done, and as many facts as the width allows."""

import contextlib
import math
import os
import sys
import time

from tqdm import tqdm

from fusedgpt.machine import timing

REDRAWN_AFTER = 0.1  # seconds that the bar keeps a text at least
BAR = "{l_bar}{bar}| "  # for tqdm


def columns() -> int:
    """The columns that the bar may fill. It leaves two free, because a terminal shows a Ctrl-C as ^C behind it."""
    with contextlib.suppress(OSError, ValueError):  # no terminal
        return max(1, os.get_terminal_size(sys.stderr.fileno()).columns - 2)
    return 78


class Bar:
    """Draws itself on stderr if it is `shown`; otherwise it writes nothing."""

    def __init__(self, shown: bool):
        self.shown, self.drawn, self.doing = shown, 0.0, ""  # drawn: when its text last changed
        self.metrics, self.ends = {}, math.inf  # of the last step; when the run ends, by time.monotonic()
        self.tqdm = tqdm(disable=not shown, leave=False, bar_format="{desc}", ncols=columns())

    def begin(self, start: int, total: int) -> None:
        """Show the share of the iterations: `start` of `total` are done."""
        self.tqdm.close()
        options = dict(disable=not self.shown, leave=False, bar_format=BAR, ncols=columns())
        self.tqdm = tqdm(initial=start, total=total, **options)

    def step(self, metrics: dict) -> None:
        """Count a training step, whose loss and tokens/s are shown from the next draw on."""
        self.metrics = metrics
        self.tqdm.n += 1

    def ends_in(self, seconds: float) -> None:
        """Show that the run trains, and ends in so many seconds. The bar counts them down."""
        self.ends = time.monotonic() + seconds
        self.status("training")

    def status(self, doing: str) -> None:
        """Show what the run is doing. A text such as "evaluating, batch 3 of 40" is not shown for each batch."""
        what, before = doing.partition(",")[0], self.doing.partition(",")[0]
        if not self.shown or (what == before and time.monotonic() - self.drawn < REDRAWN_AFTER):
            return
        self.doing, self.drawn, self.tqdm.ncols = doing, time.monotonic(), columns()
        if self.tqdm.total is not None:
            self.tqdm.bar_format = BAR + ", ".join(self._facts())
        self.tqdm.set_description_str(doing)

    def _facts(self):
        """What stands behind the bar: the first of these that fit."""
        facts = []
        if math.isfinite(self.ends):
            facts.append(f"{timing.in_words(max(0, round(self.ends - time.monotonic())))} left")
        if self.metrics:
            facts += [f"loss {self.metrics['loss']:.3f}", f"{self.metrics['tokens_per_s']:,.0f} tok/s"]
        facts.append(f"{self.tqdm.n}/{self.tqdm.total}")
        room = columns() - len(f"{self.doing}: 100%|█| ")
        while facts and len(", ".join(facts)) > room:
            facts.pop()
        return facts

    def close(self) -> None:
        """Clear the bar."""
        self.tqdm.close()
