"""Whether compiling a model on a CPU pays for a run: by what it costs, and by what it gains over the whole run.

It costs the seconds of the first compiled calls, few if the compiler's cache still has the graphs. It gains a share of
each forward and backward pass. A run that compiles measures both and remembers them for the next. Until they are known,
cautious numbers stand for them, so that a run is not longer than it would have been without the compiler.
"""

import functools
import hashlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fusedgpt.errors import UserError, first_line
from fusedgpt.machine import timing
from fusedgpt.machine.choices import Choices

# of models that were never compiled here. Two idle cores with AVX2 took 23 s for 4 layers; one core, beside other work,
# 75 s of the CPU, and 10 s with cached graphs, to gain nothing (results/cpu_avx2/compiling.jsonl)
GAIN = 1.1  # an eager pass takes so many times as long as a compiled one
COLD_S, COLD_S_A_LAYER = 20.0, 3.0  # seconds to compile, and for each layer
WARMER = 4.0  # compiling with cached graphs is so many times as fast
MARGIN = 1.3  # take what must be saved to be so many times what is spent
RISK = 0.03  # spend at most this share of a run as long as the gain is not known: there may be none
LEAST_GAIN = 1.02  # a run that has compiled goes on eager if it gains less
COMPARE_S, FEWEST, MOST = 3.0, 2, 8  # compare for so many seconds, and so many rounds


def decide(
    memory: Choices, case: dict[str, Any], length: dict[str, Any], seconds: float, layers: int, attempt: Callable
) -> dict[str, Any]:
    """Whether a run is to `compile`, `why_eager`, and the numbers that say so.

    A command that is given again gets the same answer, unless the compiler's cache has lost graphs that it counted on.
    case: the model and the machine. length: what the command says of the run's length. seconds: of all its forward and
    backward passes if they are eager. layers: of the model. attempt: compiles the model, given whether to compare it
    with an eager one and what was decided before; returns what `measured` does, and what else to remember; may raise.
    """
    of_run, of_model = {"for": "compile", **case, **length}, {"for": "cost of compiling", **case}
    past, costs = memory.recall(of_run), memory.latest(of_model) or {}
    if memory.again and _no_gain(costs):  # other programs may have been the reason, and nothing would time it again
        costs = {}
    if past and not past["compile"]:
        return past
    numbers = weigh(costs, bool(costs) and _marker(case).exists(), seconds, layers)
    if numbers["pays"] or (past and numbers["cached"]):
        numbers |= _attempted(functools.partial(attempt, before=past or {}), memory, case, costs)
        if "compile_s" in numbers:
            memory.remember(of_model, _learned(costs, numbers))
    else:
        why_eager = f"compiling takes about {numbers['cost_s']:.0f} s and would save about {numbers['saves_s']:.0f}"
        numbers |= {"compile": False, "why_eager": _no_gain(costs) or why_eager}
    if not past or numbers["compile"] != past["compile"]:
        memory.remember(of_run, numbers)
    return numbers


def weigh(costs: dict[str, float], cached: bool, seconds: float, layers: int) -> dict[str, Any]:
    """What compiling costs and saves in a run whose eager passes take `seconds`, and whether it pays.

    costs: what was measured before: eager_ms, compiled_ms, cold_s, warm_s, as far as they are known.
    """
    gain = costs["eager_ms"] / costs["compiled_ms"] if costs else GAIN
    cold = costs.get("cold_s") or COLD_S + COLD_S_A_LAYER * layers
    cost = (costs.get("warm_s") or cold / WARMER) if cached else cold
    saves = max(0.0, seconds * (1 - 1 / gain))
    numbers = {"eager_passes_s": seconds, "known": bool(costs), "cached": cached, "gain": gain}
    pays = saves > MARGIN * cost and not _no_gain(costs) and (bool(costs) or cost < RISK * seconds)
    return {**numbers, "cost_s": cost, "saves_s": saves, "pays": pays}


def measured(eager: Callable, compiled: Callable, also: Callable, compare: bool) -> dict[str, Any]:
    """Compile, and say what it took and, if it is to `compare`, the milliseconds of a pass `eager` and `compiled`.

    also: makes what else a run compiles. The two passes take turns, and the least time of each counts.
    """
    began, new = time.perf_counter(), _compiled_anew()
    compiled()
    also()
    found = {"compile_s": time.perf_counter() - began, "was_cached": _compiled_anew() == new}
    if not compare:
        return found

    def ms(step):
        return timing.own_samples(step, torch.device("cpu"), count=1, warmup=0)[0]

    once = [ms(eager), ms(compiled)]
    rounds = min(MOST, max(FEWEST, int(1e3 * COMPARE_S / sum(once))))
    least = [min(times) for times in zip(*([ms(eager), ms(compiled)] for _ in range(rounds)))]
    return found | dict(zip(("eager_ms", "compiled_ms"), least))


def _attempted(attempt, memory, case, costs):
    try:
        found = attempt(compare=not costs or memory.again)
    except Exception as error:  # a compiler raises types of its own; without it the run goes on
        why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        return {"compile": False, "why_eager": f"torch.compile cannot work here: {why}"}
    if "compile_s" in found:
        _marker(case).touch()
    why_eager = _no_gain(found)
    return found | {"compile": not why_eager, "why_eager": why_eager}


def _no_gain(measured):
    """Why a compiled model is no faster, if that was `measured`; empty otherwise."""
    if "eager_ms" not in measured or measured["eager_ms"] >= LEAST_GAIN * measured["compiled_ms"]:
        return ""
    return f"a pass takes {measured['eager_ms']:.0f} ms, and {measured['compiled_ms']:.0f} compiled"


def _learned(costs, numbers):
    """`costs` with what a run has measured. Other load only adds time, so that the least counts."""
    name = "warm_s" if numbers["was_cached"] else "cold_s"
    learned = {name: min(numbers["compile_s"], costs.get(name, math.inf))}
    learned |= {name: numbers[name] for name in ("eager_ms", "compiled_ms") if name in numbers}
    return {name: value for name, value in (costs | learned).items() if name != "when"}


def _marker(case):
    """The file beside the cached graphs that says that those of `case` are among them."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes a second to import

    digest = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:16]
    return pathlib.Path(cache_dir(), f"fusedgpt-{digest}")


def _compiled_anew():
    """How many graphs this process has compiled because the compiler's cache did not have them."""
    dynamo = sys.modules.get("torch._dynamo")
    counters = dynamo.utils.counters["inductor"] if dynamo else {}
    return sum(counters[f"fxgraph_cache_{what}"] for what in ("miss", "bypass") if counters)
