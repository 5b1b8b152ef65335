"""Time calls in milliseconds. Every reading of the clock waits for the device first.

`samples` times what a user waits for. `device_samples` times only the device, however long Python takes to launch.
Triton has no such timer: its do_bench includes gaps between launches if launching takes longer than running, and its
do_bench_cudagraph leaves the inputs in the L2 cache and gives no samples.
"""

import contextlib
import functools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

# limit of involuntary context switches per second of CPU time; other systems count other switches too
PREEMPTED = 100 if sys.platform == "linux" else math.inf
HELD_UP = 1.1  # limit of the median on all threads over that on one thread, if the system does not count


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
        """Begin a step."""
        self.starts.append(self._mark())

    def stop(self) -> None:
        """End the step that was started last."""
        self.stops.append(self._mark())

    def read(self) -> list[float]:
        """Milliseconds of each step since the last call. Waits for the device."""
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
    """Milliseconds per call of `step`: `count` samples, after `warmup` calls that are not timed.

    On a GPU, one sample is the mean of as many calls as take a millisecond, because waiting for the device takes longer
    than a short kernel.
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


@functools.cache
def own_clock() -> Callable[[], float]:
    """The clock in seconds of this process's own CPU time, if it is finer than a call; otherwise the usual clock.

    Windows counts CPU time in steps of 16 ms, and Linux under `ulimit -t` in steps of 4 ms.
    """
    return time.process_time if len({time.process_time() for _ in range(1000)}) > 100 else time.perf_counter


def own_samples(step: Callable[[], object], device: torch.device, count: int, warmup: int) -> list[float]:
    """`samples`, on a CPU without time that other programs took: no call is longer than all its threads have computed.

    On an idle machine a call never is, because at least one thread computes all the time.
    """
    own, clock = [], own_clock()

    def counted():
        began = clock()
        step()
        own.append(1e3 * (clock() - began))

    if device.type != "cpu":
        return samples(step, device, count, warmup)
    return [*map(min, samples(counted, device, count, warmup), own[-count:])]


def usage() -> tuple[int, float]:
    """(involuntary context switches, seconds of CPU time) of this process and of its children that have ended."""
    if resource is None:
        return 0, time.process_time()  # without the children
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(r.ru_nivcsw for r in both), sum(r.ru_utime + r.ru_stime for r in both)


def held_up(before: tuple[int, float], ms: list[float], alone_ms: float) -> bool:
    """Whether other programs held up calls on all threads, so that their times say little.

    On Linux: whether the system often took the CPU away since `before`, an earlier usage(). Elsewhere: whether most
    calls took longer than on one thread, which on many cores a small model does without other programs too. ms: of the
    calls; alone_ms: of one on one thread.
    """
    if math.isinf(PREEMPTED):
        return statistics.median(ms) > HELD_UP * alone_ms
    (switches, cpu), (switches_then, cpu_then) = before, usage()
    return switches_then - switches > PREEMPTED * max(cpu_then - cpu, 0.1)  # a few in a moment say nothing


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """A context in which a CPU computes on one thread, which hardly notices other programs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def device_samples(
    step: Callable[[], object], device: torch.device, count: int, warmup: int
) -> tuple[list[float], str]:
    """Milliseconds that the device takes per call of `step`: `count` samples, and how they were taken.

    On a GPU, `step` is captured in a CUDA graph after `warmup` calls and one more. A sample is a replay from a cold L2
    cache: "graph replay, cold L2". A `step` that waits for the device cannot be captured. For such a step, and on other
    devices, the samples come from `samples`: "calls".
    """
    if device.type == "cuda":
        try:
            graph = _captured(step, device, warmup)
        except RuntimeError:  # if capturing is not the cause, `samples` raises the error again
            return samples(step, device, count, warmup), "calls"
        return _replayed(graph, device, count), "graph replay, cold L2"
    return samples(step, device, count, warmup), "calls"


@functools.cache  # one stream for all calls, because cuBLAS keeps a workspace for each stream
def _side_stream(device):
    return torch.cuda.Stream(device)


def _captured(step, device, warmup):
    graph, side = torch.cuda.CUDAGraph(), _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # the current stream computes the inputs
    with torch.cuda.stream(side):  # restores the current stream, which a failed capture would not
        for _ in range(warmup):
            step()
        _without_waiting(step)  # a failed capture would leave the GPU's random numbers unusable
        with torch.cuda.graph(graph, stream=side):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    return graph


def _without_waiting(step):
    """Call `step`. Raises RuntimeError if it waits for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _replayed(graph, device, count):
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    # an MI300X has 256 MiB more behind its L2 cache, its Infinity Cache, which PyTorch does not report
    least = 2**29 if torch.version.hip else 2**28
    other = torch.empty(max(2 * cache, least), dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    graph.replay()  # the first replay uploads the graph
    for start, end in events:
        other.zero_()  # fills the L2 cache, and takes long enough to launch the replay meanwhile
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    graph.reset()  # frees its memory
    return [start.elapsed_time(end) for start, end in events]


def reference(device: torch.device) -> float:
    """Milliseconds per call of a fixed matrix product. The calls take 40 ms on an idle CPU, and 350 ms on an idle GPU.

    On an idle device the product always takes the same time, so a longer time means that the device is shared or
    throttled. The result is a mean, because a process that is suspended every few milliseconds still has fast calls,
    and even a fast median.
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

    mean_ms(10.0 if on_cpu else 300.0)  # warm up: threads wake up, and a GPU's clocks rise for 200 ms or more
    return mean_ms(30.0 if on_cpu else 50.0)


def in_words(seconds: float) -> str:
    """A duration in words: '40 s', '12 min', '3 h 20 min', '4.2 days'."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 60 / 24:.1f} days"


def summary(ms: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of samples in milliseconds, and their number."""
    p10, median, p90 = np.percentile(ms, [10, 50, 90]).tolist()
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "samples": len(ms)}
