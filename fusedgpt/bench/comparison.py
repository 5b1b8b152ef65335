"""One comparison: its contenders are built and proven, then take turns until their ratios are known well enough.

If not all fit into memory, groups of those that fit take turns, each group beside the baseline.
"""

import contextlib
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fusedgpt.bench.process import Contender
from fusedgpt.bench.rows import SETTLED, Result, status_of
from fusedgpt.machine import memory
from fusedgpt.machine.turns import Laps, Turn

FEWEST = 10  # laps before an interval is looked at
LEAST = 6  # laps that time does not end: fewer give no interval
ROOM = 1.2  # start another contender if so many times the largest so far is free


@dataclass(frozen=True)
class Comparison:
    """What is compared: contenders by name, and the baseline among them. workload: what they have in common."""

    workload: dict[str, str | int]
    names: tuple[str, ...]
    baseline: str


class InProcess:
    """A contender in this process, with the methods of process.Contender."""

    def __init__(self, turn: Turn | None, found: dict):
        self.turn, self.found = turn, found

    def ready(self) -> dict:
        """What was found out while it was built."""
        return self.found

    def close(self) -> None:
        """Free its memory."""
        self.turn = None


@dataclass
class Measurement:
    """Measures one comparison; `write` gets each line as soon as it is known.

    start(name) -> the contender; it raises what is wrong. write(line) -> the line as it is in rows.jsonl. turn: seconds
    of a turn; 0 if contenders take none. many: how many may be built at once.
    """

    comparison: Comparison
    result: Result
    start: Callable[[str], Contender | InProcess]
    write: Callable[[dict], dict]
    say: Callable[[str], None]
    device: torch.device
    turn: float
    precision: float
    seconds: float
    end: float  # time.monotonic() after which no lap begins
    many: int = 1
    stale: bool = False  # whether the baseline was measured at another commit

    def run(self) -> None:
        """Build and measure what is missing. Whatever happens, no contender is left running or stopped."""
        base, self.alive = self.comparison.baseline, {}
        waiting = sorted(self._to_do(), key=lambda name: name != base)  # the baseline first
        try:
            while waiting and time.monotonic() < self.end:
                self._build(waiting)
                self._take_turns()
                for name in [name for name in self.alive if name != base]:
                    self.alive.pop(name).close()
        finally:
            for contender in self.alive.values():
                contender.close()
            gc.collect()
            _empty_cache(self.device)

    def _to_do(self):
        """The contenders to build: those that are absent and, if others are not known well enough, these too."""
        base, status = self.comparison.baseline, {name: line["status"] for name, line in self.result.contenders.items()}
        possible = [name for name in self.comparison.names if status.get(name) not in SETTLED]
        absent = [name for name in possible if status.get(name) != "measured"]
        known = [name for name in possible if name not in absent]
        if self.turn and not (known and self.result.precise(known, self.precision)):
            return possible
        if self.turn and absent and base in known:  # other code of the baseline would drop its laps, and all ratios
            return possible if self.stale else [*absent, base]
        return absent

    def _build(self, waiting):
        """Start contenders of `waiting`, and take them from there, as long as they fit beside those alive."""
        largest = 0.0
        while waiting and time.monotonic() < self.end:
            _empty_cache(self.device)
            free = memory.free_memory(self.device)
            if len(self.alive) > 1 and free < ROOM * largest:
                return
            # the first is alone, to see how much memory it takes
            fit = int(free / (ROOM * largest)) if largest > 0 else self.many
            batch = waiting[: max(1, min(self.many, fit)) if self.alive else 1]
            starting = [_or_line(lambda name=name: self.start(name)) for name in batch]
            lines = self._ready(dict(zip(batch, starting)))
            full = [name for name, line in zip(batch, lines) if line["status"] == "out of memory"]
            # others may have held the memory
            again = full if self.turn and (len(self.alive) > 1 or len(batch) > 1) else []
            for name, line in zip(batch, lines):
                if name not in again:
                    waiting.remove(name)
                    self._note(name, line)
            if again:
                self.many = 1
                return
            largest = max(largest, (free - memory.free_memory(self.device)) / len(batch))

    def _ready(self, starting):
        """The line of each that is `starting`, {name: contender, or a line if it ended}; they are built at once."""
        self.alive |= {name: contender for name, contender in starting.items() if not isinstance(contender, dict)}
        with ThreadPoolExecutor(len(starting)) as pool:
            try:
                ready = pool.map(lambda one: one if isinstance(one, dict) else _or_line(one.ready), starting.values())
                lines = dict(zip(starting, ready))
            except BaseException:
                for contender in self.alive.values():
                    contender.close()  # ends the threads that wait for an answer
                raise
        for name, line in lines.items():
            if "reason" in line and name in self.alive:
                self.alive.pop(name).close()
        return [{"status": "measured"} | lines[name] for name in starting]

    def _note(self, name, line):
        line = {"workload": self.comparison.workload, "name": name, "baseline": self.comparison.baseline} | line
        self.result.add(self.write({"kind": "contender", **line}))
        said = "ready" if line["status"] == "measured" else f"{line['status']}: {line['reason']}"
        self.say(f"{', '.join(map(str, (*self.comparison.workload.values(), name)))}: {said}")

    def _take_turns(self):
        """Laps of those alive, until the intervals are narrow enough or the time is over."""
        laps = Laps({name: contender.turn for name, contender in self.alive.items() if contender.turn})
        if not laps.turns or time.monotonic() >= self.end:
            return
        laps.run(0.0)  # warms up what cooled down while others were built, and does not count
        self._drop_failed(laps)
        began, base, told, count = time.monotonic(), self.comparison.baseline, 0.0, 0
        while laps.turns and base not in laps.failed and time.monotonic() < self.end:
            ms = laps.run(self.turn)
            self.result.laps.append(ms)
            self.write({"kind": "lap", "workload": self.comparison.workload, "ms": ms})
            self._drop_failed(laps)
            count, seconds = count + 1, time.monotonic() - began
            if seconds > told + 10:
                told = seconds
                self.say(f"lap {count}, {seconds:.0f} s: {self._widest(laps.turns)}")
            narrow = count >= FEWEST and self.result.precise(laps.turns, self.precision)
            if narrow or (count >= LEAST and seconds > self.seconds):
                break
        self.say(f"{count} laps: {self._widest(laps.turns)}")

    def _drop_failed(self, laps):
        for name in [name for name in laps.failed if name in self.alive]:
            self.alive.pop(name).close()
            self._note(name, dict(zip(("status", "reason"), status_of(laps.failed[name]))))

    def _widest(self, names):
        found = {name: ratio for name, ratio in self.result.ratios.items() if name in names and ratio.known}
        if not found:
            return "no interval yet"
        name = max(found, key=lambda name: found[name].precision)
        return f"the widest interval is {name}'s, ± {100 * found[name].precision:.1f} %"


def _empty_cache(device):
    """Give back what PyTorch keeps in this process, for others."""
    if device.type == "cuda":
        with contextlib.suppress(torch.AcceleratorError):  # the GPU has crashed, and the rows say so
            torch.cuda.empty_cache()


def _or_line(do):
    try:
        return do()
    except Exception as error:
        return dict(zip(("status", "reason"), status_of(error)))
