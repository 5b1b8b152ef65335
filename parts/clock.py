"""Time as the device spends it: every reading waits for the device first."""

import math
import time

import numpy as np
import torch


def now(device):
    """Seconds, read once everything launched on `device` has ended."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


def samples(step, device, count, warmup):
    """Milliseconds a call of `step`: `count` samples, after `warmup` calls that are not counted.

    On a device that runs on by itself a sample is as many calls as take a millisecond: the wait for it takes longer
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


def summary(ms):
    """Median, 10th and 90th percentile of a list of milliseconds."""
    p10, median, p90 = np.percentile(ms, [10, 50, 90]).tolist()
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "samples": len(ms)}
