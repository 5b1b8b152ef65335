"""Which attention kernels this machine permits, which is fastest, and which one ran.

A named kernel runs or the program ends with the reason (`require`); the receipt says what the profiler saw (`observe`).
"""

import contextlib
import warnings

import torch

from parts import clock, machine, parity
from parts.attention import ATTENTION
from parts.errors import UserError, out_of_memory

_FUSED = ("flash", "efficient", "cudnn", "flex")


def observe(step, trace=None):
    """Run `step` (a forward, with or without its backward) under the profiler and name what computed attention.

    Returns {'forward': [...], 'backward': [...], 'ops': [...]}. Names are those of ATTENTION; 'unfused' means that no
    attention kernel was seen: matrix products and a softmax, as in `manual`, and as in `math` once it is compiled.
    'ops' are the operators and device kernels with attention in their names, as the profiler spells them. The file
    `trace` gets the whole profile, for ui.perfetto.dev.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with machine.quiet(), torch.profiler.profile(activities=activities) as seen:
        step()
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(trace))
    ops = sorted({e.key for e in seen.key_averages() if _is_attention(e.key)})
    # by PyTorch's operators, not by the kernels below: those of cuDNN have "flash" in their names. Flex has no operator
    named = [op for op in ops if op.startswith("aten::") or "flex" in op]
    fused = {(name, "backward" in op) for op in named for name in _FUSED if name in op}
    forward = sorted(name for name, backward in fused if not backward)
    if not forward:
        forward = ["math" if any("_attention_math" in op for op in ops) else "unfused"]
    return {"forward": forward, "backward": sorted(n for n, backward in fused if backward) or ["unfused"], "ops": ops}


def _is_attention(op):
    # autograd's own wrappers repeat the operator's name; user ranges and graph names start with neither
    return not op.startswith("autograd::") and any(
        word in op.lower() for word in ("_attention", "flash_fwd", "flash_bwd", "fmha", "_sdpa")
    )


def contradiction(name, receipt, device, backward=True):
    """Why `receipt` shows something other than the kernel that was named, or None where it agrees."""
    if name in ("sdpa", "auto"):
        return None
    if name in ("flash", "efficient", "cudnn"):
        allowed = {"forward": [[name]], "backward": [[name]]}
    elif name == "manual":
        allowed = {"forward": [["unfused"]], "backward": [["unfused"]]}
    elif name == "math":
        allowed = {"forward": [["math"], ["unfused"]], "backward": [["unfused"]]}
    elif device.type == "cpu":  # flex again: the CPU's C++ template carries no name of its own
        allowed = {"forward": [["unfused"]]}
    else:  # flex in Triton's kernels, which carry it in theirs
        allowed = {"forward": [["flex"]], "backward": [["flex"]]}
    for direction in ("forward", "backward") if backward else ("forward",):
        if receipt[direction] not in allowed[direction]:
            seen = " and ".join(receipt[direction])
            return f"attention='{name}' was asked for, but the profiler saw {seen} in the {direction} pass"
    return None


def as_run(name, device, dtype, backward):
    """The function `name` as the scripts run it: training under autocast, generation in `dtype` throughout."""

    def attend(q, k, v, dropout_p=0.0):
        with machine.autocast(device, dtype) if backward else contextlib.nullcontext():
            return ATTENTION[name](q, k, v, dropout_p)

    return attend


def refusal(name, shape, device, dtype, dropout=0.0, backward=True, keys=None):
    """Why the kernel `name` cannot run here, in one phrase, or None where it can.

    shape: (B, nh, T, hs), against `keys` keys (None: T). Found by running it once, on one head of one sequence, under
    the profiler; twice, with gradients compared bit by bit, where deterministic algorithms are asked for.
    """
    if name == "flex" and device.type == "cpu" and backward:
        return "PyTorch has no backward of FlexAttention on a CPU"
    if name == "flex" and dropout > 0:
        return "FlexAttention has no dropout"
    if name in ("efficient", "cudnn") and device.type == "cpu":
        return "PyTorch has this kernel on GPUs only"
    T, hs = shape[2:]
    q, k, v, dy = parity.inputs((1, 1, keys or T, hs), device, dtype, requires_grad=backward)
    q, dy = q[:, :, -T:], dy[:, :, -T:]
    attend, results = as_run(name, device, dtype, backward), []

    def step():
        torch.manual_seed(0)
        y = attend(q, k, v, dropout)
        results.append((y, *torch.autograd.grad(y, (q, k, v), dy)) if backward else (y,))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            receipt = observe(step)
            if torch.are_deterministic_algorithms_enabled():
                step()
        except RuntimeError as error:
            return reasons(caught, error)
    if len(results) == 2 and not all(torch.equal(a, b) for a, b in zip(*results)):
        return "it is not deterministic: two runs gave different gradients"
    return contradiction(name, receipt, device, backward)


def reasons(caught, error):
    """Why a forced kernel raised `error`, in one phrase: PyTorch says it in warnings, which were `caught`."""
    if not any(sign in str(error) for sign in ("No available kernel", "No viable backend")):
        caught = ()  # it is another error, and they are about something else
    said = dict.fromkeys(str(w.message).split(" (Triggered internally")[0].rstrip(". ") for w in caught)
    found = [r for r in said if "not used because" not in r and "runtime disabled" not in r]
    return "; ".join(found) or str(error).strip().splitlines()[0].rstrip(". ")


def require(name, shape, device, dtype, dropout=0.0, backward=True, keys=None):
    """Raise UserError, with the reason and what would run instead, unless the kernel `name` can run here."""
    where = (shape, device, dtype, dropout, backward, keys)
    if reason := refusal(name, *where):
        others = [n for n in ATTENTION if not refusal(n, *where)]
        doing, auto = ("train", " or auto") if backward else ("run", "")
        raise UserError(
            f"attention='{name}' cannot {doing} on {device.type} in {str(dtype).removeprefix('torch.')}"
            f" with dropout {dropout:g}: {reason}. Here --attention can be {', '.join(others)}{auto}."
        )


def fastest(shape, device, dtype, dropout=0.0, backward=True):
    """The fastest permitted kernel that passes parity on (B, nh, T, hs), and a row for each: its time, or why none."""
    q, k, v, dy = parity.inputs(shape, device, dtype, requires_grad=backward)
    rows = {}
    for name in ATTENTION:
        if name == "sdpa":  # it is one of the others
            continue
        rows[name] = row = {"refused": refusal(name, shape, device, dtype, dropout, backward)}
        if row["refused"]:
            continue
        attend = as_run(name, device, dtype, backward)

        def step(attend=attend):
            y = attend(q, k, v, dropout)
            if backward:
                torch.autograd.grad(y, (q, k, v), dy)

        try:
            row["errors"] = parity.errors(attend, shape, device, dtype, backward, heads=2)
            if not parity.passes(row["errors"], dtype):
                row["refused"] = f"it fails parity with float64: {row['errors']}"
                continue
            row |= clock.summary(clock.samples(step, device, count=10, warmup=3))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            row["refused"] = "out of memory at this shape"
    timed = {name: row["median_ms"] for name, row in rows.items() if "median_ms" in row}
    return min(timed, key=timed.get), rows
