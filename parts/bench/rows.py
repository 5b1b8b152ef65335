"""A benchmark's rows: measured one by one, each kept in rows.jsonl at once, so that an interrupted run goes on there.

A row is what identifies it (`plan`), a status and, where that is "measured", what was measured:

    {"rung": "flash", …, "status": "measured", "median_ms": 113.0, …}
    {"rung": "efficient", …, "status": "refused", "reason": "PyTorch has this kernel on GPUs only"}

The first line of the file is the head: what was asked for, and of which machine; lines "before" and "after" hold the
machine's state (clocks, temperature) around the rows.
"""

import contextlib
import functools
import itertools
import json
import statistics
import time
import warnings

import torch

from parts import clock, cost, kernels, parity
from parts.errors import UserError, out_of_memory
from parts.files import atomic, read_jsonl

ODD = 127  # tokens; kernels are written for multiples of 64 and 128
FINAL = ("measured", "refused", "parity failed", "out of memory")  # not so "failed": it is tried again


class ParityError(Exception):
    """A kernel's result is not attention: it gets no time."""


def proof(attend, shape, device, dtype, backward=True):
    """{'errors': …, 'parity': in words} of `attend` against float64 at (B, nh, T, hs). Raises ParityError.

    It runs at the whole shape, and at an odd length. Float64 holds T² scores a head, so it is taken on two heads of one
    sequence, and on one beyond T = 4096.
    """
    _, nh, T, hs = shape
    heads = min(nh, 2 if T <= 4096 else 1)
    verdict(_odd(attend, nh, hs, device, dtype, backward), dtype, f"at {ODD} tokens")
    errors = parity.errors(attend, shape, device, dtype, backward, heads=heads)
    return {"errors": errors, "parity": verdict(errors, dtype, f"on {heads} of {nh} heads")}


@functools.lru_cache
def _odd(attend, nh, hs, device, dtype, backward):
    return parity.errors(attend, (1, nh, ODD, hs), device, dtype, backward)


def verdict(errors, dtype, where):
    """'passed' in words, for a row. Raises ParityError where an error of parity.errors is beyond the tolerance."""
    worst = f"largest error {max(errors.values()):.1e} {where}, allowed {parity.TOLERANCE[dtype]:.0e}"
    if not parity.passes(errors, dtype):
        raise ParityError(worst)
    return f"passed: {worst}"


@contextlib.contextmanager
def refusals():
    """Make of a kernel's refusal a UserError with the reasons; a full memory passes as it is."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if out_of_memory(error) or isinstance(error, torch.AcceleratorError):  # the latter: the GPU has crashed
                raise
            raise UserError(kernels.reasons(caught, error)) from error


def timed(step, s, device, trace):
    """Of a call: the kernel that the profiler saw, peak bytes above what was held before, and times of s.repeats.

    With s.profile the file `trace` gets the profile.
    """
    kernel = kernels.observe(step, trace if s.profile else None)
    peak = cost.peak_bytes(step, device)
    samples_ms = clock.samples(step, device, s.repeats, s.warmup)
    return {"kernel": kernel, "peak_memory": peak, "samples_ms": samples_ms, **clock.summary(samples_ms)}


def tflops(shape, backward, row):
    """TFLOP/s of causal attention at (B, nh, T, hs): two products forward and five backward, half of each.

    The count of FlashAttention-2 (arXiv:2307.08691, section 4.1).
    """
    B, nh, T, hs = shape
    forward = 4 * B * nh * T * T * hs / 2
    return forward * (3.5 if backward else 1) / (row["median_ms"] * 1e9)


def attempt(measure, spec):
    """The row of `spec`: what measure(spec) returns, or how it failed; no failure is the end of the others."""
    try:
        return {**spec, "status": "measured", **measure(spec)}
    except UserError as error:
        return {**spec, "status": "refused", "reason": str(error)}
    except ParityError as error:
        return {**spec, "status": "parity failed", "reason": str(error)}
    except Exception as error:  # whatever it was, the row says it and the next one runs
        first = (str(error).strip().splitlines() or [""])[0]
        full = out_of_memory(error)
        return {**spec, "status": "out of memory" if full else "failed", "reason": f"{type(error).__name__}: {first}"}


def run(plan, measure, path, head, state, say):
    """Measure what `plan` (dicts) lists and `path` does not hold yet; a row is written as soon as it is there.

    An earlier file of the same `head` is taken up; one of another is moved aside. state(): the machine's, as a dict.
    """
    kept = _taken_up(path, head, say)
    with atomic(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in [{"kind": "head", **head}, *kept])
        file.write(json.dumps({"kind": "before", **state()}) + "\n")
    todo = [spec for spec in plan if not any(spec.items() <= row.items() for row in kept)]
    if len(todo) < len(plan):
        say(f"{len(plan) - len(todo)} of {len(plan)} rows are there already")
    seconds = {}  # by part: one part's rows may take a hundred times another's
    with open(path, "a", buffering=1) as file:
        for n, spec in enumerate(todo, start=1):
            began = time.perf_counter()
            row = attempt(measure, spec)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            file.write(json.dumps({"kind": "row", **row}) + "\n")
            seconds.setdefault(spec.get("part"), []).append(time.perf_counter() - began)
            overall = statistics.mean(itertools.chain(*seconds.values()))
            means = {part: statistics.mean(each) for part, each in seconds.items()}
            left = sum(means.get(other.get("part"), overall) for other in todo[n:])
            name = ", ".join(str(value) for value in spec.values())
            say(f"[{n}/{len(todo)}] {name}: {in_words(row)}; about {_minutes(left)} left")
        file.write(json.dumps({"kind": "after", **state()}) + "\n")


def _taken_up(path, head, say):
    """The lines of an earlier run that go on to count: all but its head, and its failed rows."""
    if not path.exists():
        return []
    old = read_jsonl(path)
    if old and _same(old[0], head):
        return [line for line in old[1:] if line["kind"] != "row" or line["status"] in FINAL]
    aside = next(name for n in itertools.count(1) if not (name := path.with_name(f"rows.previous-{n}.jsonl")).exists())
    path.replace(aside)
    say(f"{path} is of other settings, or of another machine: moved to {aside}")
    return []


def _same(one, other):
    """Whether two heads ask for the same of the same machine. The command may name fewer rows, the code be newer."""
    machines = [{**head.get("environment", {}), "commit": None} for head in (one, other)]
    return one.get("settings") == other["settings"] and machines[0] == machines[1]


def in_words(row):
    """A row's outcome in a phrase."""
    if row["status"] != "measured":
        return f"{row['status']}: {row['reason']}"
    if "median_ms" in row:
        return f"median {row['median_ms']:.3f} ms (p10 {row['p10_ms']:.3f}, p90 {row['p90_ms']:.3f})"
    return "measured"


def _minutes(seconds):
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def numbers(text):
    """'256,512' or '256-4096-64' (first, last, step) as a list. Raises UserError for anything else."""
    try:
        found = []
        for word in text.split(","):
            first, *rest = map(int, word.split("-"))
            last, step = rest or (first, 1)
            found += range(first, last + 1, step)
        if not found or min(found) < 1:
            raise ValueError
    except ValueError:
        raise UserError(f"lengths={text!r} must be like 256,512 or 256-4096-64 (first-last-step)") from None
    return found


def slug(text):
    """`text` as a file name: 'flash + padded' is 'flash-padded'."""
    return "-".join("".join(c if c.isalnum() or c in "._" else " " for c in text).split())
