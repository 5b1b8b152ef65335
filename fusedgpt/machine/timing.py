"""Time steps in milliseconds. Triton's timers include gaps between launches, or leave inputs in the L2 cache."""

import contextlib
import functools
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch


class StepClock:
    """The times of steps on `device`. They are read later, so that timing a step does not make it wait for the device.

    On CUDA, the device itself stamps events. Elsewhere the host's clock is read; on MPS, after waiting for the device.
    """

    def __init__(self, device: torch.device):
        self.device, self.marks = device, []

    def start(self) -> None:
        self.marks.append(self._mark())

    def stop(self) -> None:
        self.marks.append(self._mark())

    def read(self) -> list[float]:
        """Milliseconds of each step since the last call."""
        marks, self.marks = self.marks, []
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return [start.elapsed_time(stop) for start, stop in zip(marks[::2], marks[1::2])]
        return [1e3 * (stop - start) for start, stop in zip(marks[::2], marks[1::2])]

    def _mark(self):
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()


class Steps:
    """Turns of a step in this process: called with seconds, it makes as many steps as fit, but one at least.

    Returns the milliseconds of each. `warmup` steps, which do not count, are made at once. `before` precedes each step.
    """

    def __init__(self, step: Callable, device: torch.device, warmup: int = 1, before: Callable | None = None):
        self.step, self.clock, self.last_ms, self.before = step, StepClock(device), float("inf"), before
        for _ in range(warmup):
            step()

    def __call__(self, seconds: float) -> list[float]:
        return self.make(max(1, int(1e3 * seconds / self.last_ms)))

    def make(self, count: int) -> list[float]:
        """Milliseconds of `count` steps."""
        for _ in range(count):
            if self.before:
                self.before()
            self.clock.start()
            self.step()
            self.clock.stop()
        ms = self.clock.read()
        self.last_ms = max(1e-3, statistics.median(ms))
        return ms


def of_a_kernel(step: Callable[[], object], device: torch.device) -> tuple[Steps, str]:
    """(turns of a `step` of attention alone, how they are timed): graphs replayed on a GPU if it can be, else calls.

    A replay of a CUDA graph from a cold L2 cache takes only the device's time, however long Python takes. A `step` that
    waits for the device cannot be captured.
    """
    if device.type == "cuda":
        other = torch.empty(2**29, dtype=torch.int8, device=device)  # twice what any GPU's caches hold
        with contextlib.suppress(RuntimeError):  # if capturing is not the cause, the calls raise the error again
            graph = _captured(step, device)
            # zero_ fills the caches, and takes long enough to launch the replay meanwhile
            return Steps(graph.replay, device, before=other.zero_), "graph replay, cold L2"
    return Steps(step, device), "calls"


@functools.cache  # one stream for all calls, because cuBLAS keeps a workspace for each stream
def _side_stream(device):
    return torch.cuda.Stream(device)


def _captured(step, device):
    graph, side = torch.cuda.CUDAGraph(), _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # the current stream computes the inputs
    with torch.cuda.stream(side), warnings.catch_warnings(), contextlib.ExitStack() as at_the_end:
        # the stream's context restores the current one, which a failed capture would not
        warnings.simplefilter("ignore")  # PyTorch calls this mode a prototype
        at_the_end.callback(torch.cuda.set_sync_debug_mode, "default")
        step()  # warms up
        torch.cuda.set_sync_debug_mode("error")  # a failed capture would leave the GPU's random numbers unusable
        step()
        torch.cuda.set_sync_debug_mode("default")
        with torch.cuda.graph(graph, stream=side):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    return graph


def summary(ms: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of samples in milliseconds, and their number."""
    p10, median, p90 = np.percentile(ms, [10, 50, 90]).tolist()
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "samples": len(ms)}
