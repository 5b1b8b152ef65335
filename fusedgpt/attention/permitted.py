"""Which attention kernels this machine permits for a case, and why it does not permit the others.

A named kernel runs, or the program ends with the reason; nothing falls back in silence.
"""

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Attend, Case
from fusedgpt.attention.functions import ATTENTION, rounded_by_cudnn
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.attention.table import KERNELS, is_own
from fusedgpt.errors import UserError, first_line, out_of_memory
from fusedgpt.machine.device import autocast, dtype_name, tf32


def require(name: str, case: Case, compiled: bool = False) -> None:
    """Raise UserError, with the reason and what would run instead, unless the kernel `name` can run `case` here.

    Its results must also agree with float64, or it would silently train another model.
    """
    compiled = compiled and (is_own(name) or name == "flex")  # the compiler traces these into the graph of the model
    if reason := refusal(name, case) or wrong(name, case, compiled):
        others = [other for other in KERNELS if other != name and not refusal(other, case)]
        doing = "train" if case.backward else "run"
        there = f"on {case.device.type} in {dtype_name(case.dtype)} with dropout {case.dropout:g}"
        how = f"Here --attention can be {', '.join(others)} or auto."
        raise UserError(f"attention='{name}' cannot {doing} {there}: {reason}. {how}")


@tf32(allowed=False)  # TF32 would round float32 in every kernel
def wrong(name: str, case: Case, compiled: bool = False, trial: dict | None = None) -> str | None:
    """Why the kernel `name` does not compute `case`, or `compiled` is another kernel; None if it may be taken.

    `trial`, if given, gets the errors of the last comparison with float64.
    """
    made = None
    if compiled:
        torch.compiler.reset()  # PyTorch counts recompilations over all kernels together
        made = torch.compile(as_run(name, case), dynamic=False)
    try:
        for where, errors in _comparisons(name, case, made):
            if trial is not None:
                trial["errors"] = errors
            if not parity.passes(errors, case.dtype):
                return f"it fails parity with float64 {where}: {errors}"
        if made:  # the compiler may have replaced it
            inputs = case.inputs()
            if other := contradiction(name, observe(lambda: case.run(made, *inputs)), case):
                return other
        return parity.dropped_wrongly(as_run(name, case), case) if case.dropout else None
    except Exception as error:  # a user's own kernel may raise anything at a shape for which it was not written
        return f"it fails in the comparison with float64: {why(error)}"


def _comparisons(name, case, made):
    """(where, errors) of each comparison with float64 that the kernel `name` must pass; made: it, as it is compiled."""
    sequences = 2 if case.device.type == "cpu" else None
    attend, most = as_run(name, case), parity.shortened(case, sequences)
    yield from parity.checks(attend, most)
    if (is_own(name) or case.device.type == "mps") and case.backward:  # as evaluation calls it (pytorch#195910)
        yield "without gradients", parity.compare(attend, replace(most, backward=False), heads=2)
    if made:  # only at the compiled shape: every other shape would take seconds to compile
        yield "compiled", parity.compare(made, parity.shortened(case), heads=2)


def refusal(name: str, *cases: Case) -> str | None:
    """Why the kernel `name` cannot run one of `cases` here; None if it can.

    The kernel is run once on each, on one head of one sequence, under the profiler. If deterministic algorithms are
    required, it runs twice and the gradients must agree to the bit.
    """
    found = (_known(name, case) or _tried(name, case.of_heads(1, 1)) for case in cases)
    return next(filter(None, found), None)


def _known(name, case):
    """Why a kernel cannot run a case, as far as it is known without a trial."""
    if name == "flex" and case.dropout > 0:
        return "FlexAttention has no dropout"
    if name == "cudnn" and rounded_by_cudnn(case.dropout):
        return f"cuDNN may round dropout {case.dropout:g} to sixteenths"
    if name in KERNELS and KERNELS[name].gpu_only and case.device.type == "cpu":
        return "PyTorch has it on GPUs only"
    return None


def _tried(name, case):
    """Why a kernel cannot run a case, from a trial."""
    attend, inputs, results = as_run(name, case), case.inputs(), []

    def step():
        torch.manual_seed(0)
        results.append(case.run(attend, *inputs))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            receipt = observe(step)
            if torch.are_deterministic_algorithms_enabled():
                step()
        except Exception as error:  # a kernel, its compiler and its package each raise types of their own
            return why(error, caught)
    if len(results) == 2 and not all(torch.equal(a, b) for a, b in zip(*results)):
        return "it is not deterministic: two runs gave different gradients"
    return contradiction(name, receipt, case)


def as_run(name: str, case: Case) -> Attend:
    """The attention function `name` as the scripts call it: training under autocast, generation without."""

    def attend(*inputs, **masks):
        with autocast(case.device, case.dtype) if case.backward else contextlib.nullcontext():
            return ATTENTION[name](*inputs, **masks)

    return attend


def why(error: Exception, caught: Iterable[warnings.WarningMessage] = ()) -> str:
    """As `reasons`, but raises the error again if the GPU itself has crashed: nothing else would run on it."""
    if isinstance(error, torch.AcceleratorError):
        raise error
    return "out of memory at this shape" if out_of_memory(error) else reasons(caught, error)


def reasons(caught: Iterable[warnings.WarningMessage], error: Exception) -> str:
    """Why a kernel raised `error`, in one phrase. PyTorch explains its refusals in warnings, which were `caught`."""
    if not any(sign in str(error) for sign in ("No available kernel", "No viable backend")):
        caught = ()  # another kind of error: the warnings are about something else
    said = dict.fromkeys(str(w.message).split(" (Triggered internally")[0].rstrip(". ") for w in caught)
    found = [r for r in said if "not used because" not in r and "runtime disabled" not in r]
    return "; ".join(found) or first_line(error) or type(error).__name__  # never empty, which would mean permitted
