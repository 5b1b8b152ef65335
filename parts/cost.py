"""The FLOP/s that a device could do, to count use against; and the bytes that a call holds."""

import itertools

import torch
from torch.nn import functional as F

from parts import clock, machine

# dense 16-bit peaks with float32 sums, TFLOP/s, from the makers' data sheets; the first name that fits counts
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "V100": 125,
    "T4": 65,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "MI300X": 1307,
    "MI250": 191.5,  # a device is one of its two dies
    "MI210": 181,
}


def peak_flops(device, dtype):
    """FLOP/s of `device` in `dtype`, and where the figure is from: the maker, or one large product timed here."""
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for part, tflops in PEAK_TFLOPS.items():
            if part in name:
                return tflops * 1e12, f"data sheet of {part}"
    n, ms, best = 128, 0.0, 0.0
    while ms < 20 and n < 16384:  # larger products come nearer to the peak
        n *= 2
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        ms = min(clock.samples(lambda a=a, b=b: F.linear(a, b), device, count=5, warmup=1))
        best = max(best, 2 * n**3 / (ms / 1e3))
    return best, f"measured: products of up to {n} x {n}"


def peak_bytes(step, device):
    """Most bytes that a call of `step` holds beyond what was held before: tensors, and the kernels' own scratch."""
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        machine.reset_peak_memory(device)
        step()
        return machine.peak_memory(device) - held
    # a process keeps what it has freed, so its size tells little: the allocator's own account, from the profiler
    activities = [torch.profiler.ProfilerActivity.CPU]
    with machine.quiet(), torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))
