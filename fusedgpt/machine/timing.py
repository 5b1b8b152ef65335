"""Time steps in milliseconds. Every reading of the clock waits for the device first.

Triton has no timer for what is wanted here: its do_bench includes gaps between launches if launching takes longer than
running, and its do_bench_cudagraph leaves the inputs in the L2 cache and gives no samples.
"""

import contextlib
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch


def now(device: torch.device) -> float:
    """The clock in seconds, read once everything that was launched on `device` has finished."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


class StepClock:
    """The times of steps on `device`. They are read later, so that timing a step does not make it wait for the device.

    On CUDA, the device itself stamps events. Elsewhere the host's clock is read; on MPS, after waiting for the device.
    """

    def __init__(self, device: torch.device):
        self.device, self.starts, self.stops = device, [], []

    def start(self) -> None:
        self.starts.append(self._mark())

    def stop(self) -> None:
        self.stops.append(self._mark())

    def read(self) -> list[float]:
        """Milliseconds of each step since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            ms = [start.elapsed_time(stop) for start, stop in zip(self.starts, self.stops)]
        else:
            ms = [1e3 * (stop - start) for start, stop in zip(self.starts, self.stops)]
        self.starts, self.stops = [], []
        return ms

    def _mark(self):
        if self.device.type != "cuda":
            return now(self.device)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Steps:
    """Turns of a step in this process: called with seconds, it makes as many steps as fit, but one at least.

    Returns the milliseconds of each. `warmup` steps, which do not count, are made at once. `before` precedes each step.
    """

    def __init__(
        self, step: Callable[[], object], device: torch.device, warmup: int = 1, before: Callable | None = None
    ):
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


def of_a_kernel(step: Callable[[], object], device: torch.device, warmup: int = 1) -> tuple[Steps, str]:
    """(turns of a `step` of attention alone, how they are timed): graphs replayed on a GPU if it can be, else calls.

    A replay of a CUDA graph from a cold L2 cache takes only the device's time, however long Python takes. A `step` that
    waits for the device cannot be captured.
    """
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # if capturing is not the cause, the calls raise the error again
            graph = _captured(step, device, warmup)
            cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
            # an MI300X has 256 MiB more behind its L2 cache, its Infinity Cache, which PyTorch does not report
            least = 2**29 if torch.version.hip else 2**28
            other = torch.empty(max(2 * cache, least), dtype=torch.int8, device=device)
            # zero_ fills the L2 cache, and takes long enough to launch the replay meanwhile
            return Steps(graph.replay, device, warmup=1, before=other.zero_), "graph replay, cold L2"
    return Steps(step, device, warmup), "calls"


@functools.cache  # one stream for all calls, because cuBLAS keeps a workspace for each stream
def _side_stream(device):
    return torch.cuda.Stream(device)


def _captured(step, device, warmup):
    graph, side = torch.cuda.CUDAGraph(), _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # the current stream computes the inputs
    with torch.cuda.stream(side):  # restores the current stream, which a failed capture would not
        for _ in range(warmup):
            step()
        with _no_waiting():  # a failed capture would leave the GPU's random numbers unusable
            step()
        with torch.cuda.graph(graph, stream=side):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    return graph


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """A context in which waiting for the GPU raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def summary(ms: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of samples in milliseconds, and their number."""
    p10, median, p90 = np.percentile(ms, [10, 50, 90]).tolist()
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "samples": len(ms)}
