"""Time as the device spends it: every reading waits for the device first."""

import time

import numpy as np
import torch


def now(device):
    """Seconds, read once everything launched on `device` has ended."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


def samples(step, device, count, warmup):
    """Milliseconds of each of `count` calls of `step`, after `warmup` calls that are not counted."""
    for _ in range(warmup):
        step()
    ms = []
    for _ in range(count):
        start = now(device)
        step()
        ms.append(1e3 * (now(device) - start))
    return ms


def summary(ms):
    """Median, 10th and 90th percentile of a list of milliseconds."""
    p10, median, p90 = np.percentile(ms, [10, 50, 90]).tolist()
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "samples": len(ms)}
