"""What functions cost beside each other, if no machine is quiet: they take turns, so that other programs slow all or
none.
"""

import statistics
import time
from collections.abc import Callable


def compare(works: dict[str, Callable[[], None]], warm_up: int, turns: int) -> dict[str, dict]:
    """By name: the median CPU `seconds` of a call, and how many times as long as the first function it takes.

    `times_first` is the median of the turns, `least` and `most` are their ends; `warm_up` turns before do not count.
    """
    seconds = {name: [] for name in works}
    for _ in range(warm_up + turns):
        for name, work in works.items():
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
    counted = {name: each[warm_up:] for name, each in seconds.items()}
    first = next(iter(counted.values()))
    return {name: _beside(each, first) for name, each in counted.items()}


def _beside(each, first):
    times = [a / b for a, b in zip(each, first)]
    ends = {"least": min(times), "most": max(times)}
    return {"seconds": statistics.median(each), "times_first": statistics.median(times)} | ends
