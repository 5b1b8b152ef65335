"""Milliseconds as the device spends them: every reading of the clock waits for the device first.

`samples` times what a user waits for. `device_samples` times only the device, however long Python takes to launch.
Neither of Triton's timers does that: do_bench times the gaps between launches if launching takes longer than running,
and do_bench_cudagraph leaves the inputs in the L2 cache and gives no samples.
"""

import functools
import math
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch


def now(device: torch.device) -> float:
    """Seconds, read once everything that was launched on `device` has finished."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


class StepClock:
    """The time of each step on `device`, read later, so that no step waits for the device to be timed.

    On CUDA, the device itself stamps events. Elsewhere the host's clock is read; on MPS, after waiting for the device.
    """

    def __init__(self, device: torch.device):
        self.device, self.starts, self.stops = device, [], []

    def start(self) -> None:
        """A step begins here."""
        self.starts.append(self._mark())

    def stop(self) -> None:
        """The step that was started last ends here."""
        self.stops.append(self._mark())

    def read(self) -> list[float]:
        """Milliseconds of each step since the last reading. Waits for the device."""
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


def samples(step: Callable[[], object], device: torch.device, count: int, warmup: int) -> list[float]:
    """Milliseconds a call of `step`: `count` samples, after `warmup` calls that are not counted.

    On a GPU, which works asynchronously, one sample is the mean of as many calls as take a millisecond: waiting for
    the device takes longer than a short kernel does.
    """
    for _ in range(warmup):
        step()

    def sample(calls):
        start = now(device)
        for _ in range(calls):
            step()
        return 1e3 * (now(device) - start) / calls

    calls = 1 if device.type == "cpu" else max(1, math.ceil(1 / sample(1)))
    return [sample(calls) for _ in range(count)]


def device_samples(
    step: Callable[[], object], device: torch.device, count: int, warmup: int
) -> tuple[list[float], str]:
    """Milliseconds that the device takes for a call of `step`: `count` samples, and how they were taken.

    On a GPU `step` is captured in a CUDA graph, after `warmup` calls and one more, and a sample is a replay from a cold
    L2 cache: "graph replay, cold L2". If `step` waits for the device, it cannot be captured; then, and on other
    devices, the samples are those of `samples`: "calls".
    """
    if device.type == "cuda":
        try:
            graph = _captured(step, device, warmup)
        except RuntimeError:  # an error that is not the capture's own comes again in `samples`
            return samples(step, device, count, warmup), "calls"
        return _replayed(graph, device, count), "graph replay, cold L2"
    return samples(step, device, count, warmup), "calls"


@functools.cache  # one for all calls: cuBLAS keeps a workspace for each stream
def _side_stream(device):
    return torch.cuda.Stream(device)


def _captured(step, device, warmup):
    graph, side = torch.cuda.CUDAGraph(), _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # for the inputs
    with torch.cuda.stream(side):  # restores the stream, which a failed capture leaves current
        for _ in range(warmup):
            step()
        _without_waiting(step)  # a capture that fails would leave the GPU's random numbers unusable
        with torch.cuda.graph(graph, stream=side):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    return graph


def _without_waiting(step):
    """Call `step`, which raises RuntimeError if it waits for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _replayed(graph, device, count):
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    other = torch.empty(max(2 * cache, 2**28), dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    graph.replay()  # the first uploads the graph
    for start, end in events:
        other.zero_()  # fills the L2 cache, and takes so long that the replay is launched meanwhile
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    graph.reset()  # gives its memory back
    return [start.elapsed_time(end) for start, end in events]


def reference(device: torch.device) -> float:
    """Milliseconds a call of a fixed matrix product: 40 ms in all on a CPU, 350 on a GPU, if nothing else uses it.

    On an idle device it always takes the same time, so a longer time means that the device is shared or throttled. It
    is a mean, because a process that is suspended every few milliseconds still has a fast call, and even a fast median.
    """
    on_cpu = device.type == "cpu"
    n, calls = (512, 1) if on_cpu else (2048, 16)  # calls between two readings of the clock
    a = torch.full((n, n), 0.5, device=device, dtype=torch.float32 if on_cpu else torch.float16)

    def mean_ms(at_least):
        done, spent, start = 0, 0.0, now(device)
        while spent < at_least:
            for _ in range(calls):
                a @ a
            done, spent = done + calls, 1e3 * (now(device) - start)
        return spent / done

    mean_ms(10.0 if on_cpu else 300.0)  # warm-up: threads wake up, the clocks of a GPU rise for 200 ms and more
    return mean_ms(30.0 if on_cpu else 50.0)


def in_words(seconds: float) -> str:
    """A duration as people say it: '40 s', '12 min', '3 h 20 min', '4.2 days'."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 60 / 24:.1f} days"


def summary(ms: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of milliseconds, and how many there were."""
    p10, median, p90 = np.percentile(ms, [10, 50, 90]).tolist()
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "samples": len(ms)}
